"""What runs on a machine, or in HAL's own Python: the standard library alone, and nothing of ours."""
