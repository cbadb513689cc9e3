"""Stand-ins for the device, each with its reason."""
