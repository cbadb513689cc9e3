"""Processes: one warm forkserver, signals, process trees."""
