"""`python -m bench gpu`: which options work on this machine's GPUs, and how fast they are beside a hand-written loop."""
