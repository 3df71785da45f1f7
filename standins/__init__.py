"""Stand-ins for clouds and container engines, for tests and for people who want one."""
