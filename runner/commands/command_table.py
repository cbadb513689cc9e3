"""All verbs of the command line (`meshrunner VERB`). To add a verb, add a `Command` here and a module in runner/verbs."""

from meshrunner.runner.commands.declaration import Argument, Command, Flag

DIRECTORY = Argument("directory", "DIR", "a run directory or a sweep directory")
DIRECTORIES = Argument("directories", "DIR", "run directories and sweep directories", "several")
WHERE = "--where"
BEST_BY = Flag("--best-by", "show the best row for each combination of these keys; default: sweep.best_by", "KEY,...")
CFG = ("job", "hydra", "all")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
RUN_FAILED = "a run failed, crashed or timed out, or a single run ran out of memory"

MULTIRUN = Flag("-m, --multirun", "execute a sweep: every combination of the given values", hydra=True)
HYDRA = (
    Flag("-r, --run", "execute a single run, even if hydra.mode is MULTIRUN", hydra=True),
    Flag("-cd, --config-dir", "directory with your own groups and options", "DIR", "directory", hydra=True),
    Flag("-cn, --config-name", "your own configuration file instead of run.yaml", "NAME", hydra=True),
    Flag("-c, --cfg", "print the configuration: meshrunner's part, Hydra's or both", "job|hydra|all", CFG, hydra=True),
    Flag("-p, --package", "with --cfg: print only this key", "KEY", hydra=True),
    Flag("--resolve", "with --cfg: resolve interpolations", hydra=True),
    Flag("-i, --info", f"print how the configuration is composed: {', '.join(INFO)}", "[WHAT]", INFO, hydra=True),
    Flag("--hydra-help", "show Hydra's own help", hydra=True),
)
"""Flags that Hydra parses."""

