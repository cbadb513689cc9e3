"""Command line and YAML -> a checked `Experiment`; the devices of this node."""
