"""Commands that read, compare, stop and upload runs."""
