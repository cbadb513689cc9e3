"""Train a Llama on one device with torchtitan. Written for torchtitan 0.3.0 (September 2026), which needs torch after 2.13.

    python -m bench.gpu.loops.titan --shape '{"vocab_size": 128256, ...}' --flavor 1B --recompute none --compile per_block

Model, optimizer and batch size are the same as in `plain_loop`. The random tokens and the initial weights differ.
Attention is the default, FlexAttention, because torchtitan's language models do not support scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

RECOMPUTE = {"none": lambda: None, "full": FullAC.Config, "selective_op": SelectiveAC.Config}
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class NoTokenizer(BaseTokenizer):
    """A placeholder, because torchtitan requires a tokenizer even if the data consists of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 0


class RandomTokens(BaseDataLoader):
    """An endless loader of random tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 0

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.shape, self.vocab_size = (local_batch_size, seq_len + 1), config.vocab_size

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1).contiguous()
        while True:
            rows = torch.randint(self.vocab_size, self.shape, generator=generator)
            yield {"input": rows[:, :-1].contiguous(), "positions": positions}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


class Recorder(BaseLogger):
    """Keeps the metrics of the steps at which torchtitan reads metrics: step 1 and each multiple of `log_freq`."""

    def __init__(self) -> None:
        self.read: dict[int, dict[str, Any]] = {}
        self.first_step = 0.0

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.first_step = self.first_step or time.time()
        self.read[step] = metrics


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--flavor", required=True, help="torchtitan's name of the model; its depth is that of --shape")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--compile", choices=["eager", "per_block"], default="eager")
    parser.add_argument("--cuda-graphs", choices=["on", "off"], default="off")
    for name in ("seq-len", "micro-batch", "steps", "read-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> Trainer.Config:
    """Return torchtitan's configuration. Raise ValueError if the shape of torchtitan's model differs from `args.shape`."""
    spec = model_registry(args.flavor)
    model = spec.model
    model.layers = model.layers[: args.shape["n_layers"]]
    attention, wanted = model.layers[0].attention, args.shape
    found = {
        "vocab_size": model.vocab_size,
        "dim": model.dim,
        "n_layers": len(model.layers),
        "n_heads": attention.n_heads,
    }
    found["tie_embeddings"] = model.enable_weight_tying
    if different := {key: value for key, value in found.items() if value != wanted[key]}:
        raise ValueError(f"torchtitan's Llama {args.flavor} has {different}, unlike the hand-written loop")
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(args.out.with_suffix("")),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(vocab_size=model.vocab_size),
        loss=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size),
        optimizer=default_adamw(lr=args.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0),
        metrics=MetricsProcessor.Config(log_freq=args.read_every, disable_color_printing=True),
        activation_checkpoint=RECOMPUTE[args.recompute](),
        compile=CompileConfig(enable=args.compile == "per_block"),
        training=TrainingConfig(
            local_batch_size=args.micro_batch,
            seq_len=args.seq_len,
            steps=args.steps,
            disable_cuda_graphs=args.cuda_graphs == "off",
        ),
    )


def main() -> None:
    args = parsed()
    os.environ |= ONE_PROCESS
    trainer = Trainer(configuration(args))
    recorder = trainer.metrics_processor.logger = Recorder()
    try:
        trainer.train()
    finally:
        trainer.close()
    later = [metrics for step, metrics in recorder.read.items() if step > args.read_every]
    found = {
        "first_step": recorder.first_step,
        "losses": [metrics["loss_metrics/global_avg_loss"] for metrics in recorder.read.values()],
        "wps": median(metrics["throughput(tps)"] for metrics in later),
        "peak_active_gib": max(metrics["memory/max_active(GiB)"] for metrics in later),
        "peak_reserved_gib": max(metrics["memory/max_reserved(GiB)"] for metrics in later),
    }
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
