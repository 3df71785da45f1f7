"""The simulator: the real engine in a world of virtual time and seeded faults."""
