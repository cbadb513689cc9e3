"""`meshrunner plan`: its answers and its errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrunner.runner import cli
from meshrunner.runner.config.compose import Composer, warn_of_short_sequences
from meshrunner.runner.config.launch_env import ALLOCATOR
from meshrunner.runner.ledger.allocations import CATEGORIES
from meshrunner.runner.predict.allocator.segments import GIB
from meshrunner.runner.predict.forecast import explain, judge
from meshrunner.runner.predict.search import MOST, trials
from meshrunner.runner.sweep import hydra_launchers

SMALL = ("model.n_layers=2", "model.dim=64", "model.vocab_size=512", "model.ffn_dim=128", "seq_len=32", "micro_batch=1")


MEMORY = (
    "memory/peak_active_gib",
    "memory/peak_active_pct",
    "memory/peak_reserved_gib",
    "memory/peak_reserved_pct",
    "memory/alloc_retries",
    "memory/startup_gib",
    "memory/phase",
    "memory/by_category_gib",
    "memory/block_gib",
    "memory/error_pct",
)
SPEED = (
    "perf/wps",
    "perf/mfu",
    "perf/step_time_s",
    "perf/seconds_by_part",
    "perf/exposed_communication_s",
    "perf/calibrated",
    "perf/error_pct",
    "perf/error_basis",
    "perf/pipeline_idle_pct",
)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli._dispatch(["plan", *arguments]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = cli._dispatch(["plan", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == int(found["verdict"] == "does not fit")
    return found


def test_a_run_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "hardware=h100_80gb", *SMALL)
    assert list(found) == ["verdict", "reason", "rank", *MEMORY, *SPEED, "remarks"]
    assert found["verdict"] == "fits" and found["memory/alloc_retries"] == 0
    assert 0 < found["memory/peak_active_gib"] < found["memory/peak_reserved_gib"] < 1
    assert found["memory/peak_active_pct"] == pytest.approx(100 * found["memory/peak_active_gib"] / 79.11, rel=1e-3)
    assert found["perf/step_time_s"] > 0 and found["perf/calibrated"] is False
    assert found["perf/wps"] == pytest.approx(32 / found["perf/step_time_s"])
    text = planned(capsys, "hardware=h100_80gb", *SMALL)
    assert text.startswith("fits: ") and "speed: uncalibrated" in text
    assert re.search(rf"\na block adds +{1024 * found['memory/block_gib']:.2f} MiB of activations", text)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_categories_add_up_to_the_peak(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP1 included, whose units are freed while they are still in use."""
    found = answered(capsys, "hardware=h100_80gb", *SMALL, f"parallelism={layout}")
    parts = found["memory/by_category_gib"]
    assert list(parts) == list(CATEGORIES)
    assert sum(parts.values()) == pytest.approx(found["memory/peak_active_gib"], rel=1e-9)


def test_a_run_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "hardware=cpu", "launch.workers=2", *SMALL)
    assert found["verdict"] == "fits" and "this machine's memory / 2 workers" in found["reason"]
    assert found["memory/peak_reserved_gib"] is None and found["perf/wps"] is None


@pytest.mark.slow
def test_a_grid_in_which_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("-m", "--active", "hardware=h100_80gb", *SMALL, "hardware.memory_gib=1.5001")
    assert cli._dispatch(["plan", *grid, "parallelism=fsdp1,fsdp2"]) == 1
    assert cli._dispatch(["plan", *grid[:-1], "hardware.memory_gib=1.5001,80"]) == 0


def test_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """70 billion parameters on 8 devices are 35 GB of weights and 70 GB of moments on each."""
    found = answered(capsys, "--active", "model=llama2_70b", "hardware=h100_80gb")
    assert found["verdict"] == "does not fit" and "too much; the largest part is" in found["reason"]
    assert found["memory/by_category_gib"]["optimizer"] == pytest.approx(68_976_648_192 * 8 / 8 / GIB, rel=0.01)


