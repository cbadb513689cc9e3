"""Communication buffers at planned addresses: the requests of units, their placement, and the FSDP2 hooks that serve them."""
