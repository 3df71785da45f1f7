"""What evalfleet can do, from Python: the command line calls nothing else."""
