"""`meshrunner export` of checkpoints made by hand: files, memory, tokenizers, and what cannot be exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from meshrunner.recipes.checkpoint.on_disk import Record, read_checkpoint, write_record
from meshrunner.recipes.config_keys import with_value
from meshrunner.recipes.data import tokenizer as tokenizers
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.storage import checksum
from meshrunner.recipes.weights.export import write_weights
from meshrunner.recipes.weights.files import stored_tensors
from meshrunner.recipes.weights.hugging_face import config_of
from meshrunner.runner.rundir import Summary
from meshrunner.runner.verbs.records.export import export
from tests.composed import experiment, option
from tests.tokenizer_files import library_texts, odd_texts, write_tokenizer

SHAPES = ("model.dim=16", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=20", "seq_len=32")
SMALL = (*SHAPES, "data=random", "model.vocab_size=50")
LARGE = ("model.dim=512", "model.n_layers=10", "model.ffn_dim=2048")


def write_run(run: Path, *overrides: str) -> dict[str, Tensor]:
    """Write the checkpoint of a run that ended after step 3. Return the values of the parameters."""
    recipe = experiment(*overrides)
    folder = run / "checkpoints" / "step-00000003"
    network = recipe.model.on_meta(recipe.seq_len)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(each.shape, generator=generator) for name, each in network.named_parameters()}
    with warnings.catch_warnings(action="ignore"):
        save({"model": values}, storage_writer=FileSystemWriter(folder), no_dist=True)
    files = {file.name: checksum(file) for file in folder.iterdir()}
    write_record(folder, Record(3, 0, 0, 1, 0, 1, 0, recipe.model_dump(mode="json"), files))
    return values


def refused(run: Path, out: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        export([str(run), str(out), *flags])
    assert not out.parent.is_dir() or not list(out.parent.glob(".tmp-*"))
    return str(caught.value)


def test_files_are_not_larger_than_asked(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    values = write_run(tmp_path / "run", *SMALL)
    stored = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003")
    model = experiment(*SMALL).model
    (tmp_path / "out").mkdir(mode=0o750)
    assert write_weights(stored, model, tmp_path / "out", "float32", 4_000)[0] == 21
    found = stored_tensors(tmp_path / "out")
    names = [f"model-0000{number}-of-00006.safetensors" for number in range(1, 7)]
    assert sorted({each.file.name for each in found.values()}) == names
    tensors = [load_file(tmp_path / "out" / name) for name in names]
    assert all(sum(each.nbytes for each in part.values()) <= 4_000 for part in tensors[:-1])
    assert sum(each.numel() for part in tensors for each in part.values()) == sum(v.numel() for v in values.values())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for part in tensors for each in part.values())
    assert {(tmp_path / "out" / name).stat().st_mode & 0o777 for name in names} == {0o640}


MEASURED = """
import sys
from pathlib import Path
from meshrunner.recipes.checkpoint.on_disk import read_checkpoint
from meshrunner.recipes.weights.export import write_weights
from meshrunner.runner.config.experiment import check

def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024

stored = read_checkpoint(Path(sys.argv[1]))
model = check(stored.record.config).model
before = peak()
write_weights(stored, model, Path(sys.argv[2]), "float32", 10 << 20)
print(len([*Path(sys.argv[2]).glob("*.safetensors")]), peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [2048, 20480])
def test_memory_is_one_file_and_one_tensor(vocab_size: int, tmp_path: Path) -> None:
    values = write_run(tmp_path, "data=random", *LARGE, f"model.vocab_size={vocab_size}")
    (tmp_path / "out").mkdir()
    stored = tmp_path / "checkpoints" / "step-00000003"
    command = [sys.executable, "-c", MEASURED, str(stored), str(tmp_path / "out")]
    files, grown = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    total, largest = (function(value.nbytes for value in values.values()) >> 20 for function in (sum, max))
    file = max(10, largest)
    assert files > 10 and grown < file + largest + 32 < total / 2  # the modules to read and write take about 20 MiB


NO_FAMILY: dict[str, tuple[dict[str, Any], ...]] = {
    "hybrid_tiny": ({"kind": "hybrid"},),
    "moe_tiny": ({"dense_layers": 1}, {"dense_layers": 0, "experts.shared_ffn_dim": 256}),
    "mixtral_8x7b": (
        {"experts.balance": "bias"},
        {"experts.routing": "balanced"},
        {"experts.normalize": False},
        {"experts.score": "sigmoid"},
        {"experts.route_scale": 2.0},
        {"qkv_bias": True},
    ),
    "llama_tiny": ({"rope_theta": None}, {"qk_norm": True, "qkv_bias": True}),
}
"""Changed keys of shipped models. The message names the last key."""