@pytest.mark.slow
def test_active_flag_predicts_reserved_memory_near_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Active memory alone would fit, but the allocator reserves more than the device has."""
    small = ("hardware=h100_80gb", *SMALL, "hardware.reserved_elsewhere_gib=0")
    roomy = answered(capsys, *small)
    active, reserved = roomy["memory/peak_active_gib"], roomy["memory/peak_reserved_gib"]
    assert reserved > 1.2 * active
    for gib in (1.01 * active, (active + reserved) / 2, reserved, 1.05 * reserved):
        limit = f"hardware.memory_gib={gib}"
        full, quick = (answered(capsys, *small, limit, *flags) for flags in ((), ("--active",)))
        assert full["verdict"] != "fits" and quick == full
    assert answered(capsys, *small, f"hardware.memory_gib={active / 1.1}", "--active")["verdict"] == "does not fit"
    assert answered(capsys, *small, "--active")["memory/peak_reserved_gib"] is None


@pytest.mark.slow(sampled=True)
def test_active_flag_does_not_call_a_borderline_run_fitting(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("hardware=h100_80gb", "launch.nodes=8", "launch.workers=8", "parallelism=fsdp2_tp")
    run = ("model=llama3_70b", "seq_len=8192", "micro_batch=1", "activation_checkpoint=selective_op", *nodes)
    found = answered(capsys, *run, "--active")
    assert (
        found["verdict"] == "borderline" and found["memory/peak_reserved_gib"] > 77.61 > found["memory/peak_active_gib"]
    )


@pytest.mark.slow
def test_active_flag_predicts_the_same_peak(capsys: pytest.CaptureFixture[str]) -> None:
    deep = ("hardware=h100_80gb", *SMALL, "model.n_layers=12")
    shallow, full = answered(capsys, "--active", *deep), answered(capsys, *deep)
    assert shallow["memory/peak_reserved_gib"] is None
    assert shallow["memory/block_gib"] == full["memory/block_gib"] > 0
    assert shallow["memory/peak_active_gib"] == pytest.approx(full["memory/peak_active_gib"], rel=1e-6)
    assert shallow["perf/step_time_s"] == pytest.approx(full["perf/step_time_s"], rel=0.01)


@pytest.mark.slow
def test_max_finds_the_largest_value_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--active", "hardware=h100_80gb", *SMALL[:-2], "seq_len=262144")
    found = answered(capsys, *arguments, "--max", "micro_batch")
    value = found["max"]["micro_batch"]
    assert found["verdict"] == "fits" and value > 1
    assert answered(capsys, *arguments, f"micro_batch={value}")["verdict"] == "fits"
    assert answered(capsys, *arguments, f"micro_batch={value + 1}")["verdict"] != "fits"


def drawn(file: Path) -> Any:
    """What the page's script is given."""
    (data,) = re.findall(r'id="data">(.*?)</script>', file.read_text(), re.DOTALL)
    return json.loads(data)


