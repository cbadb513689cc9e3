"""Trackers: W&B and TensorBoard. Each has a process that reads the files of a run, so a failing tracker cannot stop training."""
