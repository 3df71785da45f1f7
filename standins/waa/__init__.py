"""The stand-in for a host with Docker and the Windows Agent Arena image."""
