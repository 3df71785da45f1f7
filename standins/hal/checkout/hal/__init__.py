"""HAL's package, as far as a run needs it."""
