"""What `evalfleet demo` runs: real benchmarks from PyPI that need no account, no key and then no network."""
