"""Reference of the configuration: the documentation, expected values and default of every key, and JSON schemas."""
