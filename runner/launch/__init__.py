"""Execute one run directory on this node: prepare data, launch workers, handle failures and show progress."""
