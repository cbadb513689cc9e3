"""Hydra's command line: overrides, flags, error messages, and keys that have no effect."""
