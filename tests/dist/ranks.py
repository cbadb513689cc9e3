"""Run a function on several gloo ranks and bring its results back."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.dist.warm"])
LIMIT_S = 600.0


class RankError(AssertionError):
    """A rank raised an exception; the text contains its traceback."""


def on_ranks(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `body(*args)` on every rank of an initialised gloo group and return the results by rank. They must be picklable."""
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    store_path = Path(tempfile.mkdtemp()) / "store"
    processes = [
        context.Process(target=_enter, args=(rank, world, store_path, writer, body, args), daemon=True)
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    results: dict[int, Any] = {}
    try:
        readers = {reader: rank for rank, (reader, _) in enumerate(pipes)}
        while readers:
            ready = wait(list(readers), timeout=LIMIT_S)
            if not ready:
                raise RankError(f"ranks {sorted(readers.values())} said nothing for {LIMIT_S} s")
            for reader in ready:
                assert isinstance(reader, Connection)
                rank = readers.pop(reader)
                try:
                    ok, value = pickle.loads(reader.recv_bytes())
                except EOFError:
                    processes[rank].join(LIMIT_S)
                    raise RankError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
                if not ok:
                    raise RankError(f"rank {rank}:\n{value}")
                results[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(store_path.parent)
    return [results[rank] for rank in range(world)]


def _enter(rank: int, world: int, store_path: Path, writer: Connection, body: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.enable(sys.__stderr__)  # shows where a rank crashes
    faulthandler.dump_traceback_later(0.9 * LIMIT_S, file=sys.__stderr__)  # shows where a rank hangs
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store_path), world), rank=rank, world_size=world)
        answer = (True, body(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))  # not send: it would share tensors' memory with a process that ends
    os._exit(0)
