"""Hybrid models, whose blocks are of several kinds: Mamba-2, attention, feed-forward, experts."""
