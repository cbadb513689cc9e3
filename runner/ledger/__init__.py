"""Bytes of memory by category and phase."""
