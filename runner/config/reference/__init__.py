"""Reference of all configuration keys (meaning, accepted values, default), and JSON schemas of configurations."""
