"""The JSON schema: it accepts every shipped configuration, and finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from meshrunner.recipes.config_keys import flatten
from meshrunner.runner import cli, shipped
from tests.composed import CONF, config
from tests.hugging_face import LLAMA31_8B, config_only

Schema = Callable[..., Draft202012Validator]


@pytest.fixture(scope="module")
def whole() -> Draft202012Validator:
    return validator()


def validator(*group: str) -> Draft202012Validator:
    """Of the schema that the command prints."""
    from meshrunner.runner.verbs.reference.schema import schema_of

    found = json.loads(json.dumps(schema_of(group[0] if group else None)))
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


def problems(validator: Draft202012Validator, document: Any) -> list[str]:
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(document)]


GROUPS = [group for group in shipped.groups() if group not in ("experiment", "hydra/launcher")]
MISSING = {
    "data=jsonl": ["data.path=x"],
    "data=parquet": ["data.path=x"],
    "data=hf": ["data.name=x"],
    "model=hf": [f"model.path={config_only(LLAMA31_8B)}"],
}
ROUNDS = [
    [f"{group}={option}" for group, option in zip(GROUPS, options, strict=True) if option]
    for options in zip_longest(*(shipped.options(group) for group in GROUPS))
]
"""Overrides that together choose every option of every group."""


def test_the_rounds_have_every_option() -> None:
    files = {f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml") if file.parent.name in GROUPS}
    assert {override for chosen in ROUNDS for override in chosen} == files


@pytest.mark.parametrize("chosen", ROUNDS, ids=lambda chosen: chosen[0])
def test_every_option_is_valid(chosen: list[str], whole: Draft202012Validator) -> None:
    needed = [override for each in chosen for override in MISSING.get(each, [])]
    assert problems(whole, config(*chosen, *needed)) == []


@pytest.mark.parametrize("name", shipped.options("experiment"))
def test_every_experiment_is_valid(name: str, whole: Draft202012Validator) -> None:
    assert problems(whole, config(f"experiment={name}", "hydra.mode=RUN")) == []


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONF)))
def test_every_file_is_valid_in_an_editor(file: Path) -> None:
    group = str(file.parent.relative_to(CONF))
    text = yaml.safe_load(file.read_text())
    assert problems(validator("experiment" if group == "." else group), text) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("steps", 1.5),
        ("steps", "many"),
        ("micro_batch", 2**17),
        ("objective", "perf/wps"),
        ("progress", "often"),
        ("model.dim", None),
        ("model.colour", "red"),
        ("model.kind", "lama"),
        ("optimizer.lr", 0),
        ("optimizer.betas", [0.9]),
        ("optimizer.implementation", "fast"),
        ("parallelism.reshard_after_forward", 1),
        ("parallelism.sequence_parallel", "yes"),
        ("launch.workers", "all"),
        ("launch.env", {"A": ["b"]}),
        ("sweep.rerun", ["failed"]),
        ("colour", "red"),
    ],
)
def test_what_is_wrong_is_found_where_it_is(key: str, value: Any, whole: Draft202012Validator) -> None:
    document = config()
    place, _, name = key.rpartition(".")
    (document[place] if place else document)[name] = value
    (problem, *_) = problems(whole, document)
    assert problem.startswith((f"{key}", f"{place}: "))
    assert name in problem or str(value) in problem


def test_several_trackers(whole: Draft202012Validator) -> None:
    document = config("tracker=[wandb,tensorboard]")
    assert problems(whole, document) == []
    document["tracker"]["of"]["wandb"]["mode"] = "sometimes"
    (problem,) = problems(whole, document)
    assert problem.startswith("tracker.of.wandb.mode: 'sometimes' is not one of")


def test_what_is_missing_is_found(whole: Draft202012Validator) -> None:
    document = config()
    del document["optimizer"]["lr"], document["steps"]
    assert sorted(problems(whole, document)) == [
        ": 'steps' is a required property",
        "optimizer: 'lr' is a required property",
    ]


def test_a_class_of_ones_own_is_accepted(whole: Draft202012Validator) -> None:
    document = config()
    document["lr_schedule"] = {"kind": "examples.sawtooth:Sawtooth", "period": 10}
    assert problems(whole, document) == []


@pytest.mark.parametrize(
    ("group", "text", "wrong"),
    [
        ("optimizer", "{defaults: [adamw, _self_], lr: 0.5}", ""),
        ("optimizer", "{lr: '${pick:a}'}", ""),
        ("optimizer", "{lrr: 0.5}", "lrr"),
        ("optimizer", "{kind: adamw, lr: fast}", "fast"),
        ("parallelism", "{kind: fsdp1, prefetch: 2}", "prefetch"),
        ("parallelism", "{kind: fsdp2, prefetch: 2}", ""),
        ("parallelism", "{defaults: [fsdp2], tensor: 0}", "0"),
        ("data", "{kind: jsonl, path: '???'}", ""),
        ("wrap", "{kind: rules, rules: [{match: a, warp: true}]}", "warp"),
        ("experiment", "{defaults: [override /model: llama2_7b], steps: 5, hydra: {mode: MULTIRUN}}", ""),
        ("experiment", "{stepz: 5}", "stepz"),
        ("experiment", "{optimizer: {lr: 0.1}, model: {dim: 64}}", ""),
        ("experiment", "{optimizer: {lrr: 0.1}}", "lrr"),
        ("hydra/launcher", "{time: 3600}", "3600"),
        ("hydra/launcher", "{time: '1:00:00', partition: gpu}", ""),
    ],
)
def test_files_that_people_write(group: str, text: str, wrong: str) -> None:
    found = problems(validator(group), yaml.safe_load(text))
    assert (wrong in " ".join(found)) if wrong else found == []
    assert bool(found) == bool(wrong)


def test_keys_are_described_for_the_editor() -> None:
    def at(group: str) -> str:
        return json.dumps(validator(group).schema)

    for group, part in (("optimizer", "before the schedule's factor"), ("experiment", "Optimizer steps.")):
        assert part in at(group)
    assert "Rows of the embedding table" in at("model") and "Partition of the jobs" in at("hydra/launcher")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["model"], ["experiment"], ["hydra/launcher"]):
        assert cli._dispatch(["schema", *arguments]) == 0
        assert flatten(json.loads(capsys.readouterr().out))
    assert cli._dispatch(["schema", "modle"]) == 2
    assert "no such group: 'modle'. Did you mean 'model'?" in capsys.readouterr().err
