"""Profiles the time or the memory of a few training steps."""
