"""The `compile` group, and the capture of a whole training step as one CUDA graph."""
