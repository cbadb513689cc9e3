"""Processes: the forkserver, signals, process trees."""
