"""The `model` group."""
