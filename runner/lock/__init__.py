"""Records in meshrunner.lock.json what a configuration determines exactly, and finds what a change to the code changed."""
