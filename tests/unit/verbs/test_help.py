"""`help KEY`, `run --help`, `--version`, and what is suggested for a key that does not exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrunner import __version__
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli, shipped
from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.commands.parser import parse, split
from meshrunner.runner.commands.usage import describe, overview
from meshrunner.runner.config.hydra.overrides import parse as parse_overrides
from meshrunner.runner.config.reference.json_schema import documentation
from meshrunner.runner.verbs.reference.help import every_key, explanation
from tests.composed import CONF, config
from tests.unit.config.test_every_key import HYDRA


def keys_of(values: Any, prefix: str) -> Iterator[str]:
    """The keys in some YAML, with those of sections and of the entries of lists."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict):
            yield from keys_of(value, f"{name}.")
        for entry in value if isinstance(value, list) and key != "defaults" else ():
            yield from keys_of(entry, f"{name}[].") if isinstance(entry, dict) else ()


def keys_in(file: Path) -> list[str]:
    group = file.parent.relative_to(CONF)
    prefix = "" if str(group) in (".", *shipped.GLOBAL) else f"{group}.".replace("/", ".")
    return list(keys_of(yaml.safe_load(file.read_text()) or {}, prefix))


FILES = sorted(CONF.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_every_key_that_a_file_has_is_explained(file: Path) -> None:
    for key in keys_in(file):
        name, *text = explanation(key).splitlines()
        assert name.split("=")[0].replace("/", ".") == key.replace("/", ".")
        assert len(" ".join(text).split()) > 3, f"{key}: {text}"
        if key != "hydra.run":  # the name of a verb
            assert explanation(key.rpartition(".")[2]), "its last part is enough"


def test_the_files_have_the_keys_that_matter() -> None:
    known = {key for file in FILES for key in keys_in(file)}
    assert {"hydra.launcher.partition", "wrap.rules[].match", "hydra.run.dir", "sweep.exclude", "model.dim"} <= known
    assert len(known) > 150


def test_every_field_has_a_docstring() -> None:
    assert [key.name for key in every_key() if "" in key.documentation()] == []


def test_every_key_says_what_is_expected() -> None:
    for key in every_key():
        assert key.expected() and "anything" not in key.expected(), key.name


@pytest.mark.parametrize("key", HYDRA)
def test_every_key_of_hydra_is_explained(key: str) -> None:
    name, *text = explanation(f"hydra.{key}").splitlines()
    assert name.partition("=")[0].replace("/", ".") == f"hydra.{key}" and text


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("lr", ["optimizer.lr\n", "before the schedule's factor", "number above 0", "8e-5 with model=llama3_405b"]),
        ("lr", ["3e-4 with model=llama2_7b,llama2_13b,llama3_8b", "else 1e-3"]),
        (
            "model.dim",
            ["Width of the residual stream", "default 256; ", "4096 with model=llama2_7b,llama3_8b"],
        ),
        ("micro_batch=8", ["micro_batch\n", "whole number from 1 to 65,536", "default   4"]),
        ("+global_batch", ["whole number at least 1, or null", "null"]),
        ("betas", ["list of 2: number at least 0, below 1", "[0.9, 0.95]"]),
        ("parallelism.prefetch", ["a key of  parallelism=fsdp2,", "fsdp2_tp"]),
        ("reshard_after_forward", ["whole number at least 2, auto, always, never or except_last"]),
        ("compile.mode", ["default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs or null"]),
        ("lr_schedule.total_steps", ["the value of steps"]),
        ("data.path", ["none; you must set it", "data=jsonl,parquet"]),
        ("steps", ["Optimizer steps.", "See also profiler.steps, tune.steps."]),
        ("objective", ["perf/wps_median", "train/final_loss", "memory/startup_peak_active_gib"]),
        ("wrap.rules[0].match", ["wrap.rules[].match", "class name"]),
        ("wrap.rules", ["match: PATTERN_OR_CLASS", "wrap.rules[].reshard_after_forward"]),
        ("rope_scaling", ["model.rope_scaling.factor", "mapping of factor"]),
        ("launch", ["launch.workers", "Processes on each node", "default auto"]),
        ("launch.env", ["mapping of names to text"]),
        (
            "optimizer",
            ["optimizer=OPTION", "adamw (default)", "optimizer.weight_decay", "[number at least 0; default 0.1]"],
        ),
        ("optimizer=adamw", ["AdamW", "Loshchilov", "optimizer.betas = [0.9, 0.95]"]),
        ("parallelism/fsdp1", ["parallelism=fsdp1", "backward_prefetch = pre", "pre, post or none"]),
        ("fsdp1", ["parallelism=fsdp1", "limit_all_gathers"]),
        ("experiment", ["pr165_1d", "The eager 1D table"]),
        ("experiment=pr165_1d", ["override /model: llama2_7b", "seq_len: 2048"]),
        ("hydra/launcher=slurm", ["hydra.launcher.partition = null", "Time limit as quoted text"]),
        ("partition", ["hydra.launcher.partition", "Partition of the jobs"]),
        ("hydra.launcher.time", ["quoted text", "text or null"]),
        ("hydra.run.dir", ["Directory of a single run", "runs/${now:"]),
        ("hydra.sweeper.params.seed", ["The grid of a sweep"]),
        ("hydra.job.chdir", ["Refused: workers run in the current directory"]),
        ("hydra.verbose", ["Has no effect"]),
        ("hydra", ["hydra.sweeper.params"]),
        ("tracker.of.wandb.mode", ["tracker.mode", "offline, online or disabled"]),
    ],
)
def test_what_help_answers(word: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["help", word]) == 0
    said = capsys.readouterr().out
    flat = f"{' '.join(said.split())} "
    for part in parts:
        assert part in said or " ".join(part.split()) in flat, said


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optimizer.lrr", "Did you mean 'optimizer.lr'?"),
        ("n_layer", "Did you mean 'n_layers'?"),
        ("optimiser", "Did you mean 'optimizer'?"),
        ("optimizer=adam", "unknown option 'adam'. Did you mean 'adamw'?"),
        ("hydra.run.dirr", "Did you mean 'hydra.run.dir'?"),
    ],
)
def test_what_does_not_exist(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["help", word]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.out == ""


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["help"], 0), (["help", "a", "b"], 2), (["help", "--x"], 2), (["schema", "a", "b"], 2)):
        assert cli._dispatch(arguments) == code
    said = capsys.readouterr()
    assert said.out == f"{overview()}\n"
    assert said.err.count("usage: meshrunner help TERM") == 2 and "usage: meshrunner schema" in said.err


