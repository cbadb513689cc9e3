"""Benchmarks: `make bench` runs all of them, `python -m bench NAME...` the named ones."""
