"""
Hybrid models with multi-token prediction under every layout against one process: as tests.dist.test_experts.

python -m tests.dist.test_hybrid > docs/measurements/hybrid.md
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.composed import SMALL
from tests.dist import test_checkpoint as checkpoints
from tests.dist.ranks import on_ranks
from tests.dist.test_experts import FULL, SELECTIVE, compare, graphs, reference
from tests.dist.test_layouts import CONTEXT, NEVER, ULYSSES, ZBV

HYBRID = (
    "model=hybrid_tiny",
    *(word for word in SMALL if not word.startswith("model.n_layers")),
    "model.head_dim=10",
    "model.mamba.heads=6",
    "model.mamba.head_dim=10",
    "model.mamba.state=12",
    "model.mamba.chunk=16",
    "model.experts.ffn_dim=24",
    "model.experts.shared_ffn_dim=20",
    "model.experts.balance_rate=1e-2",
    "model.mtp.depth=2",
)
RELU2 = "model.ffn=relu2 model.rope_theta=1e4"
SEQUENCE_LOSS = "model.experts.balance=sequence_loss"
DENSE = "model.pattern=M*-M model.experts=null"
STAGES = "parallelism.pipeline=2"
TIED = "model.tie_embeddings=true"
LAYOUTS = [
    (1, "parallelism=single micro_batch=4"),
    (1, f"parallelism=single micro_batch=12 {SELECTIVE}"),
    (1, "parallelism=single micro_batch=12 loss=chunked loss.tokens=100"),
    (1, "parallelism=single micro_batch=4 compile=whole_model compile.backend=aot_eager_decomp_partition"),
    (2, "parallelism=ddp micro_batch=6"),
    (2, f"parallelism=ddp micro_batch=2 {FULL} {SEQUENCE_LOSS}"),
    (2, "parallelism=fsdp1 micro_batch=2"),
    (2, f"parallelism=fsdp1 {FULL} {RELU2}"),
    (2, f"parallelism=fsdp1 {SELECTIVE} {DENSE} loss=chunked loss.tokens=100"),
    (2, f"parallelism=fsdp1 {TIED} micro_batch=2"),
    (2, "parallelism=fsdp1 wrap=root_only micro_batch=2"),
    (4, f"parallelism=hsdp1 {TIED}"),
    (2, "parallelism=fsdp2 micro_batch=2"),
    (2, f"parallelism=fsdp2 {FULL} {SEQUENCE_LOSS} loss=chunked loss.tokens=100"),
    (2, f"parallelism=fsdp2 {SELECTIVE} {RELU2}"),
    (2, f"parallelism=fsdp2 {TIED} micro_batch=3"),
    (3, "parallelism=fsdp2 micro_batch=2"),
    (3, f"parallelism=fsdp2 {FULL}"),
    (4, f"parallelism=fsdp2 {SELECTIVE}"),
    (4, f"parallelism=fsdp2 {DENSE} model.mtp.depth=0"),
    (4, "parallelism=hsdp2"),
    (4, f"parallelism=hsdp2 {FULL} parallelism.accumulate=hold"),
    (2, "parallelism=tp micro_batch=6"),
    (2, f"parallelism=tp micro_batch=6 {FULL} {SEQUENCE_LOSS}"),
    (2, f"parallelism=tp micro_batch=2 {SELECTIVE} {RELU2} loss=chunked loss.tokens=100"),
    (2, f"parallelism=tp micro_batch=6 parallelism.sequence_parallel=false {RELU2}"),
    (2, f"parallelism=tp micro_batch=6 parallelism.loss_parallel=false {DENSE}"),
    (4, "parallelism=fsdp2_tp micro_batch=3"),
    (4, f"parallelism=fsdp2_tp micro_batch=2 {FULL} {SEQUENCE_LOSS}"),
    (4, f"parallelism=fsdp2_tp micro_batch=3 {SELECTIVE} {TIED}"),
    (4, f"parallelism=fsdp1_tp micro_batch=6 {RELU2}"),
    (2, "parallelism=fsdp2 parallelism.expert=2"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=2 {FULL}"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 {SELECTIVE} {SEQUENCE_LOSS}"),
    (4, "parallelism=fsdp2 parallelism.expert=2"),
    (4, "parallelism=hsdp2 parallelism.expert=2"),
    (2, f"parallelism=fsdp2 {CONTEXT} micro_batch=2 {RELU2}"),
    (2, f"parallelism=fsdp1 {CONTEXT} {ULYSSES} {DENSE}"),
    (4, f"parallelism=fsdp2_tp {CONTEXT} micro_batch=3 {FULL}"),
    (2, f"parallelism=fsdp2 {STAGES} {ZBV} {NEVER} micro_batch=3"),
    (4, f"parallelism=ddp {STAGES} micro_batch=3"),
    (4, f"parallelism=fsdp2 {STAGES} parallelism.expert=2 micro_batch=2 {FULL}"),
    (4, f"parallelism=tp {STAGES} micro_batch=3"),
    (4, f"parallelism=fsdp2 {STAGES} {CONTEXT} micro_batch=3"),
]
QUICK = (
    (2, "parallelism=fsdp1 micro_batch=2"),
    (2, f"parallelism=fsdp2 {FULL} {SEQUENCE_LOSS} loss=chunked loss.tokens=100"),
    (2, f"parallelism=tp micro_batch=2 {SELECTIVE} {RELU2} loss=chunked loss.tokens=100"),
    (2, f"parallelism=fsdp2 parallelism.expert=2 micro_batch=2 {FULL}"),
)
"""The others are slow tests."""


@pytest.mark.slow_cases(
    "2x parallelism=fsdp2 activation_checkpoint=full model.experts.balance=*",
    "2x parallelism=tp*",
    "2x parallelism=fsdp2 parallelism.expert=2 micro_batch=2 activation_checkpoint=full",
)
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(*each, id=f"{each[0]}x {each[1]}", marks=[] if each in QUICK else [pytest.mark.slow])
        for each in LAYOUTS
    ],
)
def test_a_hybrid_equals_one_process(world: int, layout: str) -> None:
    found = compare(world, layout, HYBRID)
    assert max(found) < 1e-5, found


SAVED = {
    "single": (1, "parallelism=single micro_batch=12"),
    "ddp-2": (2, "parallelism=ddp"),
    "fsdp1-2": (2, "parallelism=fsdp1"),
    "fsdp2-3": (3, "parallelism=fsdp2"),
    "expert-2": (4, "parallelism=fsdp2 parallelism.expert=2"),
    "tp-2": (2, "parallelism=tp micro_batch=6"),
    "fsdp2-tp": (4, "parallelism=fsdp2_tp micro_batch=3"),
}


@pytest.mark.slow
def test_checkpoints_load_under_every_layout(tmp_path: Path) -> None:
    """Parameters, AdamW's state and biases, bit for bit."""
    for name, (world, layout) in SAVED.items():
        on_ranks(world, checkpoints.save, tmp_path / name, (*HYBRID, *layout.split()))
        saved = torch.load(tmp_path / name / "values.pt")
        assert any("scan.a_log" in key for key in saved) and saved["expert_bias"].any()
    for world, layout in SAVED.values():
        folders = [tmp_path / name for name in SAVED]
        for rank in on_ranks(world, checkpoints.load, folders, (*HYBRID, *layout.split())):
            assert rank == {name: [] for name in SAVED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout", "number"),
    [
        (1, "parallelism=single micro_batch=12", 6),
        (2, f"parallelism=fsdp2 {FULL}", 6),
        (2, f"parallelism=fsdp2 parallelism.expert=2 {SELECTIVE}", 6),
        (2, "parallelism=tp micro_batch=6", 5),  # the cross entropy of split logits is not compiled
        (2, f"parallelism=fsdp2 {SELECTIVE} compile.backend=inductor", 6),
    ],
)
def test_blocks_of_a_class_are_one_graph(world: int, layout: str, number: int) -> None:
    """One for each letter, one for the modules that predict further tokens, and the cross entropy."""
    words = ("compile=per_block", "compile.backend=aot_eager", *layout.split())
    for found, breaks, losses in on_ranks(world, graphs, words, HYBRID):
        assert found == [number] * 5 and breaks == {}, (found, breaks)
        assert losses == pytest.approx(reference("", HYBRID)["losses"], rel=1e-5)


def document() -> None:
    """Print docs/measurements/hybrid.md."""
    print("# A hybrid model with multi-token prediction under every layout against one process\n")
    print(f"All runs use torch {torch.__version__}, gloo on CPU and fp32. The overrides are `{' '.join(HYBRID)}`.")
    print("The page docs/measurements/experts.md explains the columns.")
    print(
        "In every row and step, the loss of multi-token prediction agrees with a run in one process to 1e-5 (relative).\n"
    )
    print("| ranks | layout | gradient | norm | loss |\n|---|---|---|---|---|")
    for world, layout in LAYOUTS:
        found = compare(world, layout, HYBRID)
        print(f"| {world} | `{layout}` | {found.gradient:.1e} | {found.norm:.1e} | {found.loss:.1e} |", flush=True)


if __name__ == "__main__":
    document()
