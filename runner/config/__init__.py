"""Turns the command line and YAML into a checked `Experiment`, and finds the devices of this node."""
