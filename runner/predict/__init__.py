"""Predicts a run: the recipe itself is rehearsed without devices, and what it would do to memory and time is replayed."""
