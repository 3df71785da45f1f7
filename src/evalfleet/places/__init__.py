"""Places that machines come from."""
