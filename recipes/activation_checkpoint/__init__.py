"""The `activation_checkpoint` group: which activations are saved for backward and which are recomputed."""
