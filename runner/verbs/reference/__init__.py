"""Commands that explain verbs and keys, print the schema of a configuration, and describe this machine."""
