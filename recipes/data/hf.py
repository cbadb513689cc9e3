"""A data set of the Hugging Face hub, streamed: nothing is downloaded but what the training reaches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.data.packing import Documents
from meshrunner.recipes.data.stream import StreamedDocuments, first_line
from meshrunner.recipes.data.text import PackedText
from meshrunner.recipes.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset

PROBE_S = 10.0
"""How long the hub may take to answer at all. Without asking first, the retries of its client take 25 s, then more."""


class HuggingFace(PackedText):
    """Reads a split of a hub data set in its order; what was read stays in the cache and is not asked for again."""

    name: str
    """Name on the hub, such as `allenai/c4`; or a local folder that `datasets` can load."""
    subset: str | None
    """The data set's configuration, such as `en`; null where it has only one."""
    split: str
    """Such as `train`."""
    revision: str | None
    """A commit or tag of the data set; null: its current state (what is in the cache already stays as it was read)."""
    field: str
    """The column that holds the text."""

    def source(self) -> dict[str, Any]:
        parts = {"name": self.name, "subset": self.subset, "split": self.split, "revision": self.revision}
        return {"hub": parts, "field": self.field}

    def documents(self) -> Documents:
        return StreamedDocuments(self._load, self.field, self._explain)

    def nothing(self) -> str:
        return f"data.name: there is no text in '{self.name}', split '{self.split}', column '{self.field}'"

    def _load(self) -> IterableDataset:
        from datasets import load_dataset

        if not Path(self.name).is_dir() and (why := unreachable()):
            raise self._no_hub(why)
        return load_dataset(self.name, self.subset, split=self.split, revision=self.revision, streaming=True)

    def _no_hub(self, why: str) -> ConfigError:
        return ConfigError(
            f"data: cannot reach the Hugging Face hub for '{self.name}' ({why}); use local files with data=jsonl "
            "data.path=... or data=parquet data.path=..."
        )

    def _explain(self, error: Exception) -> ConfigError | None:
        from datasets.exceptions import DatasetNotFoundError

        why = first_line(error)
        if isinstance(error, DatasetNotFoundError):
            return ConfigError(f"data.name: {why} (a private or gated one needs HF_TOKEN)")
        if isinstance(error, ConnectionError | TimeoutError) or "httpx" in type(error).__module__:
            return self._no_hub(why)
        if "BuilderConfig" in why or "Config name is missing" in why:
            return ConfigError(f"data.subset: '{self.name}': {' '.join(str(error).split())[:600]}")
        if "Bad split" in why:
            return ConfigError(f"data.split: '{self.name}': {why}")
        if isinstance(error, OSError | ValueError):
            return ConfigError(f"data: cannot read '{self.name}': {type(error).__name__}: {why}")
        return None


def unreachable() -> str:
    """Why the hub (or its mirror in HF_ENDPOINT) does not answer; empty when it does."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # exported, but lazily

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    outcome = [f"{constants.ENDPOINT} did not answer within {PROBE_S:.0f} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PROBE_S)
            outcome[0] = ""
        except Exception as error:
            outcome[0] = first_line(error)

    # In a thread of its own, because a name server that does not answer knows no timeout.
    asking = threading.Thread(target=ask, daemon=True, name="is the hub there")
    asking.start()
    asking.join(PROBE_S + 2)
    return outcome[0]
