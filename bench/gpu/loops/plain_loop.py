"""Train a hand-written Llama on one device, with bf16 weights, fp32 master weights, gradient clipping and fused AdamW.

    python -m bench.gpu.loops.plain_loop --shape '{"vocab_size": 128256, ...}' --recompute none --compile per_block

The loop does the same work as `parallelism=fsdp2 precision=bf16` on one device. Each bf16 gradient is converted to fp32 as soon
as backward has computed it. Norm, clipping and update are computed in fp32. The loop trains on the same tokens as `data=random`.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.gpu.loops.plain_llama import PlainLlama
from bench.gpu.loops.shape import Shape

GIB = 2**30
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
CLIP = 1.0
WARM_UP = 10
"""Steps of learning-rate warm-up."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=lambda text: Shape(**json.loads(text)), required=True)
    parser.add_argument("--recompute", choices=["none", "full", "selective_op"], default="none")
    parser.add_argument("--compile", choices=["eager", "per_block"], default="eager")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--read-every", type=int, required=True, help="steps between metric reads; the first interval is not measured"
    )
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def batches(args: argparse.Namespace, device: torch.device) -> Tensor:
    """Return the tokens of all steps. Shape: [steps, micro_batch, seq_len + 1]."""
    rows = np.empty((args.steps * args.micro_batch, args.seq_len + 1), dtype=np.int64)
    for index, row in enumerate(rows):
        stream = np.random.Generator(np.random.Philox(key=[0, index]))
        row[:] = stream.integers(args.shape.vocab_size, size=len(row))
    return torch.from_numpy(rows).view(args.steps, args.micro_batch, -1).to(device)


def with_masters(model: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Convert a model's weights to bf16. Return the weights and their fp32 copies. Backward moves gradients to the copies."""
    weights, masters = list(model.parameters()), []
    for weight in weights:
        master = weight.detach().clone().requires_grad_()
        weight.data = weight.data.bfloat16()
        weight.register_post_accumulate_grad_hook(partial(_hand_over, master))
        masters.append(master)
    return weights, masters


def _hand_over(master: Tensor, weight: Tensor) -> None:
    assert weight.grad is not None
    master.grad, weight.grad = weight.grad.float(), None


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train the model. Return losses, speed, peak memory and model size. The first `read_every` steps are not measured."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    with device:
        model = PlainLlama(args.shape, args.seq_len)
    weights, masters = with_masters(model)
    model.prepare(args.recompute, args.compile)
    optimizer = torch.optim.AdamW(masters, lr=args.lr, **ADAMW)
    tokens = batches(args, device)
    losses: list[float] = []
    unread: list[Tensor] = []
    rates: list[float] = []
    first_step, since = 0.0, 0.0
    for step in range(1, args.steps + 1):
        rows = tokens[step - 1]
        loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / WARM_UP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        unread.append(loss.detach())
        if step == 1 or step % args.read_every == 0:
            losses += torch.stack(unread).tolist()  # waits for the device
            unread.clear()
            first_step = first_step or time.time()
            if step > args.read_every:
                seconds = time.perf_counter() - since
                rates.append(args.read_every * args.micro_batch * args.seq_len / seconds)
            elif step == args.read_every and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            since = time.perf_counter()
    memory = torch.cuda.memory_stats() if device.type == "cuda" else {}
    parameters = sum(weight.numel() for weight in weights)
    return {
        "first_step": first_step,
        "losses": losses,
        "wps": median(rates),
        "parameters": parameters,
        "flops_per_token": args.shape.flops_per_token(parameters, args.seq_len),
        "peak_active_gib": memory["active_bytes.all.peak"] / GIB if memory else None,
        "peak_reserved_gib": memory["reserved_bytes.all.peak"] / GIB if memory else None,
    }


def main() -> None:
    args = parsed()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        found = train(args)
    except torch.OutOfMemoryError as error:
        found = {"oom": str(error).splitlines()[0]}
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
