"""Pretraining: assemble model, mesh, optimizer and loader, then train. Every worker runs this code.

    train(recipe, meter, device=device, nodes=1, workers=2, checkpoints=Path("checkpoints"))

`train` needs an initialised process group of `nodes` x `workers` ranks. Numbered comments here and in `assembly` mark the seven
steps that assemble a run.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from meshrunner.recipes.assembly import assemble
from meshrunner.recipes.checkpoint.base import Saver
from meshrunner.recipes.checkpoint.on_disk import Consumed, StoredCheckpoint, Training, choose_checkpoint
from meshrunner.recipes.compile.cuda_graph import CapturedStep, Metrics
from meshrunner.recipes.data.loader import Batches, Loader
from meshrunner.recipes.determinism import compute_deterministically
from meshrunner.recipes.evaluator import Evaluator
from meshrunner.recipes.loss.base import to_plain
from meshrunner.recipes.meter import Meter
from meshrunner.recipes.model.network import network_of
from meshrunner.recipes.optim.grad_norm import Trainable, clip_by_norm, squared_norm
from meshrunner.recipes.optim.optimizer import step_if_finite
from meshrunner.recipes.parallelism.mesh import build_mesh, place
from meshrunner.recipes.recipe import Recipe
from meshrunner.recipes.weights.initial import KEY, hugging_face_folder


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
    evaluator: Evaluator | None
    evaluated: bool
    """Whether this run saved the loaded checkpoint. If an evaluation was due at that step, it is already in evals.jsonl."""


def prepare(
    recipe: Recipe, meter: Meter, device: torch.device, nodes: int, workers: int, checkpoints: Path | None
) -> Prepared:
    """Assemble the model, load a checkpoint if there is one, and open the data. `train` has the same arguments."""
    meter.doing("building the model")
    recipe = recipe.on(device.type)
    if recipe.deterministic:
        compute_deterministically(compiles=recipe.compile.compiles)
    if recipe.compile.cuda_graph:  # a step is captured in a side stream, which autograd must use from the start
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    degrees = recipe.parallelism.degrees(nodes, workers)
    stored = choose_checkpoint(recipe.checkpoint.load, checkpoints)
    # Checkpoints record the recipe as configured, before `resumed_from` changes it.
    config = recipe.model_dump(mode="json") if checkpoints is not None else {}
    if stored is not None:
        recipe = recipe.resumed_from(stored.record)
        # The checkpoint replaces the initial weights, whose files may be gone.
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": None})})
    global_batch, _ = recipe.accumulation(degrees.data)
    mesh = build_mesh(device.type, degrees)
    model, trained, parameters = assemble(recipe, mesh, device)
    # 6. The optimizer comes after sharding, because it updates this device's shards and stores state for these shards.
    optimizer = recipe.parallelism.optimizer(model, recipe.optimizer.build_for(trained))
    done, consumed = load(recipe, meter, stored, model, optimizer)
    training = Training(config, recipe.steps, recipe.seed, model, optimizer, parameters, global_batch)
    saver = recipe.checkpoint.saver(checkpoints, training) if checkpoints is not None else None
    # 7. The loader comes last, because its thread starts to read batches at once.
    meter.doing("opening the data")
    network, rank = network_of(model), place(mesh, degrees)[0]
    sequences, held_out = recipe.data.open(recipe.data_spec), recipe.held_out(degrees.data)
    if recipe.data.separates_documents:
        network.document_end = recipe.data.document_end(recipe.data_spec)
    evaluator = held_out and Evaluator(recipe, model, held_out, rank=rank, ranks=degrees.data, device=device)
    loader = Loader(
        sequences,
        global_batch=global_batch,
        micro_batch=recipe.micro_batch,
        rank=rank,
        ranks=degrees.data,
        device=device,
        own=network.own,
        first=consumed.sequences,
    )
    meter.started(device=device, params=parameters, describe_data=sequences.describe)
    evaluated = stored is not None and stored.path.parent == checkpoints
    return Prepared(
        recipe, model, trained, optimizer, saver, loader, global_batch, done, consumed, evaluator, evaluated
    )


def load(
    recipe: Recipe, meter: Meter, stored: StoredCheckpoint | None, model: nn.Module, optimizer: Optimizer
) -> tuple[int, Consumed]:
    """Load the checkpoint `stored`. Without it, load the weights of the run or checkpoint that `model.weights` names, if any.
    Return the number of completed steps and the consumed data."""
    start = stored
    if stored is None and not hugging_face_folder(recipe.model):
        start = choose_checkpoint(recipe.model.weights, None, KEY)
    if start is not None:
        from meshrunner.recipes.checkpoint.state_dict import restore

        meter.doing("loading the checkpoint")
        restore(start, model, optimizer if stored else None)
    if stored is None:
        return 0, Consumed(sequences=0, tokens=0)
    meter.resumed(stored.record.step, stored.record.tokens)
    return stored.record.step, Consumed(stored.record.sequences, stored.record.tokens)


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
    """Train up to step `recipe.steps`, until any rank requests a stop, or until `eval.stop_after` ends the run. If checkpoints
    are saved, the last step is saved, too.

    Return the trained model and the last completed step. If `checkpoints` is None, no checkpoint is saved, and only a checkpoint
    that `checkpoint.load` names is loaded. Raises ConfigError if the recipe does not fit the devices, the data or the checkpoint,
    and TooLarge if host memory is too small. Raises NotSaved if a checkpoint cannot be written. The meter raises
    FloatingPointError if a loss or gradient norm is not finite.
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
    gc.disable()  # garbage collection in a step would count as step time; the meter collects between steps
    try:
        if run.evaluator is not None and not run.evaluated:
            meter.evaluate(step, run.evaluator.loss, run.evaluator.tokens)
        for step in range(run.done + 1, recipe.steps + 1):
            with meter.waiting_for_data(), torch.no_grad():  # so `plan` does not count batches as saved for backward
                batches = run.loader.next()
            lr = recipe.optimizer.lr * recipe.lr_schedule.factor(step)
            loss, grad_norm, observed = take_step(batches, lr)
            meter.step_done(step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens, observed=observed)
            del batches, loss, grad_norm, observed  # otherwise they would be held during the next step
            consumed = Consumed(consumed.sequences + run.global_batch, consumed.tokens + tokens)
            stopping = step < recipe.steps and next(stop)
            if run.evaluator is not None and recipe.eval.due(step, recipe.steps):
                # Evaluate before saving, so that a run that resumes from the checkpoint does not repeat the evaluation.
                stopping |= meter.evaluate(step, run.evaluator.loss, run.evaluator.tokens)
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
    waiting for the device, and `lr` must be a 0-d tensor."""
    loss = backward(recipe, model, batches)
    network = network_of(model)
    observed = {key: total / len(batches) for key, total in network.observed.items()}
    for total in network.observed.values():
        total.zero_()
    square = squared_norm(trained, loss.device)
    if network.pipeline is not None:
        # Each rank has the gradients of some blocks, and only the last rank has the loss.
        square, loss, *others = network.pipeline.summed((square, loss, *observed.values()))
        loss, observed = loss.float(), dict(zip(observed, others, strict=True))
    grad_norm = square.sqrt().float()
    if recipe.max_grad_norm is not None:
        clip_by_norm(trained, grad_norm, recipe.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    checked = grad_norm
    if network.outliers is not None:
        outlier = network.outliers.is_outlier(loss, grad_norm)
        observed["train/skipped"] = outlier.float()
        checked = torch.where(outlier, math.nan, grad_norm)
    if network.loads is not None:
        observed |= network.loads.balance(checked.isfinite())
    step_if_finite(optimizer, checked)
    optimizer.zero_grad()
    recipe.precision.after_step(model)
    for key, value in recipe.parallelism.after_step(model).items():
        observed[key] = torch.full((), float(value), device=loss.device)
    return loss, grad_norm, observed


def backward(recipe: Recipe, model: nn.Module, batches: Batches) -> Tensor:
    """Accumulate the gradient of the mean loss over all micro batches. Return this rank's mean loss, detached; 0 if another rank
    has the last pipeline stage."""
    layout, pipeline = recipe.parallelism, network_of(model).pipeline
    split = loss_parallel if layout.splits_logits else nullcontext
    if pipeline is not None:
        with split():
            mean: Tensor = pipeline.run(batches, forward_only=False)
        return mean
    total = torch.zeros((), device=batches[0][0].device)
    for i, batch in enumerate(batches, 1):
        with layout.accumulating(model, last=i == len(batches)), split():
            with layout.computing(recipe.precision, total.device.type):
                loss = model(*batch) / len(batches)
            loss.backward()
        total += to_plain(loss).detach()
    return total


def stop_agreement(requested: Callable[[], bool]) -> Iterator[bool]:
    """Yield whether to stop, once per step, so that a preempted run can save a checkpoint before it is killed. If `requested()`
    is true on any rank, all ranks get True one step later. After every step, a rank reads the result of the previous step's
    all-reduce, usually without waiting, and starts another."""
    group = dist.new_group(backend="fake" if dist.get_backend() == "fake" else "gloo")
    flag = torch.zeros(1, dtype=torch.int32)
    while not flag.item():
        flag.fill_(requested())
        reduced = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True)
        yield False
        reduced.wait()
    yield True
