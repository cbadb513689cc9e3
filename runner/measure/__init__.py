"""Measurements in the workers: steps, memory, compilation, the peak FLOP/s behind MFU."""
