"""Hybrid models, which combine several kinds of blocks: Mamba-2, attention, feed-forward, experts."""
