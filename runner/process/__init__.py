"""The processes of a command: one warm forkserver, signals, process trees."""
