"""The `compile` group, and the recording of a whole training step as a CUDA graph."""
