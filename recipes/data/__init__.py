"""The `data` group: text -> packed tokens in a cache -> global batches by index -> one slice per data-parallel rank."""
