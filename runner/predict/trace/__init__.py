"""The recipe on the meta device, recorded as a trace."""
