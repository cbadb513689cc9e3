"""Run and sweep directories. No other room knows the names of their files."""
