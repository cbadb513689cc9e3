"""Pretraining: assemble model, mesh, optimizer and loader, then train. Every worker runs this code.

    train(recipe, meter, device=device, nodes=1, workers=2, checkpoints=Path("checkpoints"))

`train` needs an initialised process group of `nodes` x `workers` ranks. Comments number the seven steps of the assembly. The
steps have a fixed order, because each step changes modules or parameters that the next step uses.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from meshrunner.recipes.checkpoint.base import Saver
from meshrunner.recipes.checkpoint.on_disk import Consumed, Training, choose_checkpoint
from meshrunner.recipes.compile.cuda_graph import CapturedStep, Metrics
from meshrunner.recipes.data.base import DataSpec
from meshrunner.recipes.data.loader import Batches, Loader
from meshrunner.recipes.determinism import compute_deterministically
from meshrunner.recipes.errors import TooLarge
from meshrunner.recipes.loss.base import cross_entropy
from meshrunner.recipes.meter import Meter
from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.model.context import split_sequences
from meshrunner.recipes.model.init_weights import Initialiser
from meshrunner.recipes.model.network import Network, network_of
from meshrunner.recipes.optim.grad_norm import Trainable, clip_by_norm, global_norm
from meshrunner.recipes.optim.optimizer import step_if_finite
from meshrunner.recipes.parallelism.mesh import build_mesh, context_group, data_groups, place, split_model
from meshrunner.recipes.parallelism.wrap_policy import WrapPlan
from meshrunner.recipes.recipe import Recipe
from meshrunner.recipes.stop import stop_agreement


def assemble(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> tuple[nn.Module, list[Trainable], int]:
    """Build the network on the meta device, distribute it over the devices and initialise it.

    Return the model, its trainable parameters, and the total number of parameters of the full model. Raises TooLarge if the
    host memory of a rank on a CPU cannot hold the rank's parameters and optimizer state.
    """
    layout = recipe.parallelism
    # 1. Build on meta, where any model fits. Float8 replaces linear layers before anything refers to them.
    network = recipe.model.on_meta(recipe.seq_len)
    recipe.precision.convert(network)
    # 2. Context, tensor or expert parallelism. Their plans use module names, which later wrappers change.
    if layout.context > 1:
        split_sequences(network, context_group(mesh, layout), layout.context_method, recipe.seq_len)
    tensor_parallel = split_model(network, mesh, layout)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    # 3. The wrap plan also uses module names, so it precedes the checkpoint wrappers.
    plan = recipe.wrap.plan(network, layout.reshard(mesh["shard"].size()))
    # 4. Recomputation and compilation go inside the FSDP units, because parameters must be gathered and freed around such code.
    recompute_and_compile(recipe, network, plan)
    if device.type == "cpu" and (host_bytes := recipe.host_bytes(mesh.size())) is not None:
        _refuse_too_large(recipe, network, mesh["shard"].size(), host_bytes)
    # 5. Data parallelism shards the tensor-parallel shards. Only then is memory allocated and initialised, so a device never
    # holds more than its own shard. The initial values do not depend on the layout.
    model = layout.apply(network, mesh, plan, recipe.precision, Initialiser(network, recipe.seed, device))
    if network.loads is not None:
        network.loads.groups, network.loads.expert_ranks = data_groups(mesh), layout.expert
    trained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups = layout.shard_groups(clean_name(name), parameter, mesh, tensor_parallel)
            trained.append(Trainable(clean_name(name), parameter, groups))
    return model, trained, parameters


def _refuse_too_large(recipe: Recipe, network: Network, shards: int, host_bytes: int) -> None:
    """Raise TooLarge if a rank needs more than `host_bytes`, instead of letting Linux kill processes when memory runs out."""
    sizes = [((p.to_local() if isinstance(p, DTensor) else p).numel(), p.requires_grad) for p in network.parameters()]
    held = sum(size for size, _ in sizes) // shards
    trained = sum(size for size, requires_grad in sizes if requires_grad) // shards
    needed = 4 * held + (recipe.optimizer.state_bytes(trained, len(sizes)) or 0)
    if needed > host_bytes:
        raise TooLarge(
            f"parameters and optimizer state take {needed / 2**30:.1f} GiB per rank, but a rank has {host_bytes / 2**30:.1f} GiB "
            "of host memory; use a smaller model or more devices, or set launch.host_memory_gib if a rank may take more"
        )


def recompute_and_compile(recipe: Recipe, network: Network, plan: WrapPlan) -> None:
    """Apply activation checkpointing to the blocks, and compile the blocks and the loss, in place.

    A block with selective checkpointing (`inside_compile`) is wrapped first and then compiled, because the compiler must see the
    recomputation. A block with full checkpointing is compiled first, because compiling a wrapped block fails with 2-d layouts.
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


class Prepared(NamedTuple):
    """The objects that the training loop needs."""

    recipe: Recipe
    """The recipe with `auto` resolved. If the run is resumed, a null global_batch is replaced by the checkpoint's value."""
    model: nn.Module
    trained: list[Trainable]
    optimizer: Optimizer
    saver: Saver | None
    loader: Loader
    global_batch: int
    done: int
    """Number of completed steps: the step of the loaded checkpoint, or 0 if no checkpoint was loaded."""
    consumed: Consumed


