"""Trackers (W&B and TensorBoard) are separate processes that read the files of a run. If a tracker fails, training continues."""
