"""The time that operators and collectives take on a device."""
