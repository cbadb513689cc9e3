"""Tracks bytes of memory by category and phase."""
