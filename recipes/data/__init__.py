"""The `data` group: text -> packed tokens in a cache -> global batches by index -> each data-parallel rank's slice."""
