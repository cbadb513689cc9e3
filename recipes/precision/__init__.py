"""The `precision` group."""
