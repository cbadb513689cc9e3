"""Commands that predict runs, and explain them before they start."""
