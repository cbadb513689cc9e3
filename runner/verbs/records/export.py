"""`meshrunner export`: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshrunner.recipes.checkpoint.on_disk import StoredCheckpoint, named_checkpoints
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.console import naming, one_line, say, shown, warn

if TYPE_CHECKING:
    from meshrunner.recipes.data.tokenizer import Tokenizer
    from meshrunner.runner.config.experiment import Experiment

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def export(arguments: list[str]) -> int:
    """Write the newest intact checkpoint of a run to a new folder. Raise ConfigError if it cannot be read or written."""
    given = parse("export", arguments)
    out = given.out.expanduser().absolute()
    if given.dtype not in DTYPES or given.file_gib < 1:
        raise ConfigError("export: expected --dtype fp32 or --dtype bf16, and --file-gib of at least 1")
    if os.path.lexists(out):
        raise ConfigError(f"export: {out} exists already; choose another folder")
    stored = _newest_intact(given.run)

    from meshrunner.recipes.weights.export import write_weights
    from meshrunner.recipes.weights.hugging_face import config_of
    from meshrunner.runner.config.experiment import check

    experiment, dtype = check(stored.record.config), DTYPES[given.dtype]
    config = config_of(experiment.model, experiment.seq_len)
    tokenizer, files = _tokenizer(experiment, stored)
    tokens = {"bos_token_id": tokenizer and tokenizer.bos, "eos_token_id": tokenizer and tokenizer.eos}
    config |= {"dtype": dtype, "torch_dtype": dtype} | tokens
    for name, content in {"config.json": config, "generation_config.json": tokens}.items():
        files[name] = (json.dumps(content, indent=2) + "\n").encode()
    with naming("exporting the weights"), _new_folder(out) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        number, size = write_weights(stored, experiment.model, folder, dtype, given.file_gib << 30)
    say(f"exported {shown(stored.path)} to {shown(out)}: {number} tensors, {size:,} bytes; {', '.join(sorted(files))}")
    say(f"load the model: transformers.AutoModelForCausalLM.from_pretrained({str(given.out)!r})")
    return 0


def _newest_intact(path: Path) -> StoredCheckpoint:
    """Return the newest checkpoint whose files match their checksums. `path`: a run directory or one checkpoint."""
    found, warnings = named_checkpoints(str(path), "export")
    for warning in warnings:
        warn(warning)
    with naming("verifying the checkpoint"):
        for stored in found:
            if not (damaged := stored.damaged_files(stored.record.files)):
                return stored
            warn(f"skipping the checkpoint {stored.path}: wrong checksum of {', '.join(damaged)}")
    raise ConfigError(f"export: every checkpoint in {path} is damaged (wrong checksums); export another run")


def _tokenizer(experiment: Experiment, stored: StoredCheckpoint) -> tuple[Tokenizer | None, dict[str, bytes]]:
    """Return the tokenizer and its files, or (None, {}) if there is none. Warn if the tokenizer of a text is not known."""
    from meshrunner.recipes.data.text import PackedText
    from meshrunner.recipes.weights.export import tokenizer_files
    from meshrunner.runner.rundir import Summary
    from meshrunner.runner.rundir.files import SUMMARY

    if isinstance(experiment.data, PackedText):
        recorded = (Summary.read(stored.path.parent.parent / SUMMARY).data or {}).get("tokenizer_hash")
        try:
            return tokenizer_files(experiment.data, experiment.data_spec, recorded)
        except ConfigError as error:
            warn(f"exporting without a tokenizer: {one_line(error)}")
    return None, {}


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out`, or removed after an error."""
    temporary = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(out)
    except OSError as error:
        raise ConfigError(f"export: cannot write {out} ({error.strerror or error}); choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
