"""Allocator settings, parsed as torch parses PYTORCH_ALLOC_CONF (c10/core/AllocatorConfig.cpp, torch 2.13)."""

from __future__ import annotations

import re
from typing import NamedTuple

from meshrunner.runner.predict.allocator.segments import MIB, round_up

UNIT = 512
"""Every block is a multiple of this many bytes."""


class AllocatorSettings(NamedTuple):
    """The settings in PYTORCH_ALLOC_CONF. Sizes are in bytes."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks of at least this size are never split, and only serve requests of at least this size."""
    large_segment_size: int = 20 * MIB
    """Size of segments for requests between 1 and 10 MiB, and of the large pages of an expandable segment."""
    roundup_power2_divisions: int = 0
    """Number of block sizes between two powers of two; 0 or 1: sizes are only rounded to UNIT."""
    ignored: tuple[str, ...] = ()
    """Settings that are not modelled, such as `garbage_collection_threshold` and other backends."""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """
        Parse the text of the variable.

        Raises:
            ValueError: torch would refuse the value of a modelled setting.
        """
        settings = cls()
        for item in _items(text):
            key, _, value = item.partition(":")
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise ValueError(f"{item}: must be True or False")
                settings = settings._replace(expandable_segments=value == "True")
            elif key == "max_split_size_mb":
                settings = settings._replace(max_split_size=_megabytes(item, value, 1))
            elif key == "large_segment_size_mb":
                settings = settings._replace(large_segment_size=_megabytes(item, value, 11))
            elif key == "roundup_power2_divisions" and not value.startswith("["):
                settings = settings._replace(roundup_power2_divisions=_power_of_2(item, value))
            elif item not in ("", "backend:native"):
                settings = settings._replace(ignored=(*settings.ignored, item))
        if settings.max_split_size is not None and settings.max_split_size < settings.large_segment_size:
            least = settings.large_segment_size // MIB
            raise ValueError(
                f"max_split_size_mb:{settings.max_split_size // MIB}: must be at least {least}, the size of a large segment"
            )
        return settings

    def rounded(self, nbytes: int) -> int:
        """Return the block size for a request."""
        divisions = self.roundup_power2_divisions
        if divisions > 1 and nbytes > UNIT * divisions:
            return round_up(nbytes, (1 << (nbytes.bit_length() - 1)) // divisions)
        return max(UNIT, round_up(nbytes, UNIT))


def _items(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))


def _megabytes(item: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{item}: must be a whole number of at least {least}")
    return int(value) * MIB


def _power_of_2(item: str, value: str) -> int:
    if not value.isdecimal() or int(value).bit_count() != 1:
        raise ValueError(f"{item}: must be a power of 2")
    return int(value)