def test_the_help_text_fits_into_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshrunner.runner.console.columns", lambda: 120)
    wide = {verb: describe(command) for verb, command in COMMANDS.items()} | {"": overview()}
    monkeypatch.setattr("meshrunner.runner.console.columns", lambda: 80)
    for verb, text in wide.items():
        assert cli._dispatch(["help", verb] if verb else ["--help"]) == 0
        said = capsys.readouterr().out
        assert said.split() == text.split()
        examples = COMMANDS[verb].examples if verb else ()
        lines = [line for line in said.splitlines() if not line.endswith(examples or "nothing")]
        assert max(map(len, lines)) <= 80
    listed = said.partition("launching:")[2].partition("`meshrunner")[0]
    assert all(line.startswith("  ") or line.endswith(":") for line in listed.splitlines() if line)


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_explains_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[verb]
    for arguments in (["help", verb], [verb, "--help"], [verb, "-h"]):
        assert cli._dispatch(arguments) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"usage: meshrunner {verb}")
        assert f"\n{command.summary[0].upper()}{command.summary[1:]}.\n" in said
        assert "exit status:\n  0 " in said and bool(re.search("^  1 ", said, re.MULTILINE)) == bool(command.fails_if)
    assert f"  {command.synopsis} " in overview() and command.summary in overview()


