"""How speed per device holds as devices are added: the column, its reference, and the shipped experiment."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshrunner.runner import cli
from meshrunner.runner.compare.cells import columns, legend
from meshrunner.runner.compare.comparison import Comparison, compare_runs
from meshrunner.runner.compare.export import as_json
from meshrunner.runner.compare.runs import read_runs
from tests.composed import experiment
from tests.run_dirs import make_run


def run_on(folder: Path, devices: int, wps: float, *overrides: str, state: str = "completed") -> None:
    make_run(
        folder, *overrides, wps=wps, state=state, summary={"world_size": devices, "perf/tokens_per_cpu_s_median": 50.0}
    )


def of(folder: Path, baseline: str | None = None) -> Comparison:
    return compare_runs(read_runs([folder]), baseline)


def scaling(comparison: Comparison) -> list[str]:
    return next((column.cells for column in columns(comparison) if column.title == "scaling"), [])


def test_speed_per_device_against_the_fewest_of_equal_settings(tmp_path: Path) -> None:
    run_on(tmp_path / "a", 16, 90.0, "launch.nodes=8", "parallelism=fsdp1")
    run_on(tmp_path / "b", 2, 100.0, "launch.nodes=1", "parallelism=fsdp1")
    run_on(tmp_path / "c", 4, 97.0, "launch.nodes=2", "parallelism=fsdp1")
    run_on(tmp_path / "d", 2, 200.0, "launch.nodes=1", "parallelism=fsdp2")
    run_on(tmp_path / "e", 4, 150.0, "launch.nodes=2", "parallelism=fsdp2")
    run_on(tmp_path / "f", 4, 150.0, "launch.nodes=2", "parallelism=fsdp1_tp")
    run_on(tmp_path / "g", 8, 300.0, "launch.nodes=4", "parallelism=fsdp2", state="oom")
    comparison = of(tmp_path)
    got = {row.runs[0].path.name: cell for row, cell in zip(comparison.rows, scaling(comparison), strict=True)}
    assert got == {"a": "90.0%", "b": "100.0%", "c": "97.0%", "d": "100.0%", "e": "75.0%", "f": "", "g": ""}
    said = "scaling: WPS per device by wall-clock time, relative to the row"
    assert any(line.startswith(said) for line in legend(comparison))
    raw = {row["runs"][0]["directory"][-1]: row["scaling_pct"] for row in json.loads(as_json(comparison))}
    assert raw["a"] == pytest.approx(90) and raw["f"] is None and raw["g"] is None


@pytest.mark.parametrize(
    "keys", [("launch.workers=1", "launch.workers=4"), ("parallelism.shard=1", "parallelism.shard=4")]
)
def test_workers_and_degrees_count_and_so_does_the_machine(keys: tuple[str, str], tmp_path: Path) -> None:
    for size, key in zip((1, 4), keys, strict=True):
        run_on(tmp_path / "keys" / key, size, 100.0 / size, key)
        run_on(tmp_path / "fact" / key, size, 100.0 / size)  # launch.workers=auto on two machines
    assert scaling(of(tmp_path / "keys")) == scaling(of(tmp_path / "fact")) == ["100.0%", "25.0%"]


def test_the_median_of_repeats_counts(tmp_path: Path) -> None:
    for i, wps in enumerate((90.0, 100.0, 400.0)):
        run_on(tmp_path / f"one{i}", 1, wps, "launch.workers=1")
        run_on(tmp_path / f"two{i}", 2, wps / 2, "launch.workers=2")
    assert scaling(of(tmp_path)) == ["100.0%", "50.0%"]


def test_there_is_no_column_where_nothing_scales(tmp_path: Path) -> None:
    run_on(tmp_path / "a", 2, 100.0, "parallelism.tensor=1")
    run_on(tmp_path / "b", 2, 100.0, "parallelism.tensor=2")
    run_on(tmp_path / "c", 4, 100.0, "parallelism.tensor=1", "seq_len=32")
    comparison = of(tmp_path)
    assert scaling(comparison) == [] and "scaling_pct" not in as_json(comparison)
    assert not any("scaling" in line for line in legend(comparison))


def test_it_stands_beside_the_speed_it_is_of(tmp_path: Path) -> None:
    for cpu in (True, False):
        folder = tmp_path / f"{cpu}"
        for layout in ("fsdp1", "fsdp2"):
            for workers in (1, 2):
                figures = {"world_size": workers} | ({"perf/tokens_per_cpu_s_median": 50.0} if cpu else {})
                make_run(
                    folder / f"{layout}{workers}", f"parallelism={layout}", f"launch.workers={workers}", summary=figures
                )
        titles = [column.title for column in columns(of(folder, "parallelism=fsdp1"))]
        wps = titles.index("WPS per device (p10-p90)")
        beside = ["scaling", "tokens per CPU-second", "vs fsdp1"] if cpu else ["vs fsdp1", "scaling", "loss vs fsdp1"]
        assert titles[wps + 1 : wps + 4] == beside


def test_the_experiment_is_weak_scaling_on_this_machine_or_on_nodes() -> None:
    here = experiment("experiment=scaling", "hydra.mode=RUN")
    assert (here.launch.threads, here.micro_batch, here.global_batch) == (1, 4, None)
    submitted = experiment("experiment=scaling", "hydra.mode=RUN", "hydra/launcher=slurm")
    assert submitted.launch.threads == "auto"


@pytest.mark.slow
def test_its_grid_is_workers_here_and_nodes_under_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._dispatch(["place", "experiment=scaling", "hydra.sweep.dir=here"]) == 0
    jobs = json.loads(Path("here/sweep.json").read_text())["jobs"]
    rounds = [{job["name"] for job in jobs[i : i + 2]} for i in (0, 2, 4)]
    assert rounds == [{f"00{i}_workers-{i + 1}_repeat-{n}" for i in (0, 1)} for n in (1, 2, 3)]
    assert cli._dispatch(["place", "-m", "experiment=scaling", "launch.workers=1,2,4", "hydra.sweep.dir=own"]) == 0
    assert len(json.loads(Path("own/sweep.json").read_text())["jobs"]) == 9, "what is typed replaces the grid"
    capsys.readouterr()
    assert cli._dispatch(["submit", "experiment=scaling", "hydra.sweep.dir=nodes", "--dry-run"]) == 0
    scripts = capsys.readouterr().out
    assert sorted(re.findall(r"^#SBATCH --nodes=(.*)", scripts, re.MULTILINE)) == ["1", "2", "4", "8"]
    arrays = [
        sorted(map(int, each.split(","))) for each in re.findall(r"^#SBATCH --array=([\d,]*)", scripts, re.MULTILINE)
    ]
    assert [[number // 4 for number in each] for each in arrays] == [[0, 1, 2]] * 4, "one run of each in every round"
    assert not Path("nodes").exists()
