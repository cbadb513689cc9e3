"""The recipe: assembles model, mesh, optimizer and loader, then trains. Every worker runs it.

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
from meshrunner.recipes.determinism import compute_deterministically
from meshrunner.recipes.loss.base import cross_entropy
from meshrunner.recipes.model.balance import balance
from meshrunner.recipes.model.init_weights import Initialiser, clean_name
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.optim.grad_norm import Trainable, clip_by_norm, global_norm
from meshrunner.recipes.optim.optimizer import step_if_finite
from meshrunner.recipes.parallelism.mesh import build_expert_mesh, build_mesh, data_groups, data_rank
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
    """A model, distributed over the devices and initialised."""

    model: nn.Module
    trained: list[Trainable]
    """The parameters that are not frozen."""
    parameters: int
    """Number of parameters of the full model, including frozen ones."""


def assemble(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> Assembled:
    """
    Build the network on meta, distribute it over the devices and initialise it.

    No other order works: each step changes what the next one sees.
    """
    # 1. On meta, where no model is too large. Float8 replaces linear layers before anything refers to them.
    network = recipe.model.on_meta(recipe.seq_len)
    recipe.precision.convert(network)
    # 2. Tensor or expert parallelism: its plan uses module names, which later wrappers change.
    layout = recipe.parallelism
    if layout.tensor > 1:
        split_over_tensor(
            network, mesh["tensor"], sequence_parallel=layout.sequence_parallel, loss_parallel=layout.loss_parallel
        )
    split_by_tensor = split_parameters(network)
    expert_mesh = None
    if layout.expert > 1:
        from meshrunner.recipes.model.experts.split import split_over_experts

        expert_mesh = build_expert_mesh(mesh, layout.expert)
        split_over_experts(network, expert_mesh)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    # 3. The wrap plan uses module names, too, so it is made before checkpoint wrappers change them.
    plan = recipe.wrap.plan(network, layout.reshard(mesh["shard"].size()))
    # 4. Recomputation and compilation, inside the FSDP units: parameters must be gathered and freed around the compiled and
    # recomputed code, not in it.
    recompute_and_compile(recipe, network, plan)
    # 5. Data parallelism shards the tensor-parallel shards, and only then is memory allocated: a device never holds more
    # than its own shard. The initial values do not depend on the layout.
    # Kinds that have no expert parallelism, such as a user's own, need not know of the second mesh.
    own_mesh = {"expert_mesh": expert_mesh} if expert_mesh is not None else {}
    model = layout.apply(network, mesh, plan, recipe.precision, Initialiser(network, recipe.seed, device), **own_mesh)
    if network.loads is not None:
        network.loads.groups, network.loads.expert_ranks = data_groups(mesh), layout.expert
    trained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups = layout.shard_groups(clean_name(name), parameter, mesh, split_by_tensor)
            trained.append(Trainable(clean_name(name), parameter, groups))
    return Assembled(model, trained, parameters)


def recompute_and_compile(recipe: Recipe, network: Network, plan: WrapPlan) -> None:
    """
    Apply activation checkpointing and compilation to the blocks and the loss, in place and before data parallelism.

    `inside_compile` decides which wraps the other: the compiler must see a selective policy, and must not see whole blocks
    recomputed, or 2-d layouts fail.
    """
    recompute, compilation = recipe.activation_checkpoint, recipe.compile
    recompute.configure()
    compilation.configure()
    units = [name for name in plan if name] if recipe.parallelism.wraps_units else []
    for number, name in enumerate(network.block_names()):
        block, contains_units = network.get_submodule(name), any(unit.startswith(f"{name}.") for unit in units)
        if not recompute.inside_compile:
            compilation.compile_block(block, contains_units=contains_units)
        if recompute.recomputes(number):
            block = recompute.wrap(block, preserve_rng_state=network.uses_rng)
            network.set_submodule(name, block)
        if recompute.inside_compile:
            compilation.compile_block(block, contains_units=contains_units)
    summed = cross_entropy if recipe.parallelism.splits_logits else compilation.compile_function(cross_entropy)
    network.loss = recipe.loss.install(getattr(network, "output", None), summed)
    compilation.compile_model(network, contains_units=bool(units))


def backward(recipe: Recipe, model: nn.Module, batches: list[Batch]) -> Tensor:
    """Accumulate the gradient of the mean loss over micro batches; returns this rank's loss, detached."""
    layout = recipe.parallelism
    total = torch.zeros((), device=batches[0][0].device)
    for i, batch in enumerate(batches, 1):
        split = loss_parallel() if layout.splits_logits else nullcontext()
        with layout.accumulating(model, last=i == len(batches)), split:
            with layout.computing(recipe.precision, total.device.type):
                loss = model(*batch) / len(batches)
            loss.backward()
        total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
    return total