def test_models_that_no_family_expresses_are_refused() -> None:
    for name, cases in NO_FAMILY.items():
        for changes in cases:
            keys = option("model", name)
            for key, value in changes.items():
                keys = with_value(keys, key, value)
            model = Model.resolve(keys["kind"]).model_validate(keys)
            assert isinstance(model, Model)
            with pytest.raises(ConfigError, match=f"^export: .* model.{key}={value}$"):
                config_of(model, 16)


def test_wrong_arguments_and_damaged_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert f"export: no such directory: {run}" in refused(run, out)
    run.mkdir()
    assert f"export: {run} contains no usable checkpoint" in refused(run, out)
    write_run(run, *SMALL)
    assert "expected --dtype fp32 or --dtype bf16" in refused(run, out, "--dtype", "fp8")
    assert "--file-gib of at least 1" in refused(run, out, "--file-gib=0")
    assert f"export: {run} exists already; choose another folder" in refused(run, run)
    (tmp_path / "file").touch()
    assert "cannot write" in refused(run, tmp_path / "file" / "out")
    with monkeypatch.context() as full:
        full.setattr("meshrunner.recipes.weights.export.save_file", no_space)
        assert f"cannot write {out} (No space left on device)" in refused(run, out)
    data = next((run / "checkpoints" / "step-00000003").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert "every checkpoint in" in refused(run, out)
    data.unlink()
    assert "is missing" in refused(run, out)
    assert not out.exists()


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def text_run(run: Path, *overrides: str) -> str:
    """Write the checkpoint of a run on text, and prepare its data. Return the hash of its tokenizer."""
    text = run.parent / "text.jsonl"
    if not text.exists():
        text.write_text("".join(json.dumps({"text": text}) + "\n" for text in library_texts(40)))
    words = (*SHAPES, "model.vocab_size=1000", "data=jsonl", f"data.path={text}", *overrides)
    write_run(run, *words)
    recipe = experiment(*words)
    spec = DataSpec(1000, recipe.seq_len, recipe.seed)
    recipe.data.prepare(spec)
    recipe.data.produce(spec)
    return str(recipe.data.open(spec).describe()["tokenizer_hash"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHRUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", ["trained", "given"])
def test_transformers_tokenizes_like_the_run(kind: str, bos: bool, tmp_path: Path, cache: Path) -> None:
    from transformers import AutoTokenizer

    given = write_tokenizer(tmp_path) if kind == "given" else None
    text_run(tmp_path / "run", f"data.bos={bos}", *([f"data.tokenizer={given}"] if given else []))
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model = next((cache / "tokens").glob("*/tokenizer.model")).read_bytes()
    ours = tokenizers.load_tokenizer(model, "")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = library_texts(200) + odd_texts()
    begin = [ours.bos] if bos or given else []  # the post-processor of a given tokenizer is kept
    own = {"split_special_tokens": True} if given else {}
    for text, ids in zip(texts, ours.encode(texts, 1), strict=True):
        assert theirs(text, **own)["input_ids"] == begin + ids
        assert theirs(text, add_special_tokens=False, **own)["input_ids"] == ids
        if not given:
            assert theirs.decode(ids) == text.replace("▁", " ")
    assert theirs.eos_token_id == ours.eos and len(theirs) == ours.vocab
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings == {"bos_token_id": ours.bos if bos else None, "eos_token_id": ours.eos}
    if given:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (given / name).read_bytes()


def test_unknown_tokenizer_is_left_out_with_a_warning(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    hashed = text_run(run)
    for number, (recorded, warning) in enumerate(((hashed, ""), ("0", "has changed"), (hashed, "is not in the cache"))):
        Summary(data={"tokenizer_hash": recorded}).write(run / "summary.json")
        if number == 2:
            shutil.rmtree(cache)
        assert export([str(run), str(tmp_path / str(number))]) == 0
        assert (tmp_path / str(number) / "tokenizer.json").exists() == (not warning)
        assert warning in capsys.readouterr().err
        eos = json.loads((tmp_path / str(number) / "config.json").read_text())["eos_token_id"]
        assert eos == (None if warning else 2)


def test_sentencepiece_models_without_equivalent_are_left_out_with_a_warning(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, options in enumerate(({"add_dummy_prefix": True}, {"model_type": "unigram"})):
        monkeypatch.setattr(tokenizers, "OPTIONS", tokenizers.OPTIONS | options)
        model = tmp_path / f"{number}.model"
        model.write_bytes(tokenizers.train_tokenizer(library_texts(10), 700))
        text_run(tmp_path / f"run{number}", f"data.tokenizer={model}")
        assert export([str(tmp_path / f"run{number}"), str(tmp_path / str(number))]) == 0
        assert f"'{model}' has no equivalent tokenizer.json" in capsys.readouterr().err
        assert not list((tmp_path / str(number)).glob("tokenizer*"))
