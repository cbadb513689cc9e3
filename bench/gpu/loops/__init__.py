"""Training loops that `python -m bench gpu` compares with meshrunner. They use no code of meshrunner."""
