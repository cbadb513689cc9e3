"""Communication buffers at planned addresses: the placement of the units' requests, and the pools that serve them."""
