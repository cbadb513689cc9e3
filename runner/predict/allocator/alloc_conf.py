"""Settings of the CUDA caching allocator, as torch reads them from the environment (c10/core/AllocatorConfig.cpp, torch 2.13)."""

from __future__ import annotations

import re
from typing import NamedTuple

from meshrunner.runner.predict.allocator.segments import MIB, round_up

UNIT = 512
"""Sizes are rounded up to a multiple of it, in bytes."""
INTERVALS = 16
"""Of `roundup_power2_divisions`: sizes from 1 MiB, from 2 MiB, ... from 32 GiB on."""


class AllocatorSettings(NamedTuple):
    """What PYTORCH_ALLOC_CONF says. Sizes are in bytes."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks from this size on are not split, and serve only requests from this size on."""
    max_non_split_rounding: int = 20 * MIB
    """A block of `max_split_size` or more must be less than this larger than the request that it serves."""
    large_segment_size: int = 20 * MIB
    """Of segments for requests between 1 and 10 MiB; of an expandable segment's large pages."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Per interval: how many sizes there are between two powers of two; none: 0 everywhere, only UNIT counts."""
    ignored: tuple[str, ...] = ()
    """Settings that the model does not know, as they stand: `garbage_collection_threshold` and other backends, say."""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Of the variable's text; raises ValueError where torch would refuse a setting that the model knows."""
        settings = cls()
        for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
            key, _, value = item.partition(":")
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise ValueError(f"{item}: neither True nor False")
                settings = settings._replace(expandable_segments=value == "True")
            elif key == "max_split_size_mb":
                settings = settings._replace(max_split_size=_megabytes(item, value, 1))
            elif key == "max_non_split_rounding_mb":
                settings = settings._replace(max_non_split_rounding=_megabytes(item, value, 20))
            elif key == "large_segment_size_mb":
                settings = settings._replace(large_segment_size=_megabytes(item, value, 11))
            elif key == "roundup_power2_divisions":
                settings = settings._replace(roundup_power2_divisions=_divisions(item, value))
            elif item not in ("", "backend:native"):
                settings = settings._replace(ignored=(*settings.ignored, item))
        if settings.max_split_size is not None and settings.max_split_size < settings.large_segment_size:
            least = settings.large_segment_size // MIB
            raise ValueError(f"max_split_size_mb:{settings.max_split_size // MIB}: less than a large segment's {least}")
        return settings

    def rounded(self, nbytes: int) -> int:
        """The size of the block that a request of so many bytes needs."""
        if self.roundup_power2_divisions:
            interval = min(max(nbytes.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)
            divisions = self.roundup_power2_divisions[interval]
            if divisions > 1 and nbytes > UNIT * divisions:
                return round_up(nbytes, (1 << (nbytes.bit_length() - 1)) // divisions)
        return max(UNIT, round_up(nbytes, UNIT))


def _megabytes(item: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{item}: no whole number from {least} on")
    return int(value) * MIB


def _divisions(item: str, value: str) -> tuple[int, ...]:
    """Of `4`, or of `[256:1,512:2,>:4]`: up to 256 MiB 1, from 512 MiB on 2, above 4; what lies between two is not rounded."""
    if not re.fullmatch(r"\d+|\[\d+:\d+(,\d+:\d+)*(,>:\d+)?]", value):
        raise ValueError(f"{item}: neither a number nor a list like [256:1,512:2,>:4]")
    if value.isdecimal():
        return (_power_of_2(item, value),) * INTERVALS
    divisions = [0] * INTERVALS
    last = -1
    for pair in value[1:-1].split(","):
        megabytes, _, text = pair.partition(":")
        number = 0 if text == "0" else _power_of_2(item, text)
        if megabytes == ">":
            divisions[last + 1 :] = [number] * (INTERVALS - last - 1)
        else:
            interval = min(_power_of_2(item, megabytes).bit_length() - 1, INTERVALS - 1)
            if last == -1:
                divisions[:interval] = [number] * interval
            divisions[interval] = number
            last = interval
    return tuple(divisions)


def _power_of_2(item: str, value: str) -> int:
    if int(value).bit_count() != 1:
        raise ValueError(f"{item}: {value} is no power of 2")
    return int(value)
