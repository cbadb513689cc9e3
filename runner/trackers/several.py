"""Several trackers of one run, each in a process of its own: `tracker=[wandb,tensorboard]`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated

from pydantic import SerializeAsAny, model_validator
from pydantic_core import PydanticCustomError

from meshrunner.recipes.option import chosen
from meshrunner.runner.trackers.base import RunRecord, Sink, Tracker

NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
"""It becomes part of file names."""


class Several(Tracker):
    """Several trackers. One that fails or hangs does not take the others along."""

    of: dict[str, Annotated[SerializeAsAny[Tracker], chosen(Tracker)]]
    """Name -> tracker. `tracker=[wandb,tensorboard]` fills it with these options; `tracker.of.wandb.mode=online` sets a key."""

    @model_validator(mode="after")
    def _each_by_itself(self) -> Several:
        if not self.of:
            raise PydanticCustomError("several", "`of` names no tracker; tracker=[wandb,tensorboard] chooses two")
        if wrong := [name for name in self.of if not NAME.fullmatch(name)]:
            raise PydanticCustomError("several", f"of: {wrong[0]!r:.60} is no name: letters, digits, _ and - make one")
        kind, count = Counter(tracker.kind for tracker in self.of.values()).most_common(1)[0]
        if count > 1:
            raise PydanticCustomError("several", f"of: {count} trackers of kind '{kind}' would write to the same files")
        if any(isinstance(tracker, Several) for tracker in self.of.values()):
            raise PydanticCustomError("several", "of: several trackers inside several; list them all in one")
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
        raise NotImplementedError("each of its members is opened by itself")