@pytest.mark.parametrize("verb", COMMANDS)
def test_examples_are_valid(verb: str) -> None:
    command = COMMANDS[verb]
    for example in command.examples:
        given, *arguments = shlex.split(example)
        assert given == verb
        if command.overrides:
            parse_overrides(verb, split(verb, arguments)[1])
        else:
            parse(verb, arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stauts"], "unknown verb 'stauts'. Did you mean 'status'?"),
        (["compare", "x", "--markdwn"], "unrecognized arguments: --markdwn. Did you mean '--markdown'?"),
        (["place", "--multirn"], "unrecognized arguments: --multirn. Did you mean '--multirun'?"),
        (["plan", "--jsn"], "unrecognized arguments: --jsn. Did you mean '--json'?"),
        (["ls", "--limit", "x"], "argument --limit: expected a whole number, got 'x'."),
        (["compare", "x", "--html"], "--html needs a value: --html FILE."),
        (["compare", ""], "argument DIR: expected DIR, got an empty string."),
        (["resume"], "the following arguments are required: DIR."),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(arguments) == 2
    said = capsys.readouterr()
    assert says in said.err and said.out == ""


def test_a_value_may_begin_with_a_dash() -> None:
    assert parse("compare", ["a", "--sort", "-mfu", "b"]).sort == "-mfu"


@pytest.mark.parametrize("verb", ["run", "show", "place", "submit", "tune"])
def test_help_of_a_verb_lists_every_key_of_the_configuration(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["model=llama3_8b", "optimizer.lr=0.5", "wrap=rules", "profiler=trace"]
    assert cli._dispatch([verb, *overrides, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"usage: meshrunner {verb} " in said
    plain = config(*overrides)
    inner = {
        f"{group}.{key}"
        for group, values in plain.items()
        if isinstance(values, dict) and (group != "tune" or verb == "tune")
        for key in values
        if key not in ("kind", "rope_scaling")
    }
    top = {key for key, value in plain.items() if not isinstance(value, dict)}
    for key in (inner | top | {"model.rope_scaling.factor", "hydra.run.dir"}) - {"experiment"}:
        assert re.search(rf"^ *{re.escape(key)} = ", said, re.MULTILINE), key
    assert "optimizer.lr = 0.5" in said and re.search(
        r"Base learning rate, before the schedule.s factor. \[number above 0;\s+default 3e-4", said
    )
    assert ("hydra.launcher.partition = null" in said) == (verb == "submit")
    assert "model=llama3_8b" in said and "llama_tiny" in said
    assert len(said.splitlines()) <= 330 and max(map(len, said.splitlines())) <= 120


def test_a_help_text_of_ones_own_is_hydras(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["run", "hydra.help.template='mine: ${steps}'", "--help"]) == 0
    assert capsys.readouterr().out == "mine: 30\n"


def test_help_survives_a_class_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = CONF.parent / "examples" / "options"
    assert cli._dispatch(["run", f"--config-dir={examples}", "lr_schedule=sawtooth", "--help"]) == 0
    assert re.search(r"lr_schedule.period = 10 +Steps between two peaks. \[whole", capsys.readouterr().out)
    assert cli._dispatch(["run", "lr_schedule.kind=nonesuch", "--help"]) == 0


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--version"], ["compare", "--version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"meshrunner {__version__}, torch 2.") and f"Python {sys.version.split()[0]}\n" in said


@pytest.mark.parametrize("arguments", [["help", "lr"], ["run", "--help"], ["schema"], ["--version"]])
def test_no_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; from meshrunner.runner import cli; cli._dispatch({arguments!r}); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lr=0.1", "lr: unknown key. Did you mean optimizer.lr?"),
        ("dim=64", "dim: unknown key. Did you mean model.dim?"),
        ("shard=2", "shard: unknown key. Did you mean parallelism.shard?"),
        ("model.seq_len=512", "model.seq_len: unknown key. Did you mean seq_len?"),
        ("model.lr=1", "model.lr: unknown key. Did you mean optimizer.lr?"),
        ("nodes=2", "nodes: unknown key. Did you mean launch.nodes?"),
        ("vocab_size=300", "Did you mean model.vocab_size or data.vocab_size?"),
        ("dir=x", "Did you mean hydra.run.dir or hydra.sweep.dir?"),
        ("every=5", "checkpoint.every (with checkpoint=dcp,dcp_async)"),
        ("path=x", "Did you mean model.path (with model=hf) or data.path (with data=jsonl,parquet)?"),
        ("n_layer=3", "Did you mean 'model.n_layers'?"),
        ("stepz=3", "stepz: unknown key. Did you mean 'steps'?"),
        ("optimizer.lrr=3", "optimizer.lrr: unknown key. Did you mean 'lr'?"),
        ("+lr=0.1", "lr: unknown key. Did you mean optimizer.lr?"),
        ("+optimizer.dim=3", "optimizer.dim: unknown key. Did you mean model.dim?"),
    ],
)
def test_a_key_without_its_group(override: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["place", override]) == 2
    assert says in capsys.readouterr().err


def test_the_docstrings_of_a_class_and_its_bases() -> None:
    from meshrunner.recipes.model.llama import Llama

    found = documentation(Llama)
    assert found["dim"] == "Width of the residual stream."
    assert found["vocab_size"].startswith("Rows of the embedding table, at least as many as") and found["kind"]


def test_values_of_options_that_build_on_others() -> None:
    """As Hydra composes them."""
    for group, option in (("model", "llama3_1b"), ("lr_schedule", "wsd"), ("data", "c4"), ("parallelism", "hsdp2")):
        composed = config(f"{group}={option}", "steps=7")[group]
        found = shipped.values(group, option)
        assert {key: 7 if value == "${steps}" else value for key, value in found.items()} == composed
    with pytest.raises(ConfigError):
        explanation("nonesuch")
