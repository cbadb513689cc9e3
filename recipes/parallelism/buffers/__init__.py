"""Communication buffers at planned addresses: the requests of units, their placement, and the pools that serve them."""