_COMMANDS = (
    Command(
        "launching/run",
        "train; with -m, run every combination of a sweep",
        own_options=(MULTIRUN, *HYDRA),
        description="Compose and check the configuration, predict whether the run fits, write a run directory and train. "
        "Run directories are created below runs/, sweep directories below sweeps/.",
        examples=("run", "run model=llama_tiny parallelism=fsdp1 steps=100", "run -m parallelism=fsdp1,fsdp2"),
        fails_if=RUN_FAILED,
        executes=True,
    ),
    Command(
        "launching/tune",
        "find the fastest configuration that fits: predict all combinations, run a few",
        own_options=(BEST_BY, *HYDRA),
        description="Predict every combination of the given values, run the most promising ones in waves, and correct "
        "the predictions after each wave. If no values are given, space=layouts varies layout, recomputation, "
        "micro batch and, on GPUs, compilation. `resume DIR` continues a search.",
        examples=("tune model=llama_tiny", "tune parallelism=fsdp1,fsdp2 micro_batch=1,2,4 tune.runs=8"),
        fails_if=RUN_FAILED,
        executes=True,
    ),
    Command(
        "launching/resume",
        "continue a run, or execute the unfinished runs of a sweep",
        (DIRECTORY,),
        (Flag("--force", "continue even if the configuration differs from the checkpoint's"),),
        description="A run continues from its newest checkpoint. Without a checkpoint it starts again at step 1. A "
        "completed run continues if `steps` was raised.",
        examples=("resume runs/2026-11-02/10-15-00-3fa2c1", "resume sweeps/2026-11-02/10-15-00-3fa2c1"),
        fails_if=RUN_FAILED,
        executes=True,
    ),
    Command(
        "launching/submit",
        "submit runs to SLURM",
        (DIRECTORY,),
        (Flag("--dry-run", "only print the sbatch script"), MULTIRUN, *HYDRA),
        description="With OVERRIDES, write run directories and submit them. With DIR, submit the unfinished runs of "
        "this directory again. hydra.launcher.KEY=VALUE changes a setting of the submission.",
        examples=(
            "submit model=llama3_8b hydra.launcher.partition=gpu",
            "submit -m parallelism=fsdp1,fsdp2 --dry-run",
            "submit sweeps/layouts hydra.launcher.time=2:00:00",
        ),
        fails_if="a run of DIR is damaged, or, with hydra.launcher.wait=true, a run failed",
    ),
    Command(
        "launching/place",
        "write run directories, start nothing",
        own_options=(MULTIRUN, *HYDRA),
        description="`resume DIR` executes the runs, here or on another machine.",
        examples=("place -m parallelism=fsdp1,fsdp2 hydra.sweep.dir=sweeps/layouts",),
    ),
    Command(
        "launching/bisect",
        "find the commit, version or setting that made runs worse",
        (
            Argument("good", "GOOD", "a good revision, run directory, or value of the swept key", value="text"),
            Argument("bad", "BAD", "a bad revision, run directory, or value of the swept key", value="text"),
            Argument("overrides", "-- OVERRIDES", "overrides, such as -- model=mine steps=30", "any", "text"),
        ),
        (
            Flag(
                "--by",
                "compare speed, memory or loss; default: speed",
                "FIGURE",
                ("speed", "memory", "loss"),
                default="speed",
            ),
            Flag("--rounds", "decide with at most N rounds of runs; default: 30", "N", "number", default=30),
            Flag("--dir", "directory of the runs; runs that completed there are not repeated", "DIR", "directory"),
        ),
        description="GOOD and BAD are two commits of the repository in the current directory, two values of a sweep "
        "(`-- -m KEY=A,B,C`), or two run directories with different overrides. The runs of GOOD, BAD and the tested "
        "variant are repeated until the difference exceeds the noise.",
        examples=(
            "bisect v1.0 main -- --config-dir conf model=mine steps=30",
            "bisect py213/bin/python py215/bin/python -- -m launch.python=py213/bin/python,py214/bin/python,py215/bin/python",
            "bisect runs/fast runs/slow --by memory",
        ),
    ),
    Command(
        "planning/show",
        "print parameters, FLOPs, mesh, memory and wrap plan of a run",
        own_options=(Flag("--config", "also print the resolved configuration"), *HYDRA),
        description="Nothing is started and no GPU is needed.",
        examples=("show model=llama3_70b hardware=h100_80gb launch.nodes=8",),
    ),
    Command(
        "planning/plan",
        "predict whether runs fit and how fast they are, without a GPU",
        own_options=(
            Flag("--json", "print a JSON object, or with -m a list of objects"),
            Flag("--active", "faster: predict reserved memory only if active memory does not show whether a run fits"),
            Flag("--max", "find the largest value of KEY that fits", "KEY"),
            Flag("--html", "also write a page: memory over a step, or with -m the table and charts", "FILE", "file"),
            BEST_BY,
            Flag("--top", "with -m: keep only the first N combinations of the ranking", "N", "number"),
            Flag("--run", "with -m: then run the combinations that fit", exclusive=True),
            Flag("--submit", "with -m: then submit SLURM jobs for the combinations that fit", exclusive=True),
            MULTIRUN,
            *HYDRA,
        ),
        description="With -m, predict and rank every combination. Without --run or --submit, nothing is started.",
        fails_if="the run, or every combination, is predicted not to fit",
        examples=(
            "plan model=llama3_8b hardware=h100_80gb launch.workers=8",
            "plan model=llama3_8b hardware=h100_80gb launch.workers=8 --max micro_batch",
            "plan -m hardware=h100_80gb parallelism=fsdp1,fsdp2 micro_batch=1,2,4",
            "plan -m parallelism=fsdp1,fsdp2 compile=eager,per_block --max micro_batch --top 3 --run",
        ),
    ),
    Command(
        "planning/lock",
        "record exact facts about a configuration, or check them",
        own_options=(
            Flag("--check", "derive the facts again; exit with 3 if one differs from the lock file", exclusive=True),
            Flag("--update", "derive the facts again and write them to the lock file", exclusive=True),
            Flag("--losses", "also train N steps on CPUs and record the losses bit for bit", "N", "number"),
            Flag("--file", "the lock file; default: meshrunner.lock.json", "FILE", "file"),
            MULTIRUN,
            *HYDRA,
        ),
        description="Write parameters, FLOPs, matmuls, collectives, activations kept for backward and peak memory to a "
        "lock file, without a GPU.",
        examples=("lock model=llama_tiny", "lock -m parallelism=fsdp1,fsdp2", "lock --check"),
        found_if="--check found a change",
    ),
    Command(
        "planning/calibrate",
        "fit the constants of a device to measured runs",
        (DIRECTORIES,),
        (
            Flag(
                "--out",
                "write the constants to FILE. To use DIR/hardware/X.yaml, add --config-dir DIR hardware=X",
                "FILE",
                "file",
            ),
            Flag("--force", "write the constants even if the runs cannot separate matmul speed from memory bandwidth"),
            Flag("--json", "print a JSON object: the runs, their prediction errors and the constants"),
        ),
        description="`plan` uses the constants to predict speeds.",
        examples=("calibrate sweeps/widths --out configs/hardware/mine.yaml",),
    ),
    Command(
        "records/compare",
        "show which settings vary between runs and how they change the results",
        (DIRECTORIES,),
        (
            Flag(
                "--baseline",
                "compare each row with the row that has KEY=VALUE and is otherwise equal; default: sweep.baseline",
                "KEY=VALUE",
            ),
            Flag(WHERE, "rows that meet EXPR, such as state!=oom or 'wps>5000' (repeatable)", "EXPR", repeats=True),
            BEST_BY,
            Flag("--sort", "sort by a figure, best first, or by a key; -KEY reverses the order", "KEY"),
            Flag("--top", "show only the first N rows in the order of --sort, by default the N fastest", "N", "number"),
            Flag(
                "--fail-if",
                "exit with 3 if a difference breaks RULE, such as 'speed<-5%' or 'loss'",
                "RULE",
                repeats=True,
            ),
            Flag(
                "--history",
                "print the history of all runs below DIR: per configuration, one line for each commit or date",
            ),
            Flag("--why", "explain the difference between each row and its baseline, as `meshrunner why` does"),
            Flag("--strict", "with --fail-if: also exit with 3 if a rule cannot be decided"),
            Flag("--markdown", "print the table for a pull request", exclusive=True),
            Flag("--json", "print a JSON list of rows with unrounded figures", exclusive=True),
            Flag("--csv", "print the rows as CSV", exclusive=True),
            Flag("--html", "also write a page with the table and charts", "FILE", "file"),
        ),
        description="A row is a combination of settings; repeats are merged. The table says how large the differences "
        "are, whether they exceed the noise, and whether losses agree.",
        examples=(
            "compare sweeps/layouts",
            "compare sweeps/layouts --baseline parallelism=fsdp1 --markdown",
            "compare runs/2026-11-02 --where model=llama_tiny --sort mfu --top 5",
            "compare sweeps/main sweeps/branch --fail-if 'speed<-5%' --fail-if loss",
        ),
        found_if="a rule of --fail-if failed",
    ),
    Command(
        "records/why",
        "explain the difference in speed and memory between two runs",
        (
            Argument("baseline", "BASELINE", "a run directory; to name a row of a sweep, give any run of this row"),
            Argument("row", "RUN", "the run directory to compare; default: the prediction of BASELINE", "optional"),
        ),
        (Flag("--json", "print a JSON object with the explanation and all lines of its tables"),),
        description="Runs with sweep.explain=true are explained from a trace of their last steps, others from predictions.",
        examples=("why sweeps/layouts/000_parallelism-fsdp2 sweeps/layouts/001_parallelism-fsdp1",),
    ),
    Command(
        "records/ls",
        "list runs and sweeps, newest first",
        (
            Argument(
                "directories",
                "DIR",
                "where to look; default: runs/ and sweeps/, or the current directory if neither exists",
                "any",
            ),
        ),
        (
            Flag(WHERE, "runs that meet EXPR, such as state=oom, and their sweeps (repeatable)", "EXPR", repeats=True),
            Flag("--limit", "list at most N runs and sweeps; 0: all; default: 20", "N", "number", default=20),
            Flag("--json", "print a JSON list"),
        ),
        examples=("ls", "ls --where state=oom --limit 0", "ls sweeps --json"),
    ),
    Command(
        "records/status",
        "show the progress of every run, including runs that are executing",
        (DIRECTORIES,),
        examples=("status sweeps/layouts",),
    ),
    Command(
        "records/cancel",
        "cancel runs that are running or waiting, here and in SLURM's queue",
        (DIRECTORY,),
        description="Waiting runs stay pending and running runs become interrupted. `resume DIR` continues both.",
        examples=("cancel sweeps/layouts",),
        fails_if="some runs could not be examined because their files are damaged",
    ),
    Command(
        "records/sync",
        "upload W&B runs that were recorded offline",
        (Argument("directories", "DIR", "where to look for runs, at any depth", "several"),),
        (Flag("--dry-run", "only print what would be uploaded"),),
        examples=("sync sweeps/layouts",),
        fails_if="a run could not be uploaded",
    ),
    Command(
        "records/export",
        "write a checkpoint as a Hugging Face folder",
        (
            Argument("run", "RUN", "a checkpoint, or a run directory, whose newest checkpoint is exported"),
            Argument("out", "OUT", "the folder to write, which must not exist"),
        ),
        (
            Flag("--dtype", "dtype of the weights; default: fp32", "DTYPE", ("fp32", "bf16"), default="fp32"),
            Flag("--file-gib", "size of a safetensors file in GiB; default: 4", "N", "number", default=4),
        ),
        description="Write a folder with the weights, the configuration and the tokenizer, for the `transformers` library "
        "and programs that build on it. One process reads the checkpoint tensor by tensor, without a GPU.",
        examples=("export runs/2026-11-02/10-15-00-3fa2c1 exported --dtype bf16",),
    ),
    Command(
        "reference/help",
        "explain a verb, key, group or option",
        (Argument("term", "TERM", "a verb, key, group or option, such as lr or optimizer=adamw", "one", "term"),),
        (Flag("-cd, --config-dir", "also search this directory of your own groups and options", "DIR", "directory"),),
        description="For a key, print its meaning, values and default. Without TERM, list the verbs.",
        examples=("help lr", "help optimizer=adamw", "help hydra.launcher.time"),
    ),
    Command(
        "reference/schema",
        "print a JSON schema of a run's config.yaml or of a group's files",
        (Argument("group", "GROUP", "a group, such as model; by default, all of config.yaml", "optional", "group"),),
        description="Editors use the schema to complete and check YAML files.",
        examples=("schema model",),
    ),
    Command("reference/doctor", "report what this machine has, what is missing and why it matters"),
)

COMMANDS = {command.verb: command for command in _COMMANDS}
"""The declaration of each verb, keyed by verb, in the order of `meshrunner --help`."""
