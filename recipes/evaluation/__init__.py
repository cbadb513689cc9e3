"""The loss on held-out data."""
