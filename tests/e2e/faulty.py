"""A user's own options, as they lie in the user's current directory: Llamas of which one rank fails in one step.

meshrunner run model.kind=faulty:Raises +model.rank=1 +model.step=2
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshrunner.recipes.checkpoint.base import DCP, Saver
from meshrunner.recipes.checkpoint.on_disk import Training
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.model.transformer import Transformer
from meshrunner.recipes.optim.optimizer import AdamW
from meshrunner.runner.process.forkserver import END_SIGNAL
from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.trackers.base import Tracker
from meshrunner.runner.trackers.description import RunRecord


class Faulty(Llama):
    """Logs the sum of a block's weights before every step, and fails in one of them."""

    rank: int = 1
    """The rank that fails; -1: all of them."""
    step: int = 2
    """In the forward pass of this step."""

    def network(self, seq_len: int) -> Transformer:
        network = super().network(seq_len)
        self.built()
        done = 0

        def before(module: nn.Module, _: tuple[Tensor, ...]) -> None:
            nonlocal done
            done += 1
            block = network.get_submodule(network.block_names()[0])
            print(f"before step {done}: weights {sum(local(p).abs().sum().item() for p in block.parameters())!r}")
            if done == self.step and self.concerned:
                self.fail()

        def after(module: nn.Module, _: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            return self.spoil(logits) if done == self.step and self.concerned else logits

        network.register_forward_pre_hook(before)
        network.register_forward_hook(after)
        return network

    @property
    def concerned(self) -> bool:
        """Whether this is the rank that fails."""
        return self.rank in (-1, int(os.environ["RANK"]))

    def built(self) -> None:
        """Called when the network was built."""

    def fail(self) -> None:
        """Called before the step's forward."""

    def spoil(self, logits: Tensor) -> Tensor:
        """Called after the step's forward."""
        return logits


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


class Fated(Faulty):
    """What goes wrong in step 2 depends on the number of the job."""

    job: int = 0

    def fail(self) -> None:
        match self.job:
            case 1:
                raise RuntimeError("the user's own mistake")
            case 3:
                ctypes.string_at(0)
            case 5:
                time.sleep(3600)
            case 7:
                os.kill(os.getpid(), signal.SIGKILL)
            case 9:
                torch.ones(2**30)


class FatedByLayout(Llama):
    """Hangs under FSDP1, and runs out of memory with eight sequences in a micro batch, but not where it is predicted."""

    def network(self, seq_len: int) -> Transformer:
        network = super().network(seq_len)
        network.register_forward_pre_hook(lambda module, given: meet(module, given[0]))
        return network


def meet(module: nn.Module, tokens: Tensor) -> None:
    if tokens.is_meta:
        return
    if not any(hasattr(each, "to_local") for each in module.parameters()):
        time.sleep(3600)
    if len(tokens) == 8:
        raise torch.OutOfMemoryError("planted")


class Recompiles(Faulty):
    """A constant that compiled code relies on changes."""

    def network(self, seq_len: int) -> Transformer:
        network = super().network(seq_len)
        vars(self).setdefault("built_networks", []).append(network)  # counting FLOPs builds another one
        return network

    def fail(self) -> None:
        for network in vars(self)["built_networks"]:
            for name in network.block_names():
                network.get_submodule(f"{name}.attention_norm").eps *= 2


class SlowReadOut(Faulty):
    """Writing a row takes a while."""

    seconds: float = 0.05

    def built(self) -> None:
        from meshrunner.runner.measure.meter import RunMeter

        write = RunMeter._write

        def slow(meter: RunMeter, row: StepRow) -> None:
            time.sleep(self.seconds)
            write(meter, row)

        RunMeter._write = slow  # type: ignore[method-assign]


class WaitsForFile(Faulty):
    """In the run of that job a rank waits in its step until there is a file `go` in the current directory."""

    job: int = 0

    def fail(self) -> None:
        while self.job == 0 and not Path("go").exists():
            time.sleep(0.01)


class Raises(Faulty):
    def fail(self) -> None:
        raise RuntimeError("the user's own mistake\nwith a second line")


class Aborts(Faulty):
    """As NCCL's watchdog thread does when it sees that a kernel has failed on the device."""

    def fail(self) -> None:
        said = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
        what = said + "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later.\n"
        os.write(
            2, f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {what}".encode()
        )
        os.abort()


class RaisesLongText(Faulty):
    def fail(self) -> None:
        raise RuntimeError("\n".join(f"line {i} " + "x" * 1000 for i in range(200)))


class Segfaults(Faulty):
    def fail(self) -> None:
        ctypes.string_at(0)


class Exits(Faulty):
    def fail(self) -> None:
        print("about to leave")
        os._exit(3)


class ExitsInPython(Faulty):
    def fail(self) -> None:
        sys.exit("the user's module had enough")


class Hangs(Faulty):
    def fail(self) -> None:
        time.sleep(3600)


class HangsWhileBuilt(Faulty):
    def built(self) -> None:
        if self.concerned:
            time.sleep(3600)


class TakesMemory(Faulty):
    def fail(self) -> None:
        taken = [torch.ones(2**26) for _ in range(16)]  # 4 GiB in pieces of 256 MiB
        assert len(taken) == 16


class NotFiniteLoss(Faulty):
    def spoil(self, logits: Tensor) -> Tensor:
        return logits * float("nan")


class NotFiniteGradient(Faulty):
    def spoil(self, logits: Tensor) -> Tensor:
        logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


class ShowsEnvironment(Faulty):
    def built(self) -> None:
        print("MINE is", os.environ.get("MINE"))


class ShowsSettings(Faulty):
    """Prints what became of environment variables in a worker, one line for each."""

    def built(self) -> None:
        import torch._inductor.config
        from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

        found: dict[str, object] = {
            "inductor's settings": torch._inductor.config.split_reductions,
            "dynamo's settings": torch._dynamo.config.verbose,
            "logging": logging.getLogger("torch._dynamo").isEnabledFor(logging.DEBUG),
            "c10d": torch.distributed.get_debug_level().name,
            "interpreter": sys.flags.hash_randomization,
            "OpenMP": bool(ctypes.CDLL(None).omp_get_dynamic()),
            "threads": torch.get_num_threads(),
            "process": os.environ.get("NCCL_DEBUG"),
            "inductor's cache": cache_dir(),
            "Triton's cache": triton_cache_dir(0),
        }
        for name, value in found.items():
            print(f"{name}: {value}")


class SlowAdamW(AdamW):
    """Every step takes a tenth of a second."""

    def build(self, parameters: object) -> torch.optim.AdamW:
        optimizer = super().build(parameters)  # type: ignore[arg-type]
        optimizer.register_step_post_hook(lambda *_: time.sleep(0.1))
        return optimizer


class CannotBeEnded(Faulty):
    """Cannot be ended but by SIGKILL."""

    def fail(self) -> None:
        signal.signal(END_SIGNAL, signal.SIG_IGN)
        print("END is ignored")
        time.sleep(3600)


class SlowTracker(Tracker):
    """Takes three seconds to finish, as an upload does."""

    def open(self, run: RunRecord) -> SlowSink:
        return SlowSink()


class SlowSink:
    def log(self, row: StepRow) -> None:
        pass

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        time.sleep(3)
        print("uploaded")


class SlowSave(DCP):
    """A save takes six seconds."""

    grows: bool = True
    """Whether the files of the checkpoint grow meanwhile."""

    def saver(self, folder: Path, training: Training) -> Saver:
        return SlowSaver(folder, self)


class SlowSaver:
    def __init__(self, folder: Path, option: SlowSave) -> None:
        self.file, self.option = folder / ".tmp-step-00000002" / "__0_0.distcp", option

    def due(self, step: int) -> bool:
        return step % self.option.every == 0

    def save(self, step: int, seen: object) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for second in range(6):
            if self.option.grows:
                self.file.write_bytes(bytes(second + 1))
            time.sleep(1)

    def close(self) -> None:
        pass
