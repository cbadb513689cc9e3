"""Turn the command line and YAML files into an `Experiment`, the checked configuration of a run. Find this node's devices."""
