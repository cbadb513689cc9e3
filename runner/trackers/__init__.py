"""W&B and TensorBoard. A separate process feeds them from the run directory and cannot disturb training."""
