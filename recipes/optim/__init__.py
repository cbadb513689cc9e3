"""The `optimizer` and `lr_schedule` groups, and gradient clipping."""
