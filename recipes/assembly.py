"""Assemble a model: steps 1 to 5 of preparing a run. `pretrain.prepare` adds steps 6 and 7, the optimizer and the loader. The
order is fixed, because each step changes modules or parameters that the next step uses."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshrunner.recipes.errors import TooLarge
from meshrunner.recipes.model.base import clean_name
from meshrunner.recipes.model.context import split_sequences
from meshrunner.recipes.model.init_weights import Initialiser, local_part
from meshrunner.recipes.model.network import Network
from meshrunner.recipes.optim.grad_norm import Trainable
from meshrunner.recipes.optim.outliers import Outliers
from meshrunner.recipes.parallelism.mesh import context_group, data_groups, split_model
from meshrunner.recipes.parallelism.pipeline.stages import ranges
from meshrunner.recipes.parallelism.wrap_policy import WrapPlan
from meshrunner.recipes.recipe import Recipe
from meshrunner.recipes.weights.initial import reader


def assemble(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> tuple[nn.Module, list[Trainable], int]:
    """Build the network on the meta device, distribute it over the devices and initialise it.

    Return the model, its trainable parameters, and the total number of parameters of the full model. On CPUs, raises
    TooLarge if a rank's parameters and optimizer state exceed the rank's host memory.
    """
    layout = recipe.parallelism
    # 1. Build on the meta device, where any model fits. Float8 replaces linear layers before anything refers to them.
    network = recipe.model.on_meta(recipe.seq_len)
    recipe.precision.convert(network, layout.tensor)
    if recipe.data.separates_documents:
        network.document_end = 0  # a placeholder, sufficient for tracing on meta; `prepare` sets the right token
    # 2. Context, tensor or expert parallelism. Their plans use module names, which later wrappers change.
    if layout.context > 1:
        split_sequences(network, context_group(mesh, layout), layout.context_method, recipe.seq_len)
    tensor_parallel = split_model(network, mesh, layout)
    if recipe.compile.async_tensor_parallel and device.type != "meta":
        from meshrunner.recipes.compile.async_tensor_parallel import fuse_collectives

        fuse_collectives(mesh.get_group("tensor"))
    parameters = sum(parameter.numel() for parameter in network.parameters())
    matrices = network.matrices()
    # 3. The wrap plan also uses module names, so it is made before activation checkpointing wraps modules.
    plan = recipe.wrap.plan(network, layout.reshard(mesh["shard"].size()))
    # 4. Recompute and compile inside the FSDP units. FSDP then gathers parameters before the recomputed or compiled code runs,
    # and frees them afterwards.
    recompute_and_compile(recipe, network, plan)
    parts = _cut(recipe, network, mesh, device) if layout.pipeline > 1 else {}
    if device.type == "cpu" and (host_bytes := recipe.host_bytes(mesh.size())) is not None:
        _refuse_too_large(recipe, network, mesh["shard"].size(), host_bytes)
    # 5. Data parallelism shards the tensor-parallel shards. Only then is memory allocated and initialised, so a device never
    # holds more than its own shard. The initial values do not depend on the layout.
    initialiser = Initialiser(network, recipe.seed, device, reader(recipe.model))
    if parts:
        model: nn.Module = _pipelined(recipe, network, mesh, plan, initialiser, parts)
    else:
        model = layout.apply(network, mesh, plan, recipe.precision, initialiser)
    if network.loads is not None:
        network.loads.groups, network.loads.expert_ranks = data_groups(mesh), layout.expert
    if recipe.optimizer.skip_above is not None:
        network.outliers = Outliers(recipe.optimizer.skip_above, device)
    trained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups = layout.shard_groups(clean_name(name), parameter, mesh, tensor_parallel)
            trained.append(Trainable(clean_name(name), parameter, groups, clean_name(name) in matrices))
    return model, trained, parameters


def _cut(recipe: Recipe, network: Network, mesh: DeviceMesh, device: torch.device) -> dict[int, nn.Module]:
    """Remove the modules of other pipeline ranks from the network. Return this rank's parts, keyed by stage number."""
    from meshrunner.recipes.parallelism.pipeline.part import Part, cut

    layout, split = recipe.parallelism, ranges(recipe.pipeline_split())
    own = layout.schedule.stages_of(mesh.get_local_rank("pipeline"), layout.pipeline, layout.stages_per_rank)
    computing = partial(layout.computing, recipe.precision, device.type)
    parts = {stage: Part(network, split[stage], computing) for stage in own}
    for part in parts.values():
        part.parts = list(parts.values())
    cut(network, parts.values())
    return dict(parts)


def _pipelined(
    recipe: Recipe,
    network: Network,
    mesh: DeviceMesh,
    plan: WrapPlan,
    initialiser: Initialiser,
    parts: dict[int, nn.Module],
) -> nn.Module:
    """Distribute each stage over the mesh's data-parallel dimensions. Return the network, which contains the stages' modules."""
    from meshrunner.recipes.parallelism.pipeline.pipeline import Pipeline

    layout, precision, stages = recipe.parallelism, recipe.precision, {}
    for stage, part in parts.items():
        names = {clean_name(name) for name, _ in part.named_modules()}
        own = {name: unit for name, unit in plan.items() if name in names}
        stages[stage] = layout.apply(part, mesh, own, precision, initialiser)
    tokens = recipe.seq_len // layout.context // (layout.tensor if layout.sequence_parallel else 1)
    shape, dtype = network.stream_shape(recipe.micro_batch, tokens), precision.param_dtype or torch.float32
    number = layout.pipeline * layout.stages_per_rank
    network.pipeline = Pipeline(stages, number, layout.schedule, mesh.get_group("pipeline"), shape, dtype)
    return network


def _refuse_too_large(recipe: Recipe, network: Network, shards: int, host_bytes: int) -> None:
    """Raise TooLarge if a rank needs more than `host_bytes`, instead of letting Linux kill processes when memory runs out."""
    sizes = [(local_part(p).numel(), p.requires_grad) for p in network.parameters()]
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
    recomputation. A block with full checkpointing is compiled first, because compiling a wrapped block fails on 2-d meshes.
    """
    recompute, compilation = recipe.activation_checkpoint, recipe.compile
    recompute.configure()
    # With row-wise float8 scales, recomputing values with different rounding can make the loss NaN (pytorch issue 150859).
    compilation.configure(emulate_casts=recipe.precision.scales_rows)
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
    summed = recipe.loss.summed()
    if not recipe.parallelism.splits_logits:
        summed = compilation.compile_function(summed)
    network.loss = recipe.loss.install(getattr(network, "output", None), summed)
    compilation.compile_model(network, contains_units=bool(units))
