"""Names of parameters here and in Hugging Face folders. This module imports neither torch nor safetensors.

Linear weights have the same layout in both: [out, in]. A stack of experts, [experts, in, out], is one tensor per expert in a
folder, [out, in], so each tensor is the transpose of one matrix of the stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshrunner.recipes.model.llama import Llama


class Counterpart(NamedTuple):
    """The tensors of a Hugging Face folder that hold the values of one parameter."""

    tensors: tuple[str, ...]
    """Names of the tensors: one tensor, or one per expert if the parameter is a stack."""
    shape: tuple[int, ...]
    """Shape of each tensor in the folder."""
    stack: bool = False
    """Whether the parameter is a stack, whose matrices are the transposed tensors."""


def family(model: Llama) -> str:
    """Return the `model_type` in config.json of the family whose names the model's parameters have."""
    if model.routed is not None:
        return "qwen3_moe" if model.qk_norm else "mixtral"
    if model.qk_norm:
        return "qwen3"
    return "qwen2" if model.qkv_bias else "llama"


def counterparts(model: Llama) -> dict[str, Counterpart]:
    """Return the counterpart of each parameter, in the order of the network's parameters, keyed by the parameter's name. A tied
    output projection is not a parameter."""
    embedding = model.vocab_size, model.dim
    found = {"tok_embeddings.weight": Counterpart(("model.embed_tokens.weight",), embedding)}
    for layer in range(model.n_layers):
        inside = f"model.layers.{layer}"
        for name, theirs, shape in _block(model):
            found[f"layers.{layer}.{name}"] = Counterpart((f"{inside}.{theirs}",), shape)
        feed_forward = _experts if layer >= model.first_blocks and model.routed is not None else _feed_forward
        for name, counterpart in feed_forward(model, inside):
            found[f"layers.{layer}.{name}"] = counterpart
    found["norm.weight"] = Counterpart(("model.norm.weight",), (model.dim,))
    if not model.tie_embeddings:
        found["output.weight"] = Counterpart(("lm_head.weight",), embedding)
    return found


def _block(model: Llama) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name here, name there, shape) of a block's parameters except those of its feed-forward network."""
    widths = {"q": model.n_heads * model.head_width, "k": model.n_kv_heads * model.head_width}
    widths["v"] = widths["k"]
    yield "attention_norm.weight", "input_layernorm.weight", (model.dim,)
    for letter, width in widths.items():
        yield f"attention.w{letter}.weight", f"self_attn.{letter}_proj.weight", (width, model.dim)
        if model.qkv_bias:
            yield f"attention.w{letter}.bias", f"self_attn.{letter}_proj.bias", (width,)
    yield "attention.wo.weight", "self_attn.o_proj.weight", (model.dim, widths["q"])
    if model.qk_norm:
        for letter in "qk":
            yield f"attention.{letter}_norm.weight", f"self_attn.{letter}_norm.weight", (model.head_width,)
    yield "ffn_norm.weight", "post_attention_layernorm.weight", (model.dim,)


def _feed_forward(model: Llama, inside: str) -> Iterator[tuple[str, Counterpart]]:
    for name, theirs, shape in _swiglu(model.dim, model.ffn_dim):
        yield f"feed_forward.{name}.weight", Counterpart((f"{inside}.mlp.{theirs}.weight",), shape)


def _experts(model: Llama, inside: str) -> Iterator[tuple[str, Counterpart]]:
    assert model.routed is not None
    number, mixtral = model.routed.number, family(model) == "mixtral"
    folder = f"{inside}.{'block_sparse_moe' if mixtral else 'mlp'}"
    yield "feed_forward.router.weight", Counterpart((f"{folder}.gate.weight",), (number, model.dim))
    for name, theirs, shape in _swiglu(model.dim, model.routed.ffn_dim):
        last = name if mixtral else theirs
        tensors = tuple(f"{folder}.experts.{expert}.{last}.weight" for expert in range(number))
        yield f"feed_forward.experts.{name}", Counterpart(tensors, shape, stack=True)


def _swiglu(dim: int, ffn_dim: int) -> list[tuple[str, str, tuple[int, int]]]:
    into, out = (ffn_dim, dim), (dim, ffn_dim)
    return [("w1", "gate_proj", into), ("w3", "up_proj", into), ("w2", "down_proj", out)]
