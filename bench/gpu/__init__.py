"""`python -m bench gpu` tests which options work on this machine's GPUs, and compares their speed with a hand-written loop."""
