"""Trackers: W&B and TensorBoard. A separate process passes them the rows of a run, so a failing tracker cannot stop training."""
