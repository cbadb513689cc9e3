"""Files that survive a killed process, and the cache directory."""
