"""HAL, Princeton's Holistic Agent Leaderboard: its benchmarks and agents, unchanged, on any fleet."""
