"""Reference of all configuration keys with meanings, accepted values and defaults, and JSON schemas of configurations."""
