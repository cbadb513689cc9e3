"""Commands that explain verbs and keys, the schema of a configuration, and this machine."""