def prepare(
    recipe: Recipe, meter: Meter, device: torch.device, nodes: int, workers: int, checkpoints: Path | None
) -> Prepared:
    """Assemble the model, load a checkpoint if there is one, and open the data. `train` has the same arguments."""
    meter.doing("building the model")
    recipe = recipe.on(device.type)
    if recipe.deterministic:
        compute_deterministically(compiles=recipe.compile.compiles)
    if recipe.compile.cuda_graph:  # a capture needs a side stream, on which autograd's earlier work ran, too
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    degrees = recipe.parallelism.degrees(nodes, workers)
    stored = choose_checkpoint(recipe.checkpoint.load, checkpoints)
    config = recipe.model_dump(mode="json") if checkpoints is not None else {}  # saved as configured, not as resumed
    if stored is not None:
        recipe = recipe.resumed_from(stored.record)
    global_batch, _ = recipe.accumulation(degrees.data)
    mesh = build_mesh(device.type, degrees)
    model, trained, parameters = assemble(recipe, mesh, device)
    # 6. The optimizer comes after sharding, because it updates this device's shards and stores state for these shards.
    optimizer = recipe.parallelism.optimizer(model, recipe.optimizer.build([each.parameter for each in trained]))
    done, consumed = 0, Consumed(sequences=0, tokens=0)
    if stored is not None:
        from meshrunner.recipes.checkpoint.state_dict import restore

        meter.doing("loading the checkpoint")
        restore(stored, model, optimizer)
        done, consumed = stored.record.step, Consumed(stored.record.sequences, stored.record.tokens)
        meter.resumed(done, consumed.tokens)
    training = Training(config, recipe.steps, recipe.seed, model, optimizer, parameters, global_batch)
    saver = recipe.checkpoint.saver(checkpoints, training) if checkpoints is not None else None
    # 7. The loader comes last, because its thread starts to read batches at once.
    meter.doing("opening the data")
    sequences = recipe.data.open(DataSpec(recipe.model.vocab_size, recipe.seq_len, recipe.seed))
    loader = Loader(
        sequences,
        global_batch=global_batch,
        micro_batch=recipe.micro_batch,
        rank=place(mesh, degrees)[0],
        ranks=degrees.data,
        device=device,
        own=network_of(model).own,
        first_step=done + 1,
        shift=consumed.sequences - done * global_batch,
    )
    meter.started(device=device, params=parameters, describe_data=sequences.describe)
    return Prepared(recipe, model, trained, optimizer, saver, loader, global_batch, done, consumed)


def train(
    recipe: Recipe,
    meter: Meter,
    *,
    device: torch.device,
    nodes: int,
    workers: int,
    checkpoints: Path | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> tuple[nn.Module, int]:
    """Train up to step `recipe.steps` or until a stop is requested on any rank. A run that saves checkpoints saves its last step.

    Return the trained model and the last completed step. If `checkpoints` is None, no checkpoint is saved, and only
    `checkpoint.load` is read. Raises ConfigError if the recipe does not fit the devices, the data or the checkpoint, and
    TooLarge if host memory is too small. Raises NotSaved if a checkpoint cannot be written. The meter raises FloatingPointError
    if a loss or gradient norm is not finite.
    """
    run = prepare(recipe, meter, device, nodes, workers, checkpoints)
    recipe, step, consumed = run.recipe, run.done, run.consumed
    tokens = run.global_batch * recipe.seq_len
    updating = partial(update, recipe, run.model, run.trained, run.optimizer)
    captured = recipe.compile.cuda_graph
    take_step = CapturedStep(updating, run.optimizer, device, meter.capturing) if captured else updating
    stop = repeat(False) if stop_requested is None else stop_agreement(stop_requested)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection within a step would count as step time; the meter collects between steps
    try:
        for step in range(run.done + 1, recipe.steps + 1):
            with meter.waiting_for_data(), torch.no_grad():  # a batch is not kept for backward
                batches = run.loader.next()
            lr = recipe.optimizer.lr * recipe.lr_schedule.factor(step)
            loss, grad_norm, observed = take_step(batches, lr)
            meter.step_done(step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens, observed=observed)
            del batches, loss, grad_norm, observed  # otherwise they would be held during the next step
            consumed = Consumed(consumed.sequences + run.global_batch, consumed.tokens + tokens)
            stopping = step < recipe.steps and next(stop)
            if run.saver is not None and (run.saver.due(step) or stopping):
                with meter.saving():
                    run.saver.save(step, consumed)
            if stopping:
                break
        if run.saver is not None:
            meter.doing("saving a checkpoint")  # waits for a checkpoint that is being written in the background
            run.saver.close()
    finally:
        gc.enable()
        run.loader.close()
    return run.model, step


def update(
    recipe: Recipe,
    model: nn.Module,
    trained: list[Trainable],
    optimizer: Optimizer,
    batches: Batches,
    lr: float | Tensor,
) -> Metrics:
    """Take one optimizer step. Return this rank's loss, the gradient norm before clipping, and further metrics as 0-d tensors.

    With `compile.cuda_graph`, a GPU replays the kernels of one call. Every call must therefore issue the same kernels, without
    waiting for the device, and `lr` must be a 0-d tensor.
    """
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
        observed |= network.loads.balance(grad_norm.isfinite())
    step_if_finite(optimizer, grad_norm)
    optimizer.zero_grad()
    recipe.precision.after_step(model)
    for key, value in recipe.parallelism.after_step(model).items():
        observed[key] = torch.full((), float(value), device=loss.device)
    return loss, grad_norm, observed


def backward(recipe: Recipe, model: nn.Module, batches: Batches) -> Tensor:
    """Accumulate the gradient of the mean loss over all micro batches. Return this rank's mean loss, detached."""
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
