"""W&B and TensorBoard, fed from a run directory in a process of their own, so that none can touch the training."""
