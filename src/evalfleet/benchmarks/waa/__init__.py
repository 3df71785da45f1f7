"""Windows Agent Arena."""
