"""Measure a run in its workers: steps, memory, compilation, and the peak FLOP/s of the device, from which MFU follows."""
