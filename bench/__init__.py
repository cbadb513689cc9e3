"""Benchmarks: `make bench` runs all of them, and `python -m bench NAME...` runs those named."""
