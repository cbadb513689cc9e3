"""Turn the command line and YAML into a checked `Experiment`, and find the devices of this node."""
