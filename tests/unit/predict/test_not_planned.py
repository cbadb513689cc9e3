"""Runs that cannot be traced are reported in a sentence by every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrunner.runner import cli
from meshrunner.runner.predict.forecast import NEEDS_VALUES, NOT_PLANNED, why
from meshrunner.runner.predict.pool import MOST

SMALL = ("hardware=h100_80gb", "data=random", "micro_batch=1", "seq_len=16", "launch.workers=1", "parallelism=fsdp2")
SHAPES = (
    "the model cannot be traced: an operator or the model itself needs tensor values, but a trace has only shapes: "
)
HERE = Path(__file__).parents[2]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli._dispatch([*arguments]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return err if code else out


@pytest.mark.slow_but("ByValues*")
@pytest.mark.parametrize(
    ("own", "fault", "line"),
    [
        ("WithoutKernel", "NotImplementedError: beyond_meta::copied: attempted to run", "return torch.ops.beyond_meta"),
        ("ByValues", "RuntimeError: Tensor.item() cannot be called on meta tensors", "return x if x.sum().item() > 0"),
        (
            "OfSizeByValues",
            "NotImplementedError: The register_meta function for torch.nonzero()",
            "return x * x[x > 0]",
        ),
    ],
)
def test_model_that_needs_values_is_not_planned(
    own: str, fault: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model.kind=tests.beyond_meta:{own}"
    for arguments in (SMALL, (*SMALL, "--active"), (*SMALL, "--max", "micro_batch")):
        found = json.loads(said(capsys, "plan", *arguments, model, "--json"))
        assert found["verdict"] == NOT_PLANNED and found["memory/peak_active_gib"] is None
        reason = found["reason"]
        assert reason.startswith(SHAPES + fault) and f"{HERE}/beyond_meta.py, line " in reason and line in reason
    assert fault in " ".join(said(capsys, "show", *SMALL, model, "activation_checkpoint=full").split())


def test_mistake_in_a_custom_class_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    """It would also end a run, and is reported in the same way."""
    mistaken = said(capsys, "plan", *SMALL, "model.kind=tests.beyond_meta:Wrong", "--active", code=2)
    assert "return x @ x.new_empty(1, 3)" in mistaken and len(mistaken.splitlines()) <= 6


def test_error_of_torch_is_the_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No class of the user's is involved."""
    from meshrunner.recipes import pretrain

    def refused(*_: object) -> None:
        raise RuntimeError("torch does not do that\nfor reasons")

    monkeypatch.setattr(pretrain, "update", refused)
    found = json.loads(said(capsys, "plan", *SMALL, "--active", "--json"))
    assert found["verdict"] == NOT_PLANNED
    assert found["reason"].startswith("the model cannot be traced: RuntimeError: torch does not do that (")


def test_compiler_error_is_not_mistaken_for_missing_values() -> None:
    """Compiler messages end with a URL that contains `meta`."""
    about = "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0208.html"
    error = RuntimeError(f"torch.* op returned non-Tensor\nFor more details visit: {about}")
    assert not NEEDS_VALUES.search(str(error)) and why(error) == "RuntimeError: torch.* op returned non-Tensor"


@pytest.mark.slow
def test_other_runs_are_predicted_after_a_process_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    """There are more runs than processes."""
    lengths = [*range(32, 33 + MOST), 16]
    sweep = (f"seq_len={','.join(map(str, lengths))}", "model.kind=tests.beyond_meta:Killed")
    small = [each for each in SMALL if not each.startswith("seq_len")]
    found = json.loads(said(capsys, "plan", "-m", "--active", *small, *sweep, "--json"))
    assert [each["verdict"] for each in found].count("fits") == 1
    others = [each["reason"] for each in found if each["verdict"] != "fits"]
    assert len(others) == MOST + 1 and all("ended with exit status 137" in each for each in others), others
