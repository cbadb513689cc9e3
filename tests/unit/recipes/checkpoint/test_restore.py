"""A checkpoint that torch cannot read ends with a ConfigError, not with torch's own exception."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from meshrunner.recipes.checkpoint.on_disk import METADATA, StoredCheckpoint
from meshrunner.recipes.checkpoint.state_dict import restore
from meshrunner.recipes.errors import ConfigError
from tests.composed import SMALL, experiment

DAMAGED: list[bytes] = [
    b"",
    b"garbage",
    pickle.dumps({"state_dict_metadata": {}}),
    pickle.dumps(Metadata(3)),  # type: ignore[arg-type]
    pickle.dumps(Metadata({"model.norm.weight": BytesStorageMetadata()})),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("content", DAMAGED)
def test_unreadable_metadata_is_a_config_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(content)
    model, unrecorded = experiment(*SMALL).model.build(8), cast(Any, None)
    with pytest.raises(ConfigError, match="does not fit this model and optimizer: rank 0: "):
        restore(StoredCheckpoint(tmp_path, unrecorded), model, torch.optim.SGD(model.parameters()))
