"""Record evaluations in `evals.jsonl`, and decide whether the held-out loss still falls."""

import json
import math
import time
from pathlib import Path

from meshrunner.recipes.errors import NotRecorded
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.figures import number
from meshrunner.runner.rundir import read_events
from meshrunner.runner.rundir.files import EVALS

LARGEST_EXPONENT = 700.0
"""Losses of at least this value have no perplexity, because e^loss overflows a float (at about 710)."""


def record(run_dir: Path, attempt: int, step: int, loss: float, tokens: int, seconds: float) -> None:
    """Append an evaluation to evals.jsonl. Raise NotRecorded if it cannot be written."""
    row = {
        "step": step,
        "attempt": attempt,
        "time": time.time(),
        "eval/loss": loss if math.isfinite(loss) else None,
        "eval/perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else None,
        "eval/tokens": tokens,
        "eval/time_s": seconds,
    }
    path = run_dir / EVALS
    try:
        with path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
    except OSError as error:
        raise NotRecorded(f"cannot write {path}: {error.strerror}") from error


def reason_to_end(run_dir: Path, experiment: Experiment) -> str:
    """Return the reason why `eval.stop_after` ends a run before its last step, or "" if the run goes on."""
    patience, rows = experiment.eval.patience, read_events(run_dir, EVALS)
    if patience is None or not rows or rows[-1].step >= experiment.steps:
        return ""
    losses = [math.inf if (loss := number(row.get("eval/loss"))) is None else loss for row in rows]
    best = losses.index(min(losses))
    if len(losses) - 1 - best < patience:
        return ""
    return (
        f"eval.stop_after: the held-out loss of step {rows[best].step} ({losses[best]:.4f}) was not improved by the next "
        f"{patience} evaluations"
    )
