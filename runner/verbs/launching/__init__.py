"""Commands that write run directories and start runs."""
