"""Reference of all configuration keys (meanings, accepted values, defaults), and the JSON schemas of configurations."""
