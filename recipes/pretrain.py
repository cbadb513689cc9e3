"""The recipe: assemble model, mesh, optimizer and loader, then train. It runs in every worker.

    train(recipe, meter, device=device, nodes=1, workers=2, checkpoints=Path("checkpoints"))

needs an initialised process group of nodes x workers ranks.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from meshrunner.recipes.checkpoint.base import Consumed, Training
from meshrunner.recipes.checkpoint.choose import choose_checkpoint
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.loader import Loader
from meshrunner.recipes.grad_norm import Trained, clip_by_norm, global_norm
from meshrunner.recipes.init_weights import Initial, clean_name
from meshrunner.recipes.loss import cross_entropy
from meshrunner.recipes.optimizer import step_if_finite
from meshrunner.recipes.parallelism.mesh import build_mesh, data_rank
from meshrunner.recipes.parallelism.tensor import split_over_tensor, split_parameters
from meshrunner.recipes.stop import StopAgreement

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from meshrunner.recipes.meter import Meter
    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_plan import WrapPlan
    from meshrunner.recipes.recipe import Recipe

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, each [micro_batch, seq_len]."""


class Assembled(NamedTuple):
    """A model, spread over the devices and initialised."""

    model: nn.Module
    trained: list[Trained]
    """The parameters that are not frozen, and how each is sharded."""
    parameters: int
    """Number of parameters of the whole model, frozen ones included."""


