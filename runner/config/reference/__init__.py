"""Reference of the configuration: documentation, expected values and defaults of every key, and JSON schemas."""
