"""Communication buffers at planned addresses: the placement of the buffers that units request, and pools of placed buffers."""
