"""Measures steps, memory, compilation and the peak FLOP/s for MFU, in the workers."""