@pytest.mark.slow
def test_a_page_with_memory_over_the_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The chart peaks at the figure of the terminal; with --active the model is traced at full depth without reserved memory."""
    deep = ("hardware=h100_80gb", *SMALL, "model.n_layers=12", "--html", str(tmp_path / "page.html"))
    for flags in ((), ("--active",)):
        found, data = answered(capsys, *deep, *flags), drawn(tmp_path / "page.html")
        peak = max(map(sum, zip(*data["categories"].values(), strict=True)))
        assert peak == pytest.approx(found["memory/peak_active_gib"], rel=1e-4)
        assert (data["reserved"] is None) == bool(flags)
        if not flags:
            assert max(data["reserved"]) == pytest.approx(found["memory/peak_reserved_gib"], rel=1e-5)
        assert (data["capacity"], data["memory"]) == (pytest.approx(77.61, abs=0.01), pytest.approx(79.11, abs=0.01))
        assert "backward of block 11" in data["phases"]


@pytest.mark.slow
def test_a_page_of_the_largest_that_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, small = (
        tmp_path / "page.html",
        ("hardware=cpu", "launch.workers=2", "launch.host_memory_gib=0.003", *SMALL[:-1]),
    )
    found = answered(capsys, *small, "--max", "micro_batch", f"--html={file}")
    value = found["max"]["micro_batch"]
    assert value > 1 and f"micro_batch={value} is the largest that fits" in file.read_text()
    peak = max(map(sum, zip(*drawn(file)["categories"].values(), strict=True)))
    assert peak == pytest.approx(found["memory/peak_active_gib"], rel=1e-4)
    assert "--max micro_batch" in file.read_text(), "the whole command"


def test_page_of_an_unplanned_run_shows_the_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    planned(capsys, "parallelism=megatron_fsdp", "hardware=h100_80gb", *SMALL, "--html", str(file))
    assert drawn(file) is None and "megatron_fsdp uses a separate package" in file.read_text()


def test_unwritable_page_is_reported_after_the_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "page.html"
    assert cli._dispatch(["plan", "hardware=cpu", "launch.workers=2", *SMALL, "--html", str(file)]) == 2
    said = capsys.readouterr()
    assert (
        said.out.startswith("fits: ") and said.err == f"--html: {file} cannot be written: No such file or directory\n"
    )


def largest(fits: Callable[[int], bool], allowed: Callable[[int], bool] = lambda value: True) -> int | None:
    """Return what a search finds if `fits` is asked about each number that it tries."""
    search = trials(allowed)
    try:
        value = next(search)
        while True:
            value = search.send(fits(value))
    except StopIteration as end:
        found: int | None = end.value
        return found


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 1000])
def test_search_finds_the_limit(limit: int) -> None:
    assert largest(lambda value: value <= limit) == (limit or None)


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 11, 12, 37, 1000])
@pytest.mark.parametrize("number", [1, 12, 37, 96, 1001])
def test_search_skips_values_that_are_not_allowed(number: int, limit: int) -> None:
    """Only divisors are allowed, as for micro batches of a global batch; 37 has none between 1 and itself."""
    divisors = [value for value in range(1, number + 1) if number % value == 0]
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= limit

    found = largest(fits, lambda value: number % value == 0)
    assert found == max((value for value in divisors if value <= limit), default=None)
    assert set(asked) <= set(divisors) and len(set(asked)) == len(asked), "each is predicted once"


def test_search_stops_at_its_maximum() -> None:
    assert largest(lambda value: True) == MOST
    assert largest(lambda value: True, lambda value: value % 3 == 0) == MOST - 1
    assert largest(lambda value: True, lambda value: False) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["global_batch=48"], "micro_batch", 6),  # 4 does not divide the 6 of a device
        ([], "model.n_kv_heads", 8),  # of 8 heads
        (["micro_batch=2", "launch.workers=2", "parallelism.shard=2"], "parallelism.replicate", 1),
    ],
)
def test_max_skips_values_that_cannot_be_configured(
    capsys: pytest.CaptureFixture[str], overrides: list[str], key: str, value: int
) -> None:
    found = answered(capsys, "--active", "hardware=h100_80gb", *SMALL, *overrides, "--max", key)
    assert found["max"] == {key: value} and found["verdict"] == "fits" and value in found["tried"]


@pytest.mark.slow
def test_search_reports_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = ("hardware=cpu", "launch.workers=2", *SMALL)
    assert cli._dispatch(["plan", *on_cpu, "launch.host_memory_gib=1e-6", "--max", "micro_batch"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("not even micro_batch=1 fits\ndoes not fit: ")
    text = planned(capsys, *on_cpu, "--max", "seed")
    assert text.startswith(f"seed={MOST} fits; the search tries no larger value\nfits: ")
    text = planned(capsys, "hardware=h100_80gb", *SMALL, "parallelism=megatron_fsdp", "--max", "micro_batch")
    assert text.startswith("not planned: parallelism=megatron_fsdp")


@pytest.mark.slow
def test_unknown_rate_leaves_out_only_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP1's memory depends on time. If speed is unknown, freed memory is reusable at once."""
    for flags in ((), ("--active",)):
        arguments = ("hardware=h100_80gb", "parallelism=fsdp1", *SMALL, *flags)
        known, unknown = answered(capsys, *arguments), answered(capsys, *arguments, "hardware.peak.bf16=null")
        assert unknown["verdict"] == "fits" and unknown["perf/wps"] is unknown["perf/step_time_s"] is None
        assert 0 < unknown["memory/peak_active_gib"] <= known["memory/peak_active_gib"]
        assert ["hardware.peak.bf16 of H100 80GB is not known" in each for each in unknown["remarks"]] == [True]
        assert known["remarks"] == [] and list(known) == list(unknown)


def test_unmodelled_allocator_settings_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    setting = "launch.env.PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8"
    text = planned(capsys, "hardware=h100_80gb", *SMALL, "--active", setting)
    assert text.endswith("\nPYTORCH_CUDA_ALLOC_CONF: the prediction ignores garbage_collection_threshold:0.8\n")


