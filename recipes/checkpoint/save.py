"""Atomic saving of checkpoints, either while training waits or in the background."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FullyShardedDataParallel

from meshrunner.recipes.checkpoint import on_disk
from meshrunner.recipes.checkpoint.state_dict import get_state
from meshrunner.recipes.errors import NotSaved
from meshrunner.recipes.storage import checksum


class WriteResults(list[WriteResult]):
    """DCP's results of writing one rank's files. `files`: (size in bytes, CRC-32), keyed by file name."""

    files: dict[str, tuple[int, int]]


class ChecksummedWriter(FileSystemWriter):
    """A DCP writer that syncs and checksums each rank's files. Rank 0 then passes all files' sizes and CRCs to `complete`."""

    def __init__(
        self, folder: Path, complete: Callable[[dict[str, tuple[int, int]]], None], *, on_host: bool = False
    ) -> None:
        # If `ahead` is positive, torch copies GPU state to the host while it writes. State on the host needs no copies.
        ahead = 0 if on_host else 10_000_000  # bytes; torch's default
        super().__init__(folder, sync_files=True, overwrite=False, per_thread_copy_ahead=ahead)
        self.complete = complete

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            written = WriteResults(super().write_data(plan, planner).wait())
        except Exception as error:  # on a full disk, torch's error mentions only an unexpected file position
            folder = Path(self.path)
            left = sum(item.tensor_storage_size() or 0 for item in plan.items)
            left -= sum(file.stat().st_size for file in folder.glob(f"__{dist.get_rank()}_*"))
            if not folder.is_dir() or (free := shutil.disk_usage(folder).free) >= left:
                raise
            raise NotSaved(f"the disk is full: {left:,} more bytes are needed, {free:,} are free ({error})") from error
        names = {result.storage_data.relative_path for result in written}
        # Compute checksums from disk, so that they also detect faults in writing.
        written.files = {name: checksum(Path(self.path) / name) for name in names}
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files = {on_disk.METADATA: checksum(Path(self.path) / on_disk.METADATA)}
        for written in results:
            assert isinstance(written, WriteResults)
            files |= written.files
        self.complete(files)


class DCPSaver:
    """The `Saver` of the options `dcp` and `dcp_async`. in_background: whether training continues during writing."""

    def __init__(
        self, folder: Path, training: on_disk.Training, every: int, keep: int | None, *, in_background: bool = False
    ) -> None:
        self.folder, self.training, self.every, self.keep = folder, training, every, keep
        # A separate group, because collectives of a background save must not mix with collectives of training. The long timeout
        # lets ranks wait for the slowest disk. The launcher detects hangs.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        folder.mkdir(exist_ok=True)
        self.stager = DefaultStager(staging_options(training.model)) if in_background else None
        self._pending: tuple[int, Future[Any]] | None = None

    def due(self, step: int) -> bool:
        if self._pending is not None and self._pending[1].done():
            self._wait()
        return step % self.every == 0 or step == self.training.steps

    def save(self, step: int, consumed: on_disk.Consumed) -> None:
        self._wait()  # otherwise the stager would overwrite a copy that is being written
        writer = self._writer(step, consumed)
        state: dict[str, Any] = dict(get_state(self.training.model, self.training.optimizer))
        if self.stager is None:
            with self._explained(step):
                save(state, storage_writer=writer, process_group=self.group)
        else:
            if torch.__version__ < "2.13":  # older versions empty a stager after its first save (pytorch issue #183413)
                self.stager = DefaultStager(staging_options(self.training.model))
            pending = async_save(state, storage_writer=writer, process_group=self.group, async_stager=self.stager)
            assert isinstance(pending, Future)
            self._pending = step, pending

    def close(self) -> None:
        self._wait()
        if self.stager is not None:
            self.stager.close()

    def _wait(self) -> None:
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with self._explained(step):
                future.result()

    def _writer(self, step: int, consumed: on_disk.Consumed) -> ChecksummedWriter:
        """Return a writer that writes checkpoint.json and gives the checkpoint its final name after all shards are written."""
        if not self.folder.is_dir():  # DCP would create the directory again
            raise NotSaved(
                f"the checkpoint of step {step} could not be written: the directory {self.folder} was moved or removed"
            )
        training, temporary = self.training, self.folder / f"{on_disk.TEMPORARY}{on_disk.step_folder(step)}"

        def complete(files: dict[str, tuple[int, int]]) -> None:
            record = on_disk.Record(
                step=step,
                tokens=consumed.tokens,
                sequences=consumed.sequences,
                global_batch=training.global_batch,
                seed=training.seed,
                world_size=dist.get_world_size(),
                parameters=training.parameters,
                config=training.config,
                files=dict(sorted(files.items())),
            )
            on_disk.write_record(temporary, record)
            on_disk.publish(temporary, self.folder / on_disk.step_folder(step), self.keep)

        return ChecksummedWriter(temporary, complete, on_host=self.stager is not None)

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Remove the partial checkpoint and raise NotSaved if DCP fails in the `with` block. Every rank sees the failure."""
        try:
            yield
        except CheckpointException as error:
            if dist.get_rank() == 0:
                on_disk.remove_leftovers(self.folder)
            rank, (cause, _) = next(iter(error.failures.items()))
            why = str(cause) if isinstance(cause, NotSaved) else f"{type(cause).__name__}: {cause}"
            raise NotSaved(
                f"the checkpoint of step {step} could not be written to {self.folder}: rank {rank}: {why}"
            ) from error


def staging_options(model: nn.Module) -> StagingOptions:
    """Return torch's options for copying a model's state to host memory. On CUDA, the host does not wait for each copy."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return StagingOptions(
        # torch keeps one pinned buffer per tensor. FSDP1 creates new tensors for every state dict, so no buffer would be reused.
        use_pinned_memory=on_gpu and not FullyShardedDataParallel.fsdp_modules(model),
        use_shared_memory=False,
        use_async_staging=False,  # the next step would overwrite tensors that are still being copied
        use_non_blocking_copy=on_gpu,
    )