class Updated(NamedTuple):
    """The result of `update`; all values are 0-d."""

    loss: Tensor
    """Of this rank."""
    grad_norm: Tensor
    """The global gradient norm before clipping."""
    observed: dict[str, Tensor]
    """What else is recorded of the step, mean over ranks."""


def update(
    recipe: Recipe, model: nn.Module, trained: list[Trainable], optimizer: Optimizer, batches: list[Batch], lr: float
) -> Updated:
    """Take one optimizer step."""
    loss = backward(recipe, model, batches)
    grad_norm = global_norm(trained, loss.device)
    if recipe.max_grad_norm is not None:
        clip_by_norm(trained, grad_norm, recipe.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    network = network_of(model)
    observed = {key: total / len(batches) for key, total in network.observed.items()}
    for total in network.observed.values():
        total.zero_()
    if network.loads is not None:
        observed |= balance(network.loads, grad_norm.isfinite())
    step_if_finite(optimizer, grad_norm)
    optimizer.zero_grad()
    recipe.precision.after_step(model)
    for key, value in recipe.parallelism.after_step(model).items():
        observed[key] = torch.full((), float(value), device=loss.device)
    return Updated(loss, grad_norm, observed)


class Result(NamedTuple):
    """The result of `train`."""

    model: nn.Module
    step: int
    """The last completed step; less than `recipe.steps` if a stop was requested."""


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
    Train up to step `recipe.steps`, or until a stop is requested, in which case the last step is saved if checkpoints are on.

    Args:
        checkpoints: the folder that the run's checkpoints are read from and written to; None: no checkpoints.
        stop_requested: whether this rank was requested to stop; None: it never is.

    Raises:
        ConfigError: the recipe does not fit the devices, the data or the checkpoint.
        NotSaved: a checkpoint could not be written.
        FloatingPointError: from the meter, when a loss or gradient was not finite.
    """
    meter.doing("building the model")
    recipe = recipe.on(device.type)
    if recipe.deterministic:
        compute_deterministically(compiles=recipe.compile.compiles)
    degrees = recipe.parallelism.degrees(nodes, workers)
    stored = choose_checkpoint(recipe.checkpoint.load, checkpoints)
    as_configured = recipe
    if stored is not None:
        recipe = recipe.resumed_from(stored.record)
    global_batch, _ = recipe.accumulation(degrees.data)
    mesh = build_mesh(device.type, degrees)
    model, trained, parameters = assemble(recipe, mesh, device)
    optimizer = recipe.parallelism.optimizer(model, recipe.optimizer.build([each.parameter for each in trained]))
    done, consumed = 0, Consumed(0, 0)
    if stored is not None:
        from meshrunner.recipes.checkpoint.restore import restore

        meter.doing("loading the checkpoint")
        restore(stored, model, optimizer)
        done, consumed = stored.record.step, Consumed(stored.record.sequences, stored.record.tokens)
        meter.resumed(done, consumed.tokens)
    saver = None
    if checkpoints is not None:
        config = as_configured.model_dump(mode="json")
        training = Training(config, recipe.steps, recipe.seed, model, optimizer, parameters, global_batch)
        saver = recipe.checkpoint.saver(checkpoints, training)
    meter.doing("opening the data")
    sequences = recipe.data.open(DataSpec(recipe.model.vocab_size, recipe.seq_len, recipe.seed))
    loader = Loader(
        sequences,
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
        active_params=parameters - recipe.model.inactive_parameters(),
        flops_per_token=flops,
        attention_flops_per_token=attention_flops,
        describe_data=sequences.describe,
    )
    stop, step = StopAgreement(stop_requested) if stop_requested is not None else None, done
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection inside a step would count as step time; the meter collects between steps
    try:
        for step in range(done + 1, recipe.steps + 1):
            with meter.waiting_for_data():
                batches = loader.next()
            lr = recipe.optimizer.lr * recipe.lr_schedule.factor(step)
            loss, grad_norm, observed = update(recipe, model, trained, optimizer, batches, lr)
            tokens = global_batch * recipe.seq_len
            meter.step_done(step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens, observed=observed)
            consumed = Consumed(consumed.sequences + global_batch, consumed.tokens + tokens)
            stopping = step < recipe.steps and stop is not None and stop.agreed()
            if saver is not None and (saver.due(step) or stopping):
                with meter.saving():
                    saver.save(step, consumed)
            if stopping:
                break
        if saver is not None:
            meter.doing("saving a checkpoint")  # one that is written in the background
            saver.close()
    finally:
        gc.enable()
        loader.close()
    return Result(model, step)
