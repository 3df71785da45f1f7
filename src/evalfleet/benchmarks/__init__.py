"""Benchmarks: work as data. Each knows its tasks, what a machine must have, and what a result means."""
