"""The trackers W&B and TensorBoard. A separate process sends them the run directory's rows and cannot disturb training."""
