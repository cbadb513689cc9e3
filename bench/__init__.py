"""Benchmarks. `make bench` runs all of them. `python -m bench NAME...` runs only the benchmarks with these names."""
