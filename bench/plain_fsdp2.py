"""A hand-written FSDP2 loop that trains meshrunner's Llama under torchrun: the baseline of the benchmarks.

torchrun --nproc-per-node 2 bench/plain_fsdp2.py --steps 20
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshrunner.recipes.model.llama import Llama


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", default="/dev/stdout")
    args = parser.parse_args()

    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = Llama(kind="llama", vocab_size=4096, dim=256, n_layers=6, n_heads=8, n_kv_heads=8, ffn_dim=768)
    with torch.device("meta"):
        model = config.network(args.seq_len)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if name.endswith("norm.weight") else local.normal_(0.0, 0.02)
        model.reset_buffers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())

    first = None
    for step in range(1, args.steps + 1):
        rows = torch.randint(4096, (args.batch, args.seq_len + 1), generator=generator)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.4f} norm {norm.full_tensor().item():.4f}")
        else:
            norm.full_tensor()
        first = first or time.time()
    if dist.get_rank() == 0:
        with open(args.out, "w") as file:  # noqa: PTH123
            json.dump({"first_step": first}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
