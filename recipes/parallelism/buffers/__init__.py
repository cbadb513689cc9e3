"""Communication buffers at planned addresses: planning an address for each unit's buffer, and providing the buffers."""
