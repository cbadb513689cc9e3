"""The `data` group: text is packed into cached tokens, and each data-parallel rank reads its slice of every batch."""
