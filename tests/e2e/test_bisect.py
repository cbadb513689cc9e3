"""`meshrunner bisect` finds planted changes among commits, interpreters and settings."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import TINY, meshrunner, run

ROOT = Path(__file__).parents[2]
KEYS = ("data=random", "seq_len=32", "micro_batch=2", "measure_after=1", "tracker=none", "hardware=cpu")
SMALL = (*KEYS, "launch.workers=1", "launch.threads=1", "steps=3", "model.dim=64", "model.n_layers=2")
OWN = ("--", "--config-dir", "conf", "model=gpt", *SMALL)


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def repository(folder: Path, number: int, culprit: int, old: str, new: str) -> Path:
    """Write a repository with a model of its own. Commit `culprit` replaces `old` by `new`; all others change a comment."""
    (folder / "toy").mkdir(parents=True)
    (folder / "conf" / "model").mkdir(parents=True)
    sources = {"toy/gpt.py": "gpt.py", "toy/network.py": "network.py", "conf/model/gpt.yaml": "model/gpt.yaml"}
    text = {
        name: (ROOT / "examples/own_model" / source).read_text().replace("examples.own_model", "toy")
        for name, source in sources.items()
    }
    assert text["toy/network.py"].count(old) == 1
    git(folder, "init", "-b", "main")
    for i in range(number):
        if i == culprit:
            text["toy/network.py"] = text["toy/network.py"].replace(old, new)
        for name, content in text.items():
            (folder / name).write_text(f"# version {i}\n{content}")
        git(folder, "add", "-A")
        git(folder, "commit", "-m", f"Change {i}")
        git(folder, "tag", f"v{i}")
    return folder


RESIDUAL = "        x = self.norm(x)\n"
PLANTED = {
    "loss": ("TruncatedNormal(0.02 /", "TruncatedNormal(0.0200001 /"),
    "memory": (RESIDUAL, "        self.kept = torch.empty(1, dtype=torch.uint8, device=x.device)\n" + RESIDUAL),
}


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("by", PLANTED)
def test_a_commit_that_changes_an_exact_figure_is_found(by: str, tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository", 8, 5, *PLANTED[by])
    ended = meshrunner("bisect", "v0", "main", "--by", by, "--dir", "found", *OWN, cwd=folder)
    assert ended.code == 0, ended
    assert ended.out.splitlines()[-1].endswith("Change 5"), ended
    assert git(folder, "worktree", "list").count("\n") == 1
    again = meshrunner("bisect", "v0", "main", "--by", by, "--dir", "found", *OWN, cwd=folder)
    assert again.out == ended.out
    assert len(list((folder / "found").glob("*/config.yaml"))) == len(list((folder / "found").glob("0*")))


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_override_at_fault_is_found(tmp_path: Path) -> None:
    good = run(*TINY, "launch.workers=1", "hydra.run.dir=good", cwd=tmp_path)
    changes = ("log_every=2", "optimizer.weight_decay=0.2", "micro_batch=2", "loss=chunked")
    bad = run(*TINY, "launch.workers=1", *changes, "hydra.run.dir=bad", cwd=tmp_path)
    assert good.code == bad.code == 0, (good, bad)
    ended = meshrunner("bisect", "good", "bad", "--by", "memory", cwd=tmp_path)
    assert ended.code == 0, ended
    assert ended.out.splitlines()[-1] == "first bad change: micro_batch=2", ended


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_first_bad_value_of_a_sweep_is_found(tmp_path: Path) -> None:
    keys = [each for each in TINY if not each.startswith("micro_batch")]
    swept = ("--", "-m", *keys, "launch.workers=1", "micro_batch=1,1,1,2,2")
    assert "matches 3 combinations" in meshrunner("bisect", "1", "2", "--by", "memory", *swept, cwd=tmp_path).err
    swept = ("--", "-m", *keys, "launch.workers=1", "model.ffn_dim=64,65,66,67,200,201")
    ended = meshrunner("bisect", "64", "201", "--by", "memory", *swept, cwd=tmp_path)
    assert ended.out.splitlines()[-1] == "first bad change: model.ffn_dim=200", ended


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for arguments, expected in (
        (("a", "b", "--by", "mfu"), "expected speed, memory, loss, got mfu"),
        (("a", "b", "--rounds", "2"), "expected at least 3, got 2"),
        (("a",), "the following arguments are required: BAD"),
        (("a", "b"), "bisect: git rev-parse: "),
        (("1", "9", "--", "-m", "micro_batch=1,2"), "9 matches 0 combinations of the sweep, not one"),
    ):
        ended = meshrunner("bisect", *arguments, cwd=tmp_path)
        assert ended.code == 2 and expected in ended.err, ended
