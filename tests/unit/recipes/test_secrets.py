"""Values of secret environment variables are written nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshrunner.recipes.secrets import is_secret
from meshrunner.runner import cli
from meshrunner.runner.config.devices import NodeDevices
from meshrunner.runner.launch.environment import environment
from tests.e2e.command import TINY

SECRET = ["HF_TOKEN", "WANDB_API_KEY", "SLURM_JWT", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "mytoken", "CREDENTIALS"]
PUBLIC = ["TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY", "NCCL_DEBUG", "SLURM_JOB_ID", "KEYBOARD", "CUDA_VISIBLE_DEVICES"]


def test_names() -> None:
    assert [name for name in SECRET + PUBLIC if is_secret(name)] == SECRET


def test_they_stay_out_of_environment_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", "hush")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    recorded = environment(NodeDevices("cpu", 1, 1), {}, dict(os.environ)).environment
    assert recorded["SLURM_JOB_ID"] == "7" and "hush" not in str(recorded)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("launch.env.HF_TOKEN=hush", "launch.env: the name HF_TOKEN suggests a secret value"),
        ("launch.env.OTHER=${oc.env:HF_TOKEN}", "launch.env.OTHER"),
        ("launch.env.OTHER=x-${oc.env:HF_TOKEN,none}", "launch.env.OTHER"),
    ],
)
@pytest.mark.parametrize("sweep", [False, True])
def test_they_are_refused_in_the_configuration(
    override: str,
    named: str,
    sweep: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.chdir(tmp_path)
    grid = ["-m", "seed=1,2"] if sweep else []
    assert cli._dispatch(["place", *grid, *TINY, override]) == 2
    said = capsys.readouterr()
    assert named in said.err and "hush" not in said.err + said.out
    assert list(tmp_path.iterdir()) == []


def test_others_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUBLIC", "x")
    monkeypatch.chdir(tmp_path)
    assert cli._dispatch(["place", *TINY, "launch.env.NCCL_IB_PKEY=${oc.env:PUBLIC}", "hydra.run.dir=out"]) == 0
    assert "NCCL_IB_PKEY: x" in (tmp_path / "out" / "config.yaml").read_text()
