"""The `checkpoint` group: what is saved, when, how it is found again, and going on from it under any layout."""
