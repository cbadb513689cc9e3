"""Benchmarks that compare meshrunner with a hand-written FSDP2 loop, and meshrunner's options with each other.

    python -m bench [NAME...]     run the named benchmarks, or all if no name is given; `main` below lists the names
    python -m bench published     compare predictions with published runs, and write the tables in docs/measurements/plan.md
    python -m bench gpu           test which options work on this machine's GPUs, and measure their speed; -h lists the flags

A comparison runs its two programs A and B in turn (A B A B ...) or at the same time. Each pair of runs yields one ratio of their
results. Repeated values are printed as their median and, in parentheses, their range.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.bisect import bisect
from bench.emulated import LAYOUTS, STEPS, rounds
from bench.processes import Cost, measure
from bench.tune import tune
from bench.verdict import verdict
from meshrunner.runner.config.devices import cores, cpu_name

BIN = Path(sys.executable).parent
PLAIN = Path(__file__).with_name("plain_fsdp2.py")
SHORT, LONG = 4, 24
"""Steps of a short run and of a long run. Start-up cancels out in the difference between their CPU times."""
PAIRS = 5
CONFIGURATION = [
    "hardware=cpu",  # like the hand-written loop
    "data=random",
    "seq_len=512",
    "optimizer.lr=1e-3",
    "tracker=none",
    "launch.workers=2",
    "launch.threads=1",
]
TOKENS = 2 * 4 * 512
"""Tokens per step: ranks x sequences per rank x sequence length."""


def plain(steps: int, folder: Path) -> tuple[Cost, float]:
    """Run the hand-written loop under torchrun. Return its cost and the seconds from torchrun's start to the end of step 1."""
    out = folder / "plain.json"
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", str(PLAIN), "--steps", str(steps), "--out", str(out)]
    cost = measure(command, folder, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    return cost, json.loads(out.read_text())["first_step"] - cost.begin


def meshrunner(steps: int, folder: Path, *more: str) -> tuple[Cost, float]:
    """Train as `plain` does, but with `meshrunner run`. Return the command's cost and the seconds to the end of step 1."""
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [str(BIN / "meshrunner"), "run", f"steps={steps}", *CONFIGURATION, *more, f"hydra.run.dir={run_dir}"]
    cost = measure(command, folder)
    first = json.loads((run_dir / "events.jsonl").read_text().splitlines()[0])
    return cost, first["time"] - cost.begin


def spread(values: list[float], form: str = ".2f") -> str:
    """Format values as MEDIAN (MINIMUM-MAXIMUM)."""
    return f"{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def _with_the_loops_units(steps: int, folder: Path) -> tuple[Cost, float]:
    """
    Run meshrunner with the same FSDP units as the hand-written loop: each block, and the root for all other parameters.

    By default, meshrunner also makes the embedding and the output projection FSDP units.
    """
    return meshrunner(steps, folder, "wrap=rules")


def throughput(folder: Path) -> None:
    """
    Print the tokens per CPU-second of meshrunner and of the hand-written loop. CPU time is summed over all processes of a run.

    The CPU time of a short run is subtracted from that of a long run, to exclude start-up. The programs run at the same time,
    because a virtual machine that shares its cores with other machines may become slower or faster between two runs.
    """
    ways = {"meshrunner": _with_the_loops_units, "meshrunner, default units": meshrunner, "plain loop": plain}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with ProcessPoolExecutor(len(ways)) as at_once:  # each process counts the time of its own children
        for _ in range(PAIRS):
            spent = []
            for steps in (SHORT, LONG):
                jobs = [at_once.submit(run, steps, Path(tempfile.mkdtemp(dir=folder))) for run in ways.values()]
                spent.append([job.result()[0].cpu_s for job in jobs])
            for name, short, long in zip(ways, *spent, strict=True):
                rates[name].append(TOKENS * (LONG - SHORT) / (long - short))
            print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
    *ours, plain_loop = ways
    for name, values in rates.items():
        print(f"tokens per CPU-second, {name}: {spread(values, '.0f')}")
    for name in ours:
        ratios = [a / b for a, b in zip(rates[name], rates[plain_loop], strict=True)]
        print(f"{name} / {plain_loop}, pair by pair: {', '.join(f'{each:.3f}' for each in ratios)}", flush=True)


def first_step(folder: Path) -> None:
    """Print the seconds from the start of meshrunner or torchrun to the end of the first step. File caches are warm."""
    ours, theirs = [], []
    for _ in range(PAIRS + 1):
        ours.append(meshrunner(SHORT, folder)[1])
        theirs.append(plain(1, folder)[1])
    ours, theirs = ours[1:], theirs[1:]  # the first pair fills the file cache
    print(f"command to first step, meshrunner: {spread(ours)} s")
    print(f"command to first step, torchrun + plain loop: {spread(theirs)} s")
    print(
        f"meshrunner / torchrun, pair by pair: {spread([a / b for a, b in zip(ours, theirs, strict=True)], '.3f')}",
        flush=True,
    )


def commands(folder: Path) -> None:
    """Print the seconds that commands such as `meshrunner --help` and `meshrunner show` take. These commands train nothing."""
    for arguments in (["--help"], ["show"], ["show", "model=llama3_405b"], ["run", "--help"], ["run", "stepz=3"]):
        times = []
        for _ in range(PAIRS):
            cost = measure(["sh", "-c", f"{BIN / 'meshrunner'} {' '.join(arguments)} >/dev/null 2>&1; true"], folder)
            times.append(cost.wall_s)
        print(f"meshrunner {' '.join(arguments)}: {spread(times)} s", flush=True)


OPTIONS = {
    "FSDP1 and FSDP2": ["parallelism=fsdp1,fsdp2"],
    "eager and compiled": ["compile=eager,per_block"],
    "recomputation": ["activation_checkpoint=none,selective_op,full"],
}


def options(folder: Path) -> None:
    """Run each option in OPTIONS 3 times. Print tokens per CPU-second of all ranks, tokens per second per rank, and peak RSS."""
    for title, varied in OPTIONS.items():
        sweep = Path(tempfile.mkdtemp(dir=folder)) / "sweep"
        command = [str(BIN / "meshrunner"), "run", "-m", "steps=13", *CONFIGURATION, *varied, "sweep.repeat=3"]
        measure([*command, f"hydra.sweep.dir={sweep}"], folder)
        found: dict[str, list[dict[str, float]]] = {}
        for run in sorted(sweep.glob("*_repeat-*")):
            found.setdefault(run.name.partition("_")[2].rpartition("_")[0], []).append(
                json.loads((run / "summary.json").read_text())
            )
        print(f"\n{title}: {' '.join(varied)}")
        for name, runs in found.items():
            rate = spread([TOKENS / run["perf/cpu_time_s_median"] for run in runs], ",.0f")
            wps = spread([run["perf/wps_median"] for run in runs], ",.0f")
            rss = spread([run["memory/peak_rss_gib"] for run in runs])
            print(f"  {name}: {rate} tokens per CPU-second, {wps} WPS per device, peak RSS {rss} GiB", flush=True)


def emulated(folder: Path) -> None:
    """Print the CPU time per step of the main threads of emulated and real ranks. The two real ranks differ only by noise."""
    clocked = "profiler.kind=bench.emulated:Clocked"
    command = [str(BIN / "meshrunner"), "run", f"steps={STEPS}", *CONFIGURATION, clocked]
    for layout in LAYOUTS:
        found = rounds(layout, command, folder)
        for name, ranks in (("emulated", [pair for pair, _ in found]), ("real", [pair for _, pair in found])):
            print(f"{layout}, {name}: {spread([sum(pair) / 2 for pair in ranks], '.3f')} s")
        ratios = [sum(alone) / sum(real) for alone, real in found]
        noise = [real[1] / real[0] for _, real in found]
        print(f"{layout}: emulated / real {spread(ratios, '.3f')}, rank 1 / rank 0 {spread(noise, '.3f')}", flush=True)


JOBS = {
    "16 shapes, 32 to 512 tokens per step and rank": [
        (seq, batch) for seq in (32, 64, 96, 128) for batch in (1, 2, 3, 4)
    ],
    "the default shape 16 times, 1024 tokens": [(256, 4)] * 16,
}
"""Two sweeps of 16 jobs. Keys are titles, and values are the shapes of jobs: (sequence length, sequences per step and rank)."""
JOB_STEPS = 5
ROUNDS = 3


def sweep(folder: Path) -> None:
    """Print the seconds that 16 short jobs take as one meshrunner sweep, and as 16 successive launches of torchrun."""
    for title, shapes in JOBS.items():
        ours, theirs, first = [], [], []
        for _ in range(ROUNDS):
            place = Path(tempfile.mkdtemp(dir=folder)) / "sweep"
            lengths, batches = (",".join(map(str, dict.fromkeys(values))) for values in zip(*shapes, strict=True))
            varied = [f"seq_len={lengths}", f"micro_batch={batches}", f"sweep.repeat={len(shapes) // len(set(shapes))}"]
            fixed = _but(CONFIGURATION, "seq_len")
            command = [str(BIN / "meshrunner"), "run", "-m", f"steps={JOB_STEPS}", *fixed, *varied]
            ours.append(measure([*command, f"hydra.sweep.dir={place}"], folder).wall_s)
            summaries = [json.loads(path.read_text()) for path in sorted(place.glob("*/summary.json"))]
            assert [run["state"] for run in summaries] == ["completed"] * len(shapes)
            first += [run["perf/time_to_first_step_s"] for run in summaries[1:]]
            theirs.append(sum(_torchrun(seq, batch, folder) for seq, batch in shapes))
            print(f"{title}: sweep {ours[-1]:.1f} s, torchrun {theirs[-1]:.1f} s", flush=True)
        print(f"{title}: one sweep {spread(ours, '.1f')} s, {len(shapes)} x torchrun {spread(theirs, '.1f')} s")
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        print(f"{title}: torchrun / sweep, round by round: {spread(ratios)}")
        print(f"{title}: launch to first step, after the first job: {spread(first)} s", flush=True)


def _torchrun(seq_len: int, batch: int, folder: Path) -> float:
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", str(PLAIN), "--steps", str(JOB_STEPS)]
    command += ["--seq-len", str(seq_len), "--batch", str(batch), "--out", str(folder / "plain.json")]
    return measure(command, folder, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore").wall_s


RUNS = (100, 1000)


READ_JSON = (
    "import json, pathlib, sys\n"
    "for file in pathlib.Path(sys.argv[1]).glob(sys.argv[2]):\n"
    "    text = file.read_text()\n"
    "    [json.loads(part) for part in (text.splitlines() if file.suffix == '.jsonl' else [text])]"
)


def compare(folder: Path) -> None:
    """Time `meshrunner compare` on sweeps of many runs, and for comparison a script that only parses the runs' JSON files."""
    for count in RUNS:
        _against_reading("compare", _sweep_of(folder, count, "{:04}"), "*/*.json*", "--csv")


ODD = "{:04} [bold] \U0001f600 'a|b' $(x)\n\x1b[31m"
"""Format of directory names that are hard to print, because they contain markup and terminal control characters."""


def status(folder: Path) -> None:
    """Time `meshrunner status` on sweeps, and for comparison a script that only parses the runs' status.json and summary.json."""
    for count, name in ((1000, "{:04}"), (2000, ODD)):
        _against_reading("status", _sweep_of(folder, count, name), "*/s*.json")


def _sweep_of(folder: Path, count: int, names: str) -> Path:
    """Return a new sweep directory with `count` copies of one run. Each copy's config.yaml has another sequence length."""
    run, sweep = folder / "run", Path(tempfile.mkdtemp(dir=folder)) / f"{count} runs"
    if not run.exists():
        short = ["steps=30", "seq_len=32", *_but(CONFIGURATION, "seq_len")]
        measure([str(BIN / "meshrunner"), "run", *short, f"hydra.run.dir={run}"], folder)
    config = (run / "config.yaml").read_text()
    for i in range(count):
        place = sweep / names.format(i)
        place.mkdir(parents=True)
        for name in ("overrides.yaml", "status.json", "summary.json", "environment.json", "events.jsonl"):
            (place / name).write_bytes((run / name).read_bytes())
        (place / "config.yaml").write_text(config.replace("seq_len: 32", f"seq_len: {i + 32}"))
    return sweep


def _against_reading(verb: str, sweep: Path, files: str, *options: str) -> None:
    """Time `meshrunner VERB SWEEP`, and a script that only parses the sweep's JSON files. files: glob pattern of these files."""
    ours, theirs = [], []
    for _ in range(PAIRS):
        ours.append(measure([str(BIN / "meshrunner"), verb, str(sweep), *options], sweep).wall_s)
        theirs.append(measure([sys.executable, "-c", READ_JSON, str(sweep), files], sweep).wall_s)
    print(f"{verb} of {sweep.name}: {spread(ours)} s, reading only the files {files}: {spread(theirs)} s", flush=True)


def _but(arguments: list[str], key: str) -> list[str]:
    return [each for each in arguments if not each.startswith(f"{key}=")]


def main() -> None:
    known = {
        "throughput": throughput,
        "first_step": first_step,
        "commands": commands,
        "options": options,
        "emulated": emulated,
        "sweep": sweep,
        "compare": compare,
        "status": status,
        "verdict": verdict,
        "bisect": bisect,
        "tune": tune,
    }
    if sys.argv[1:2] == ["gpu"]:
        from bench.gpu.bench import gpu

        sys.exit(gpu(sys.argv[2:]))
    if sys.argv[1:2] == ["published"]:
        from bench.published import published

        sys.exit(published())
    chosen = sys.argv[1:] or list(known)
    print(f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}, torch {version('torch')}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            known[name](Path(folder))


main()
