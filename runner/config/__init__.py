"""Command line and YAML -> a checked `Experiment`, and what this node offers it."""
