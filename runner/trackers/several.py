"""Several trackers for one run, each in its own process: `tracker=[wandb,tensorboard]`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated

from pydantic import SerializeAsAny, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import chosen
from meshrunner.runner.trackers.base import RunRecord, Sink, Tracker

NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
"""Name of a tracker, which becomes part of file names."""


class Several(Tracker):
    """Several independent trackers: one that fails or hangs does not affect the others."""

    of: dict[str, Annotated[SerializeAsAny[Tracker], chosen(Tracker)]]
    """Name -> tracker, as set by `tracker=[wandb,tensorboard]`. `tracker.of.wandb.mode=online` changes a key."""

    @model_validator(mode="after")
    def _check_members(self) -> Several:
        if not self.of:
            raise PydanticCustomError("several", "of: names no tracker. Use for example tracker=[wandb,tensorboard]")
        if wrong := [name for name in self.of if not NAME.fullmatch(name)]:
            raise PydanticCustomError("several", f"of: invalid name {wrong[0]!r:.60}. Use letters, digits, _ and -")
        kind, count = Counter(tracker.kind for tracker in self.of.values()).most_common(1)[0]
        if count > 1:
            raise PydanticCustomError(
                "several", f"of: {count} trackers of kind '{kind}' would write the same files. Keep one"
            )
        if any(isinstance(tracker, Several) for tracker in self.of.values()):
            raise PydanticCustomError("several", "of: must not contain `several`. List all trackers in one `of`")
        return self

    @property
    def members(self) -> dict[str, Tracker]:
        return dict(self.of)

    @property
    def active(self) -> bool:
        return any(tracker.active for tracker in self.of.values())

    @property
    def compares(self) -> bool:
        return any(tracker.compares for tracker in self.of.values())

    def open(self, run: RunRecord) -> Sink:
        raise NotImplementedError("open its members instead")
