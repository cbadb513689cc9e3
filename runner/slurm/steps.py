"""Start runs as SLURM job steps: inside an allocation of several nodes, meshrunner starts each run with `srun`."""

import os
import shlex
from pathlib import Path

from meshrunner.runner import shipped
from meshrunner.runner.rundir import JsonFile
from meshrunner.runner.rundir.files import SLURM_SETTINGS
from meshrunner.runner.slurm.client import slurm
from meshrunner.runner.slurm.settings import Slurm


def allocated_nodes() -> int:
    """Return the number of nodes on which this process can start job steps. It is 1 if the process runs outside an allocation or
    inside a step on several nodes."""
    in_step = int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) > 1
    return 1 if in_step else int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def step(run_dir: Path, nodes: int) -> tuple[list[str], dict[str, str]]:
    """Return an `srun` command and the environment variables for `srun`, as in slurm/run.sbatch. The command executes a run on
    the first `nodes` nodes of the allocation. Raise ConfigError if SLURM does not answer."""
    hosts = slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    variables = {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)}
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
        variables["SRUN_CPUS_PER_TASK"] = cpus  # srun does not inherit sbatch's --cpus-per-task
    given = JsonFile.peek(run_dir.parent / SLURM_SETTINGS).as_json()
    settings = Slurm.read(shipped.values(shipped.LAUNCHER, "slurm") | given)
    where = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts[:nodes])}"]
    command = ["srun", *where, "--kill-on-bad-exit=0", "--wait=60", *settings.srun, *shlex.split(settings.program)]
    return [*command, "resume", str(run_dir)], variables
