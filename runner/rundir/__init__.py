"""Run and sweep directories: the currency of every other room. Nobody else knows their files."""
