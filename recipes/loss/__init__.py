"""The `loss` group."""
