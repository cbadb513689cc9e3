"""Track the bytes of memory held, by category and phase."""
