"""Communication buffers in planned places: what units ask for, where it lies, and the hooks of FSDP2 that serve it."""
