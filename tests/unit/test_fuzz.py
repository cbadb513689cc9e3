"""Seeded command lines that nobody types on purpose: each is obeyed or refused by name, and nothing else happens."""

from __future__ import annotations

import random
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import cli
from meshrunner.runner.console import printable
from tests.composed import CONF, config
from tests.e2e.command import TINY

FAST, ALL = 200, 2000
BATCH = 50
"""Command lines of a test: one that fails names its seed."""

VALUES = (
    *(
        "",
        " ",
        "''",
        '""',
        "'",
        '"',
        "\\",
        ",",
        ",,",
        "=",
        "==",
        ".",
        "..",
        "/",
        "~",
        "+",
        "-",
        "--",
        "*",
        "?",
        "%",
        "#",
        "@",
        "!",
    ),
    *(
        "0",
        "-0",
        "-1",
        "1.5",
        "1e400",
        "-1e400",
        "1e-400",
        "nan",
        "inf",
        ".inf",
        "0x10",
        "1_000",
        "1:00:00",
        "09",
        "1e3",
        "--1",
    ),
    *("9" * 30, "9" * 5000, "1" + "0" * 19, str(2**63), str(2**64), "-" + "9" * 20, "10000000", "65536"),
    *("true", "True", "yes", "off", "null", "NULL", "None", "~", "auto", "???", "always", "_self_", "none"),
    *(
        "[]",
        "{}",
        "[1]",
        "[1,2]",
        "{a:1}",
        "[",
        "]",
        "{",
        "}",
        "[[",
        "{a",
        "[1,",
        "{a:b:c}",
        "[a=b c=d]",
        "['a=b']",
        "[null]",
    ),
    *("(" * 300, "[" * 40 + "1" + "]" * 40),
    *(
        "${",
        "${}",
        "${seed}",
        "${steps}",
        "${nonesuch}",
        "${oc.env:HOME}",
        "${oc.env:NONESUCH}",
        "${now:%Y}",
        "${short_id:}",
    ),
    *(
        "${model.dim}",
        "${hydra.job.num}",
        "${hydra:run.dir}",
        "${oc.decode:'['}",
        "${pick:a,{a:1}}",
        "${a:${b:${c}}}",
        r"\${seed}",
    ),
    *(
        "${seed}${seed}",
        "x${parallelism}",
        "${parallelism}",
        "${.}",
        "${..}",
        "${...seed}",
        "${oc.select:x}",
        "${oc.create:{a:1}}",
    ),
    *(
        "ä",
        "漢字",
        "🙂",
        "\u202e",
        "\u2028",
        "\ufeff",
        "\udcff",
        "\ud800x",
        "\x00",
        "\x1b[31m",
        "\x07",
        "\x9b",
        "\r",
        "a\nb",
        "\t",
    ),
    *(
        "!!python/object:os.system",
        "!!int '3'",
        "!tag x",
        "&a 1",
        "*a",
        "<<: *a",
        "---",
        "- a",
        "a: b",
        "|",
        ">",
        "%YAML 1.1",
    ),
    *(
        "a" * 300,
        "a" * 5000,
        "x," * 500 + "x",
        "1," * 30 + "1",
        "/" + "a/" * 200,
        "a b c",
        "a=b",
        "a=b=c",
        "1,2",
        "a,b",
        "1,true",
    ),
    *(
        "range(0,3)",
        "range(0,10000000000)",
        "range(3)",
        "range(1,0)",
        "range(0,1,0)",
        "range(a,b)",
        "interval(0,1)",
        "glob(*)",
    ),
    *(
        "choice(1,2)",
        "shuffle(1,2)",
        "sort(2,1)",
        "tag(a,1)",
        "int(1.5)",
        "str(1)",
        "float(x)",
        "bool(2)",
        "nonesuch(1)",
        "int(",
    ),
    *(
        "fsdp1",
        "fdsp2",
        "fsdp1,fdsp2",
        "llama_tiny",
        "adamw",
        "json:loads",
        "os:system",
        "builtins:int",
        "perf/wps_median",
    ),
)
FLAGS = (
    *("-m", "--multirun", "-r", "--run", "--cfg", "--cfg=job", "--cfg=x", "-c", "--resolve", "--package=model", "-p"),
    *("--info", "--info=x", "--help", "-h", "--hydra-help", "--version", "--config-dir=.", "--config-dir=/nonesuch"),
    *(
        "--config-name=x",
        "--config-path=.",
        "--experimental-rerun=x",
        "--nonesuch",
        "-x",
        "--",
        "-",
        "---",
        "--dry-run",
        "\x1b",
    ),
)
HYDRA = (
    *(
        "hydra.run.dir",
        "hydra.sweep.dir",
        "hydra.sweep.subdir",
        "hydra.mode",
        "hydra.verbose",
        "hydra.job.chdir",
        "hydra.job.name",
    ),
    *(
        "hydra.job.env_set",
        "hydra.job.env_copy",
        "hydra.searchpath",
        "hydra.callbacks",
        "hydra.output_subdir",
        "hydra.sweeper.params",
    ),
    *(
        "hydra.sweeper.max_batch_size",
        "hydra/launcher",
        "hydra/sweeper",
        "hydra.launcher",
        "hydra/job_logging",
        "hydra.nonesuch",
    ),
)
OPTIONS = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/*.yaml"))
WRITES_ELSEWHERE = ("hydra.run.dir", "hydra.sweep.dir", "hydra.searchpath")


def keys(plain: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in plain.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


class Line(NamedTuple):
    """A generated command line."""

    arguments: list[str]
    wrong: str
    """The key, where only one override is not an ordinary one."""


def line(seed: int, known: list[str]) -> Line:
    dice = random.Random(seed)
    verb = dice.choice(
        [
            "place",
            "place",
            "place",
            "show",
            "run",
            "submit",
            "compare",
            "ls",
            "status",
            "resume",
            "cancel",
            "doctor",
            "x",
        ]
    )
    if verb in ("compare", "ls", "status", "resume", "cancel", "doctor", "x"):
        return Line([verb, *(dice.choice([*FLAGS, *VALUES]) for _ in range(dice.randint(0, 3)))], "")
    nasty = [_override(dice, known) for _ in range(dice.choice([1, 1, 1, 2, 4]))]
    words = [*TINY, *nasty, *dice.choices(FLAGS, k=dice.choice([0, 0, 0, 1, 2]))]
    words += ["-m"] * (dice.random() < 0.3)
    dice.shuffle(words)
    needed = {"run": ["--cfg=job"], "submit": ["--dry-run"]}.get(verb, [])
    alone = nasty[0].partition("=")[0].lstrip("+~") if len(nasty) == 1 and len(words) == len(TINY) + 1 else ""
    return Line([verb, *needed, *words], alone)


def _override(dice: random.Random, known: list[str]) -> str:
    key = dice.choice([*known, *known, *HYDRA])
    if dice.random() < 0.15:  # a key that is nearly one
        cut = dice.randrange(len(key))
        key = key[:cut] + dice.choice(["", "x", ".", "\x1b", "ä", "..", "@"]) + key[cut + 1 :]
    value = dice.choice(VALUES)
    if dice.random() < 0.25:
        value = dice.choice(
            [f"{value},{dice.choice(VALUES)}", f"'{value}'", f"[{value}]", f"{{a: {value}}}", value * 2]
        )
    if "/" not in key and dice.random() < 0.1:
        key, _, value = dice.choice(OPTIONS).partition("/")
        value += dice.choice(["", "x", ",", ",nonesuch"])
    return (
        dice.choice(["", "", "", "", "+", "++", "~"])
        + key
        + dice.choice(["=", "=", "=", "=", "=", "=", "", "@x="])
        + value
    )


def escapes(text: str) -> bool:
    """Whether a command line may write outside the current directory, which is no fault, but spoils the test."""
    return any(key in text for key in WRITES_ELSEWHERE) and ("=/" in text or ".." in text or "HOME" in text)


@pytest.fixture(scope="module")
def known() -> list[str]:
    return sorted(keys(config()))


def check(seed: int, known: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The complaint about a command line; empty if there is none."""
    arguments, wrong = line(seed, known)
    if any(map(escapes, arguments)):
        return ""
    try:
        code: Any = cli._dispatch(arguments)
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        return traceback.format_exc()
    finally:
        said = capsys.readouterr()
        left = sorted(path.name for path in folder.iterdir())
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for text in said:
        if printable(text) != text or "Traceback" in text:
            return f"prints {text!r}"
    if code not in ((0, 2) if arguments[0] != "compare" else (0, 1, 2)):
        return f"exit status {code}"
    if code and left:
        return f"leaves {left}"
    if code == 2 and not said.err and arguments[0] in ("place", "show", "run"):
        return "says nothing"
    # Of a key with a dot, the part that does not exist may be named; of a group with a package (GROUP@PACKAGE), the group.
    names = (wrong, wrong.rpartition(".")[0] or wrong, wrong.partition("@")[0])
    if code == 2 and wrong and not any(printable(name)[:60] in said.err for name in names):
        return f"does not name {wrong!r}: {said.err}"
    return ""


def run(seeds: range, known: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complaints = {seed: complaint for seed in seeds if (complaint := check(seed, known, folder, capsys))}
    for seed, complaint in complaints.items():
        print(f"--- {seed}: {line(seed, known).arguments!a}"[:2000], complaint[-3000:], sep="\n", file=sys.stderr)
    assert not complaints, f"{len(complaints)} of {len(seeds)}: {list(complaints)}"


def nothing_to_execute(run_dir: Path, **_: Any) -> None:
    """In the place of what starts workers; raises ConfigError as it does where there is no run directory."""
    assert not (run_dir / "config.yaml").exists()
    raise ConfigError(f"{run_dir} is not a run directory")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshrunner.runner.launch.execute.execute", nothing_to_execute)
    return tmp_path


@pytest.mark.parametrize("first", range(0, FAST, BATCH))
def test_command_lines(first: int, known: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(range(first, first + BATCH), known, folder, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, ALL, BATCH))
def test_more_command_lines(first: int, known: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(range(first, first + BATCH), known, folder, capsys)
