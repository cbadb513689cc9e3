"""`python -m bench gpu`: which options work on this machine's GPUs, and how fast they are compared with a hand-written loop."""
