"""The `parallelism` group, the device mesh and the wrap plan."""
