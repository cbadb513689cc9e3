"""Starts processes, binds them to CPUs, handles signals and kills process trees."""
