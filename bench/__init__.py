"""Measurements of evalfleet's speed and scale: `python -m bench` lists them. docs/benchmarks.md has figures."""
