"""Commands that predict and explain runs before they start."""