@pytest.mark.slow
def test_allocator_settings_are_those_of_the_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)

    def reserved(*overrides: str) -> float:
        found = answered(capsys, "hardware=h100_80gb", *SMALL, "model.vocab_size=32000", "seq_len=512", *overrides)
        return float(found["memory/peak_reserved_gib"])

    expandable, fixed = "expandable_segments:True", "expandable_segments:False"
    grown, segmented = (reserved(f"launch.env.PYTORCH_ALLOC_CONF={each}") for each in (expandable, fixed))
    assert grown < segmented and reserved() == grown, "segments are expandable unless somebody says otherwise"
    both = (f"launch.env.PYTORCH_CUDA_ALLOC_CONF={fixed}", f"launch.env.PYTORCH_ALLOC_CONF={expandable}")
    assert reserved(*both) == grown, "torch prefers today's name"
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", fixed)
    assert reserved() == segmented, "exported"
    assert reserved(both[1]) == grown, "launch.env wins, under whichever name"


def test_run_that_fails_in_its_first_micro_batches_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """It fails before the trace reaches the micro batches from which skipped ones are extrapolated."""
    found = answered(capsys, "hardware=h100_80gb", *SMALL, "global_batch=80", "hardware.memory_gib=1.5005")
    assert found["verdict"] == "does not fit" and found["perf/wps"] > 0


@pytest.mark.slow
def test_startup_memory_decides_if_it_is_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """Unsharded parameters are initialised at start-up. Sharded over many devices, a step can need less than that."""
    shared = ("launch.nodes=64", "activation_checkpoint=full", "model.vocab_size=65536", "seq_len=8")
    shared += ("launch.env.CUBLAS_WORKSPACE_CONFIG=':0:0'",)
    arguments = ("hardware=h100_80gb", *SMALL, *shared, "model.n_layers=12")
    needed = {flags: answered(capsys, *arguments, *flags) for flags in ((), ("--active",))}
    start = needed["--active",]["memory/startup_gib"]
    assert needed["--active",]["memory/peak_active_gib"] < start == needed[()]["memory/startup_gib"]
    too_little = answered(capsys, *arguments, "--active", f"hardware.memory_gib={1.5 + 0.9 * start}")
    assert too_little["verdict"] == "does not fit"
    assert re.match(r"[\d.]+ GiB active at start-up of the [\d.]+ GiB .* GiB too much$", too_little["reason"])


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("parallelism.cpu_offload=true", "not planned: parallelism.cpu_offload"),
        ("parallelism=megatron_fsdp", "not planned: parallelism=megatron_fsdp"),
        ("parallelism.buffers=symmetric", "not planned: parallelism.buffers=symmetric"),
    ],
)
def test_unplanned_run_states_the_reason(capsys: pytest.CaptureFixture[str], override: str, why: str) -> None:
    assert planned(capsys, override, "hardware=h100_80gb", *SMALL).startswith(why)


@pytest.mark.slow
def test_each_combination_gets_the_largest_value_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ("--active", "hardware=h100_80gb", *SMALL[:-1], "hardware.memory_gib=1.6", "launch.workers=2")
    assert cli._dispatch(["plan", "-m", *gpu, "parallelism=ddp,fsdp2", "--max", "micro_batch", "--json"]) == 0
    rows = {row["overrides"][-2]: row["overrides"][-1] for row in json.loads(capsys.readouterr().out)}
    for layout, value in rows.items():
        assert answered(capsys, *gpu, layout, "--max", "micro_batch")["max"] == {
            "micro_batch": int(value.partition("=")[2])
        }
    assert len(rows) == 2


@pytest.mark.slow
def test_the_best_combinations_of_a_plan_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[str, list[list[str]]]] = []
    monkeypatch.setattr(hydra_launchers, "run_sweep", lambda composer, jobs: started.append((composer.verb, jobs)) or 0)
    page = tmp_path / "page.html"
    grid = ("-m", "--active", "hardware=h100_80gb", *SMALL[:-1], "micro_batch=1,2,4,8", "sweep.exclude=[micro_batch=8]")
    found = planned(capsys, *grid, "--top", "2", "--run", f"--html={page}", "--best-by", "precision.kind")
    assert found.count("\n") == 3 and "4 " in found and "micro_batch=4" in found
    assert page.read_text().count("<tr data-row=") == 2 and '"speed":"plan/perf/wps"' in page.read_text()
    assert planned(capsys, *grid, "--top", "1", "--submit")
    (verb, jobs), (later, one) = started
    assert verb == "run" and [[each for each in job if "batch" in each] for job in jobs] == [
        ["micro_batch=4"],
        ["micro_batch=2"],
    ]
    assert all(job[-1] == "sweep.exclude=[]" for job in jobs)
    assert later == "submit" and one == jobs[:1]
    assert planned(capsys, *grid, "hardware.memory_gib=1.5001", "--run", code=1) == "" and len(started) == 2


