"""What people and other tools see of a run: all of it folded from the journal, never from the engine."""
