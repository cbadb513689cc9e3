"""What the workers measure: steps, memory, compilation, the peak that MFU is a share of."""