@pytest.mark.slow_cases("arguments7-global_batch(3)")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--max"], "--max needs a value: --max KEY"),
        (["--html"], "--html needs a value: --html FILE"),
        (["--html="], "--html: expected FILE, got an empty string"),
        (["--html", "--json"], "--html needs a value: --html FILE"),
        (["hardware=cpu", "--max", "optimizer.lr"], "optimizer.lr is 0.001; use a key such as micro_batch"),
        (["hardware=cpu", "--max", "launch.env.FOO"], "launch.env.FOO is not set; use a key such as micro_batch"),
        (["hardware=cpu", "--max", "mcro_batch"], "Did you mean 'micro_batch'?"),
        (["hardware=cpu", "launch.workers=2", "--max", "micro_batch", "global_batch=3"], "global_batch(3)"),
        (["-m", "micro_batch=1,2", "--max", "micro_batch"], "remove micro_batch from the command line"),
        (["-m", "micro_batch=1,2", "--top", "0"], "--top: expected a number of at least 1, got 0"),
        (["-m", "micro_batch=1,2", "--run", "--submit"], "not allowed with argument --run"),
        (["--run"], "--run needs several combinations; add -m"),
        (["--best-by", "model"], "--best-by needs several combinations; add -m"),
        (["model=lama"], "lama"),
        (["--active", "hardware=h100_80gb", "parallelism.shard=3"], "shard(3)"),
        (
            [
                "--active",
                "hardware=h100_80gb",
                *SMALL,
                "launch.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:perhaps",
            ],
            "expandable",
        ),
    ],
)
def test_wrong_arguments_are_reported(capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    assert why in planned(capsys, *arguments, code=2)


def test_verdict_follows_from_the_error_of_the_prediction() -> None:
    """With 100 bytes and an error of 10%, a run that needs at most 90 bytes fits and one that needs over 110 does not."""
    expected = {89: "fits", 90: "fits", 95: "borderline", 110: "borderline", 111: "does not fit"}
    for needed, verdict in expected.items():
        assert judge(needed, 100, 0.1, lambda nbytes, needed=needed: needed <= nbytes) == verdict, needed
    assert judge(120, 100, 0.1, lambda nbytes: nbytes >= 90) == "fits", "it only wants more"
    said = explain("active", 3 * GIB, 2 * GIB, "a GPU", {"parameters": GIB, "optimizer": 2 * GIB})
    assert said == (
        "3.00 GiB active of the 2.00 GiB available to torch on a GPU: 1.00 GiB too much; "
        "the largest part is optimizer, 2.00 GiB"
    )
    said = explain("reserved", 3 * GIB, 2 * GIB, "a GPU", {"parameters": GIB}, flushes=1)
    assert "1.00 GiB too much, but it still fits after 1 allocator cache flush; the largest" in said
    assert "flush" not in explain("reserved", GIB, 2 * GIB, "a GPU", {"parameters": GIB}, flushes=0)


def test_default_length_of_a_large_model_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*overrides: str) -> str:
        composed = Composer("plan", list(overrides)).single_run()
        assert composed is not None
        warn_of_short_sequences([composed, composed])
        return capsys.readouterr().err.removeprefix("meshrunner: ")

    assert said("model=llama3_70b").startswith("seq_len=256 is the default for tiny models; models with model.dim=8192")
    assert not any(map(said, ("model=llama_tiny", "model=hybrid_tiny", "model=moe_tiny", "model=llama4_tiny")))
    assert not said("model=llama3_70b", "seq_len=256")


def test_a_causal_mask_is_not_cast_to_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("parallelism=ddp", "parallelism.context=2", "hardware=h100_80gb", "launch.workers=4")
    assert answered(capsys, *SMALL, *layout)["verdict"] == "fits"
