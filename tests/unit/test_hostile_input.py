"""What nobody can mean is refused by name, in a moment, and nothing is left on disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

from meshrunner.runner import cli
from meshrunner.runner.console import printable
from tests.e2e.command import TINY


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says that is refused; it leaves nothing."""
    assert cli._dispatch(list(arguments)) == 2
    assert list(Path().iterdir()) == []
    said = capsys.readouterr()
    assert said.out == ""
    assert printable(said.err) == said.err
    assert len(said.err) < 5000
    return said.err


NOBODY_MEANS = {
    "steps": f"steps={'9' * 5000}",
    "seed": f"seed={'9' * 30}",
    "optimizer.lr": "optimizer.lr=1e400",
    "launch.env.A": f"launch.env.A={'${a:' * 300}{'}' * 300}",
    "sweep.repeat": f"sweep.repeat={'9' * 30}",
    "sweep.seeds": "sweep.seeds=1000000000",
    "model.n_layers": "model.n_layers=1000000",
    "model.dim": "model.dim=1000000000000",
    "model.ffn_dim": "model.ffn_dim=1000000000000",
    "model.vocab_size": "model.vocab_size=1000000000000",
    "seq_len": "seq_len=1000000000000",
    "micro_batch": "micro_batch=1000000000000",
    "launch.workers": f"launch.workers={10**9}",
    "launch.nodes": f"launch.nodes={10**9}",
    "launch.threads": f"launch.threads={10**9}",
    "launch.port": "launch.port=80000",
    "launch.timeout_minutes": "launch.timeout_minutes=1e300",
    "data.path": "+data.path=\udcff\udcfe",
    "tracker.project": "tracker.project=a\x1b[31mb",
    "log_every": f"log_every={'x' * 20_000}",
    "global_batch": "global_batch=${global_batch}",
    "measure_after": "measure_after=${steps}x${measure_after}",
    "hydra.run.dir": "hydra.run.dir=${hydra.run.dir}",
}


@pytest.mark.slow_but("run*")
@pytest.mark.parametrize("key", NOBODY_MEANS)
@pytest.mark.parametrize("verb", [("place",), ("place", "-m", "seed=1,2"), ("show",)], ids=["one", "sweep", "show"])
def test_what_nobody_means_is_refused_by_name(
    key: str, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if key == "hydra.run.dir" and "-m" in verb:
        key = "seed"
        return
    assert key in refused(capsys, *verb, *TINY, NOBODY_MEANS[key])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("parallelism=fsdp1,fdsp2",), "parallelism: unknown option 'fdsp2'. Did you mean 'fsdp2'?"),
        (("parallelism=fsdp1,fsdp2", "steps=${steps}"), "steps"),
        (("seed=1,2", "stepz=3"), "stepz: unknown key. Did you mean 'steps'?"),
        (("seed=1,2", "steps=0"), "steps: expected a whole number"),
        (("seed=range(0,1000000000000)",), "1,000,000,000,000 combinations"),
        (("optimizer.lr=range(0.0,1.0,0.0000000000001)",), "combinations"),
        (("seed=range(0,1000)", "steps=range(1,1000)"), "seed(1,000) = 999,000 combinations"),
        (("seed=interval(0,1)",), "INTERVAL"),
        (("sweep.repeat=10000",), "sweep.repeat: expected at most 1,000"),
    ],
)
def test_a_refused_sweep_leaves_no_folder_and_no_parents(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "place", "-m", *TINY, *arguments, "hydra.sweep.dir=deep/er/sweep")
    assert says in said
    assert "search path" not in said.lower()


def test_a_refused_start_of_a_sweep_that_exists_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("place", "-m", *TINY, "hydra.sweep.dir=sweeps/one")
    Path("sweeps").mkdir()
    assert cli._dispatch([*sweep, "seed=1,2", "parallelism=nonesuch"]) == 2
    assert [path.name for path in Path().rglob("*")] == ["sweeps"], "an empty folder that was there stays"
    assert cli._dispatch([*sweep, "seed=1,2"]) == 0
    before = {path: path.read_bytes() for path in Path("sweeps").rglob("*") if path.is_file()}
    assert cli._dispatch([*sweep, "seed=1,2", "steps=0"]) == 2
    assert {path: path.read_bytes() for path in Path("sweeps").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--experimental-rerun=x",), "meshrunner resume"),
        (("--config-path=x",), "--config-dir"),
        (("--resolve",), "--cfg"),
        (("--package=model",), "--cfg"),
        (("--cfg=job", "--package=nonesuch"), "nonesuch"),
        (("--cfg=jbo",), "invalid choice"),
        (("--run", "-m"), "cannot be combined"),
        (("--nonesuch\x1b[31m",), "unrecognized"),
        (("--config-dir=nonesuch",), "no such directory"),
        (("--config-name=nonesuch",), "nonesuch"),
    ],
)
def test_flags_without_effect_are_refused(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "place", *arguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ValueError('no luck')\n", "ValueError: no luck"),
        ("x = nonesuch\n", "NameError"),
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_broken_plugin_is_named(
    text: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hydra_plugins

    (folder / "broken").mkdir()
    (folder / "broken" / "unlucky.py").write_text(text)
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    kept = Plugins.instance()
    monkeypatch.setattr(hydra_plugins, "__path__", [*hydra_plugins.__path__, str(folder / "broken")])
    del Singleton._instances[Plugins]
    try:
        said = refused(capsys, "place", *TINY)
    finally:
        Singleton._instances[Plugins] = kept
        sys.modules.pop("hydra_plugins.unlucky", None)
    assert says in said and "unlucky.py" in said and "configuration is wrong" not in said


def test_what_is_printed_carries_nothing_that_a_terminal_obeys() -> None:
    assert printable("a\x1b[31m\x00\x9b\udcff\r") == r"a\x1b[31m\x00\x9b\udcff\x0d"
    assert printable("lines\nand\ttabs, ä 漢 🙂") == "lines\nand\ttabs, ä 漢 🙂"


def test_a_sweep_of_nothing_but_skipped_runs_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshrunner.runner.sweep.results import finish_sweep

    arguments = ("seed=1,2", "sweep.exclude=[seed=1,2]", "hydra.sweep.dir=sweep")
    assert cli._dispatch(["place", "-m", *TINY, *arguments]) == 0
    finish_sweep(folder / "sweep")
    said = capsys.readouterr().err
    assert re.search(r"nothing ran: all 2 runs were skipped:\n  2 x sweep.exclude: seed=1,2", said)
