"""`meshrunner compare --history`: the speed of each configuration over commits or dates."""

import json
from pathlib import Path

import pytest

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.rundir.files import STATUS
from meshrunner.runner.verbs.records.compare import compare
from tests.run_dirs import make_run


def runs(folder: Path, commit: str | None, began: float, speeds: tuple[float, ...], *overrides: str) -> None:
    """Write repeats of one configuration, executed at one commit."""
    for i, wps in enumerate(speeds):
        path = make_run(
            folder / f"{began:.0f}-{i}",
            *overrides,
            wps=wps,
            environment={"git_commit": commit, "packages": {"torch": "2.13.0"}},
        )
        status = json.loads((path / STATUS).read_text())
        (path / STATUS).write_text(json.dumps(status | {"started": began + i}))


def lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert compare(["--history", str(folder)]) == 0
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line
    ]


def test_each_commit_is_compared_with_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs(tmp_path / "b", "b" * 40, 2e9, (95.0, 95.1, 94.9))
    runs(tmp_path / "a", "a" * 40, 1e9, (100.0, 100.1, 99.9))
    runs(tmp_path / "c", "c" * 40, 3e9, (95.1, 94.9, 95.0))
    runs(tmp_path / "d", "c" * 40, 3e9, (50.0, 50.2), "parallelism=fsdp1")
    head, _, *rows = lines(tmp_path, capsys)
    assert [row[head.index("commit")] for row in rows] == ["aaaaaaaa", "bbbbbbbb", "cccccccc", "cccccccc"]
    changes = [row[head.index("change since the line above")] for row in rows]
    assert changes[0] == changes[3] == "" and changes[2].endswith(" ~")
    low, high = (float(each.removesuffix("%")) for each in changes[1].split(" to "))
    assert low < -5.0 < high < -4.5
    assert [row[head.index("runs")] for row in rows] == ["3", "3", "3", "2"]


def test_runs_without_a_commit_are_grouped_by_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = 86400.0
    runs(tmp_path / "a", None, 1e9, (100.0, 101.0))
    runs(tmp_path / "b", None, 1e9 + 7 * day, (100.0, 101.0))
    head, _, *rows = lines(tmp_path, capsys)
    assert "commit" not in head and [row[head.index("runs")] for row in rows] == ["2", "2"]
    assert [row[head.index("change since the line above")] for row in rows] == ["", "(not tested)"]


def test_a_directory_without_completed_runs_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a", state="failed")
    with pytest.raises(ConfigError, match="no run has completed"):
        compare(["--history", str(tmp_path)])


def test_a_time_that_cannot_be_shown_is_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs(tmp_path / "a", "a" * 40, 1e9, (100.0,))
    (status,) = tmp_path.glob("a/*/status.json")
    status.write_text(status.read_text().replace("1000000000.0", "1e300"))
    head, _, row = lines(tmp_path, capsys)
    assert row[head.index("began")].startswith("2106-02-07")