def assemble(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> Assembled:
    """
    Build the network on meta, spread it over the devices and give it its initial values.

    The order is the only one that is right. Each step changes what the next one sees:
    """
    # 1. On meta, where no size is too large. Float8 exchanges linear layers, before anything refers to them.
    with torch.device("meta"):
        network = recipe.model.build(recipe.seq_len)
    recipe.precision.convert(network)
    # 2. Tensor parallelism, while parameters and modules have their own names: its plan is made of those names.
    layout = recipe.parallelism
    if layout.tensor > 1:
        split_over_tensor(
            network,
            mesh["tensor"],
            sequence_parallel=layout.sequence_parallel,
            loss_parallel=layout.loss_parallel,
        )
    split_by_tensor = split_parameters(network)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    # 3. The wrap plan names modules, so it is made before wrappers of recomputation change the names.
    plan = recipe.wrap.plan(network, layout.reshard_after_forward)
    # 4. Recomputation and compilation inside the units of data parallelism: gathering and freeing parameters must happen
    # around the compiled and recomputed code, not in it.
    recompute_and_compile(recipe, network, plan)
    # 5. Data parallelism shards what tensor parallelism has left, and only then memory is taken: a device never holds
    # more than its part. The initial values do not depend on the layout.
    model = layout.apply(network, mesh, plan, recipe.precision, Initial(network, recipe.seed, device))
    trained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups = layout.shard_groups(clean_name(name), parameter, mesh, split_by_tensor)
            trained.append(Trained(clean_name(name), parameter, groups))
    return Assembled(model, trained, parameters)


def recompute_and_compile(recipe: Recipe, network: Network, plan: WrapPlan) -> None:
    """
    Activation checkpointing and compilation of the blocks and the loss, in place and before data parallelism.

    Which of the two is around the other is the option's choice: a selective policy must be seen by the compiler, and
    recomputing whole blocks must not be, or 2-d layouts fail.
    """
    recompute, compilation = recipe.activation_checkpoint, recipe.compile
    recompute.configure()
    compilation.configure()
    units = [name for name in plan if name] if recipe.parallelism.wraps_units else []
    for number, name in enumerate(network.block_names()):
        block, units_inside = network.get_submodule(name), any(unit.startswith(f"{name}.") for unit in units)
        if not recompute.compiled_with_block:
            compilation.block(block, units_inside=units_inside)
        if recompute.recomputes(number):
            block = recompute.wrap(block, draws=network.draws)
            network.set_submodule(name, block)
        if recompute.compiled_with_block:
            compilation.block(block, units_inside=units_inside)
    split_logits = recipe.parallelism.tensor > 1 and recipe.parallelism.loss_parallel
    network.loss = recipe.loss.function(cross_entropy if split_logits else compilation.function(cross_entropy))
    compilation.model(network, units_inside=bool(units))


def backward(recipe: Recipe, model: nn.Module, batches: list[Batch]) -> Tensor:
    """Accumulate the gradient of the mean loss over micro batches; returns that loss, detached, of this rank."""
    layout = recipe.parallelism
    split_logits = layout.tensor > 1 and layout.loss_parallel
    total = torch.zeros((), device=batches[0][0].device)
    for i, batch in enumerate(batches, 1):
        with layout.accumulating(model, last=i == len(batches)), loss_parallel() if split_logits else nullcontext():
            loss = model(*batch) / len(batches)
            loss.backward()
        total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
    return total


def update(
    recipe: Recipe, model: nn.Module, trained: list[Trained], optimizer: Optimizer, batches: list[Batch], lr: float
) -> tuple[Tensor, Tensor]:
    """One optimizer step; returns this rank's loss and the global gradient norm before clipping, both 0-d."""
    loss = backward(recipe, model, batches)
    grad_norm = global_norm(trained)
    if recipe.max_grad_norm is not None:
        clip_by_norm(trained, grad_norm, recipe.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    step_if_finite(optimizer, grad_norm)
    optimizer.zero_grad()
    recipe.precision.after_step(model)
    return loss, grad_norm


class Result(NamedTuple):
    """What `train` ends with."""

    model: nn.Module
    step: int
    """The last one done; less than `recipe.steps` when the run was requested to stop."""


def train(
    recipe: Recipe,
    meter: Meter,
    *,
    device: torch.device,
    nodes: int,
    workers: int,
    checkpoints: Path | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> Result:
    """
    Train up to step `recipe.steps`, or until a stop is requested: then with a checkpoint of the last step, if checkpoints
    are written at all.

    Args:
        checkpoints: where the run's own are written, and looked for; None: there are none.
        stop_requested: whether this rank has been requested to stop; None: it never will be.

    Raises:
        ConfigError: the recipe does not fit the devices, the data or the checkpoint.
        NotSaved: a checkpoint could not be written.
        FloatingPointError: from the meter, when a loss or gradient was not finite.
    """
    degrees = recipe.parallelism.degrees(nodes, workers)
    stored = choose_checkpoint(recipe.checkpoint.load, checkpoints)
    as_configured = recipe
    if stored is not None:
        recipe = recipe.resumed_from(stored.record)
    global_batch, _ = recipe.accumulation(degrees.data)
    mesh = build_mesh(device.type, degrees)
    model, trained, parameters = assemble(recipe, mesh, device)
    optimizer = recipe.optimizer.build([each.parameter for each in trained])
    done, consumed = 0, Consumed(0, 0)
    if stored is not None:
        from meshrunner.recipes.checkpoint.restore import restore

        restore(stored, model, optimizer)
        done, consumed = stored.record.step, Consumed(stored.record.sequences, stored.record.tokens)
        meter.resumed(done, consumed.tokens)
    saver = None
    if checkpoints is not None:
        config = as_configured.model_dump(mode="json")
        training = Training(config, recipe.steps, recipe.seed, model, optimizer, parameters, global_batch)
        saver = recipe.checkpoint.saver(checkpoints, training)
    loader = Loader(
        recipe.data.open(DataSpec(recipe.model.vocab_size, recipe.seq_len, recipe.seed)),
        global_batch=global_batch,
        micro_batch=recipe.micro_batch,
        rank=data_rank(mesh),
        ranks=degrees.data,
        device=device,
        first_step=done + 1,
        shift=consumed.sequences - done * global_batch,
    )
    flops, attention_flops = recipe.model.flops_per_token(recipe.seq_len)
    meter.started(
        device=device,
        params=parameters,
        flops_per_token=flops,
        attention_flops_per_token=attention_flops,
    )
    stop, step = StopAgreement(stop_requested) if stop_requested is not None else None, done
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection inside a step would be measured as the step's; the meter collects between steps
    try:
        for step in range(done + 1, recipe.steps + 1):
            with meter.waiting_for_data():
                batches = loader.next()
            lr = recipe.optimizer.lr * recipe.lr_schedule.factor(step)
            loss, grad_norm = update(recipe, model, trained, optimizer, batches, lr)
            meter.step_done(step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=global_batch * recipe.seq_len)
            consumed = Consumed(consumed.sequences + global_batch, consumed.tokens + global_batch * recipe.seq_len)
            stopping = step < recipe.steps and stop is not None and stop.agreed()
            if saver is not None and (saver.due(step) or stopping):
                with meter.saving():
                    saver.save(step, consumed)
            if stopping:
                break
        if saver is not None:
            saver.close()
    finally:
        gc.enable()
        loader.close()
    return Result(model, step)
