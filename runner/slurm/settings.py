"""The keys of `hydra/launcher=slurm`, and the nodes that a run requests from SLURM."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Section, whole
from meshrunner.runner.config.compose import Composed, plain
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.config.validation import invalid

CountOrNull = Annotated[int | None, whole(None)]


class Nodes(NamedTuple):
    """The nodes that a run requests. All tasks of a job array request the same nodes."""

    number: int
    gpus: int | None
    """GPUs to request on each node; None if the run requests no GPUs."""
    whole: bool
    """Whether the run requests all GPUs of each node. Then other jobs do not need the CPUs and memory of the node."""


def _time(value: Any) -> Any:
    """Return text unchanged, and reject numbers. YAML reads 1:00:00 as the number 3600, and SLURM would read 3600 minutes."""
    if value is not None and not isinstance(value, str):
        raise PydanticCustomError(
            "time", "expected text like '1:00:00' or '2-00:00:00', got {got}", {"got": repr(value)}
        )
    return value


class Slurm(Section):
    """The resources to request from SLURM, and the commands that start jobs on the nodes."""

    partition: str | None
    """Partition of the jobs. For partition, account, qos and constraint, null means the cluster's default."""
    account: str | None
    """Account to charge."""
    qos: str | None
    """Quality of service."""
    constraint: str | None
    """Features that the nodes must have, such as `h100`."""
    nodes: CountOrNull
    """Number of nodes of a run; null: launch.nodes of the run."""
    gpus_per_node: CountOrNull
    """GPUs to request on each node; null: launch.workers (auto: the hardware's GPUs per node), or none without GPU hardware."""
    cpus_per_task: CountOrNull
    """
    CPUs per node, because one task on each node starts all workers of the node.

    null: the whole node with its memory (`--exclusive --mem=0`) if the run uses all GPUs of the node, else `cpus_per_gpu`.
    Options for CPUs or memory in `extra` replace both defaults.
    """
    cpus_per_gpu: CountOrNull
    """CPUs per GPU if a run does not use all GPUs of its nodes; null: the cluster's default."""
    time: Annotated[str | None, BeforeValidator(_time)]
    """Time limit as quoted text, '12:00:00' or '2-00:00:00'; null: the partition's limit. Without quotes, YAML reads a number."""
    max_parallel: CountOrNull
    """Maximum number of tasks of a sweep's job array that run at once; null: no limit."""
    max_requeues: Annotated[int, whole(at_least=0)]
    """Maximum restarts of a job after preemption, its time limit or a lost node. The job continues from its checkpoint."""
    notice_s: int = Field(ge=0, le=65535)
    """Seconds before the time limit at which SLURM requests a job to stop, so that the job can save a checkpoint."""
    extra: list[str]
    """Additional options for sbatch: ['--mail-type=END', '--exclude=node7']."""
    srun: list[str]
    """Additional arguments for srun: ['--container-image=image.sqsh']."""
    preamble: str
    """Shell lines to run before srun, for example to load modules or set NCCL variables."""
    command: str | None
    """Command that starts meshrunner on a node: 'apptainer exec --nv image.sif meshrunner'; null: use this installation."""
    wait: bool
    """Whether to wait until all jobs have ended, and then print the table of results."""
    dry_run: bool
    """Whether to print the sbatch script and submit no job, like --dry-run."""

    @classmethod
    def read(cls, launcher: dict[str, Any]) -> Slurm:
        """Return the settings in a composed `hydra.launcher`. Raise ConfigError that lists all wrong keys."""
        try:
            return cls.model_validate({key: value for key, value in launcher.items() if key != "_target_"})
        except ValidationError as error:
            raise invalid(error, lambda _: cls.model_fields, "hydra.launcher") from None

    @classmethod
    def shipped(cls) -> dict[str, Any]:
        """Return the keys and values of conf/hydra/launcher/slurm.yaml."""
        text = files("meshrunner.conf").joinpath("hydra/launcher/slurm.yaml").read_text()
        return {key: value for key, value in plain(OmegaConf.create(text)).items() if key != "_target_"}

    def apply_to(self, composed: Composed) -> Composed:
        """Return the configuration with launch.nodes set to `nodes`. Raise ConfigError if both are set and differ."""
        launch = composed.config["launch"]
        if self.nodes is None or launch["nodes"] == self.nodes:
            return composed
        if launch["nodes"] != 1:
            raise ConfigError(
                f"hydra.launcher.nodes({self.nodes}) differs from launch.nodes({launch['nodes']}): set only one of them"
            )
        return replace(composed, config=composed.config | {"launch": launch | {"nodes": self.nodes}})

    def fit(self, experiment: Experiment) -> None:
        """Raise ConfigError if launch.nodes of an existing run directory differs from `nodes`."""
        if self.nodes is not None and self.nodes != experiment.launch.nodes:
            raise ConfigError(
                f"hydra.launcher.nodes({self.nodes}): the run directory has launch.nodes({experiment.launch.nodes}). "
                "Submit a new run in another directory, or change its config.yaml"
            )

    def workers(self, experiment: Experiment) -> int:
        """Return the expected workers per node of the cluster, from the configuration or else from this machine's devices."""
        if experiment.launch.workers != "auto":
            return experiment.launch.workers
        return self.gpus(experiment) or node_devices(experiment).workers

    def request(self, experiment: Experiment) -> Nodes:
        """Return the nodes that a run requests."""
        gpus, hardware = self.gpus(experiment), experiment.hardware
        whole = gpus is not None and isinstance(hardware, GPU) and gpus >= hardware.devices_per_node
        return Nodes(experiment.launch.nodes, gpus, whole)

    def gpus(self, experiment: Experiment) -> int | None:
        """Return the number of GPUs that a run requests on each node, or None if it requests no GPUs."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if not isinstance(experiment.hardware, GPU):
            return None
        workers = experiment.launch.workers
        return experiment.hardware.devices_per_node if workers == "auto" else workers

    @property
    def program(self) -> str:
        """Shell command that starts meshrunner."""
        if self.command is not None:
            return self.command
        beside = Path(sys.executable).with_name("meshrunner")
        return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m meshrunner"
