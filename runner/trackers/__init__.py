"""W&B and TensorBoard, fed from a run directory by a separate process that cannot disturb the training."""
