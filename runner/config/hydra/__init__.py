"""The command line and Hydra: overrides, flags, errors, and keys of Hydra's without effect."""
