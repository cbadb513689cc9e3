"""What a configuration may hold: the documentation, expected values and defaults of every key, and their JSON schema."""
