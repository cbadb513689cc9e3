"""Attention within documents: packed documents equal single documents, with their gradients, losses and FLOPs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.documents import find_documents
from meshrunner.recipes.model.init_weights import Initialiser
from meshrunner.recipes.model.network import Network
from meshrunner.recipes.recipe import Recipe
from meshrunner.runner.config.consistency import fit
from tests.composed import SMALL, experiment
from tests.documents import END

LENGTHS = [[5, 1, 17, 11], [34], [1, 1, 32], [20, 14]]
"""Lengths of the documents in each sequence. The last document of a sequence may lack its end."""
EXPERTS = ("model=moe_tiny", *SMALL, "model.experts.ffn_dim=24", "model.experts.shared_ffn_dim=20")


def packed(seed: int, all_lengths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, [4, 34], with documents of the given lengths."""
    rows = torch.randint(END + 1, 509, (len(LENGTHS), 35), generator=torch.Generator().manual_seed(seed))
    for row, lengths in zip(rows, all_lengths, strict=True):
        row[torch.tensor(lengths).cumsum(0)[:-1] - 1] = END
    rows[1, 33] = END  # the end of a document at the end of its sequence
    return rows[:, :-1], rows[:, 1:]


def network_of(recipe: Recipe, *, recomputes: bool) -> Network:
    network = recipe.model.on_meta(recipe.seq_len)
    for name in network.block_names() if recomputes else ():
        block = recipe.activation_checkpoint.wrap(network.get_submodule(name), preserve_rng_state=False)
        network.set_submodule(name, block)
    Initialiser(network, 3, torch.device("cpu")).materialise(network)
    return network


def gradients(network: Network) -> list[Tensor]:
    found = [p.grad for p in network.parameters() if p.grad is not None]
    assert len(found) == len(list(network.parameters()))
    network.zero_grad()
    return found


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective_op"])
@pytest.mark.parametrize("words", [SMALL, (*SMALL, "model.rope_theta=null"), EXPERTS], ids=["llama", "nope", "experts"])
def test_packed_documents_equal_each_document_alone(words: tuple[str, ...], checkpoint: str) -> None:
    """Two micro batches run forward before backward, so that recomputation needs the documents of its own micro batch."""
    recipe = experiment(*words, f"activation_checkpoint={checkpoint}")
    network = network_of(recipe, recomputes=checkpoint != "none")
    of_batches = LENGTHS, LENGTHS[::-1]
    batches = [packed(seed, lengths) for seed, lengths in enumerate(of_batches)]

    def losses(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(network(tokens).flatten(0, 1), targets.flatten(), reduction="none")

    alone = []
    for (tokens, targets), all_lengths in zip(batches, of_batches, strict=True):
        for row, expected, lengths in zip(tokens, targets, all_lengths, strict=True):
            for document, following in zip(row.split(lengths), expected.split(lengths), strict=True):
                loss = losses(document.unsqueeze(0), following.unsqueeze(0))
                loss.sum().backward()
                alone.append(loss.detach())
    expected_gradients = gradients(network)
    network.document_end = END
    together = [losses(*batch) for batch in batches]
    torch.stack([loss.sum() for loss in together]).sum().backward()
    torch.testing.assert_close(torch.cat(together).detach(), torch.cat(alone), rtol=1e-6, atol=1e-6)
    for found, wanted in zip(gradients(network), expected_gradients, strict=True):
        assert (found - wanted).norm() < 1e-6 * wanted.norm()
    network.document_end = None
    assert not torch.allclose(losses(*batches[0]), together[0], atol=1e-3)


def test_positions_start_at_0_in_each_document() -> None:
    """Losses cannot show this, because rotary attention depends only on differences of positions."""
    table = torch.randn(34, 2, 8)
    found = find_documents(packed(0, LENGTHS)[0], END, table, torch.float32).rope
    expected = [torch.cat([table[:length] for length in lengths]) for lengths in LENGTHS]
    assert found is not None and torch.equal(found, torch.stack(expected))


def test_documents_need_no_device_values() -> None:
    """A value read by the host would raise an error on meta."""
    rope = torch.empty(9, 2, 8, device="meta")
    found = find_documents(torch.empty(3, 9, dtype=torch.int64, device="meta"), END, rope, torch.bfloat16)
    assert found.rope is not None and found.rope.shape == (3, 9, 2, 8)
    assert (found.mask.shape, found.mask.dtype) == ((3, 1, 9, 9), torch.bfloat16)


SEPARATE = "data.documents=separate"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{SEPARATE} parallelism=fsdp2_pp", "data.documents: attention within documents needs the tokens"),
        (f"{SEPARATE} parallelism=fsdp2_cp", "data.documents: a device that holds a part of each sequence"),
        (f"{SEPARATE} model=hybrid_tiny", "data.documents: the state of Mamba-2 blocks crosses"),
        (f"{SEPARATE} model=hybrid_tiny model.mtp.depth=1", "data.documents: multi-token prediction crosses"),
        (f"{SEPARATE} --config-dir=examples/own_model model=gpt", "data.documents: this model cannot separate"),
    ],
)
def test_documents_are_refused_where_attention_would_cross_them(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(experiment(*words.split()), 2)


def test_documents_are_accepted_elsewhere() -> None:
    attention_only = "model=hybrid_tiny model.pattern=*- model.mamba=null model.experts=null"
    for words in ("parallelism=fsdp2_tp", "parallelism=ep model=moe_tiny", attention_only):
        fit(experiment(SEPARATE, *words.split()), 4)
