"""A model in the form of a Hugging Face folder: config.json and the names of tensors. This module imports neither torch nor
safetensors.

The option `model=hf` takes a model's shapes from config.json. When a configuration is composed, an ordinary option replaces this
option, so that a run can be resumed and compared without the folder.

Linear weights have the same layout in a network and in a folder: [out, in]. A stack of experts, [experts, in, out], is one tensor
per expert in a folder, [out, in], so each tensor is the transpose of one matrix of the stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from meshrunner.recipes.config_keys import differences, flatten, with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Flops, Model
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.option import Affects
from meshrunner.recipes.weights.files import CONFIG, has_weights, read_json

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network

KIND, AUTO = "hf", "auto"
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "quantization_config": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 1.0,
}
"""The only supported values of some keys of config.json, because meshrunner's networks do not implement other values."""

SCALING = {
    **{key: key for key in ("factor", "low_freq_factor", "high_freq_factor")},
    "original_seq_len": "original_max_position_embeddings",
}


class Counterpart(NamedTuple):
    """The tensors of a Hugging Face folder that hold the values of one parameter."""

    tensors: tuple[str, ...]
    """Names of the tensors: one tensor, or one per expert if the parameter is a stack."""
    shape: tuple[int, ...]
    """Shape of each tensor in the folder."""
    stack: bool = False
    """Whether the parameter is a stack, whose matrices are the transposed tensors."""


class HuggingFace(Model):
    """The model in a Hugging Face folder: Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE. Further keys of `kind=llama` or
    `kind=moe`, such as `+model.n_layers=2`, replace the folder's values."""

    vocab_size: ClassVar[int] = 0  # type: ignore[misc]  # not a key of this option
    path: str
    """Folder with config.json and, optionally, safetensors files."""
    weights: Annotated[str | None, Affects.RESULT] = AUTO
    """Initial weights, as for other models; auto: the folder's weights, or random weights if it has none; null: random."""

    def network(self, seq_len: int) -> Network:
        raise AssertionError("`expanded` replaces this option")

    def flops_per_token(self, seq_len: int) -> Flops:
        raise AssertionError("`expanded` replaces this option")


def expanded(config: dict[str, Any]) -> dict[str, Any]:
    """Replace `kind: hf` in a configuration's section `model` by the keys of `llama` or `moe`; return other configurations
    unchanged. Raise ConfigError if these keys cannot express the folder's model."""
    given = dict(config["model"]) if isinstance(config.get("model"), dict) else {}
    if given.pop("kind", None) != KIND:
        return config
    folder = Path(str(given.pop("path", None))).expanduser().absolute()
    try:
        theirs = read_json(folder / CONFIG)
    except ConfigError as error:
        raise ConfigError(f"model.path: {error}") from None
    try:
        found = model_section(theirs)
    except KeyError as error:
        raise ConfigError(f"model.path: {folder / CONFIG} lacks the key {error}") from None
    except ConfigError as error:
        raise ConfigError(f"model.path: {folder / CONFIG}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {folder / CONFIG} has a value of the wrong type ({error})") from None
    if given.get("weights", AUTO) == AUTO:
        given["weights"] = str(folder) if has_weights(folder) else None
    for key, value in flatten(given).items():
        found = with_value(found, key, value)
    return config | {"model": found}


def model_section(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the section `model` for the content of a config.json."""
    family, rope = theirs.get("model_type"), _rope(theirs)
    experts = family in ("mixtral", "qwen3_moe")
    if family not in FAMILIES:
        raise ConfigError(f"model_type={family} is not supported; supported are {', '.join(FAMILIES)}")
    wrong = [key for key, value in FIXED.items() if theirs.get(key) not in (None, value)]
    if theirs.get("use_sliding_window") is False and "sliding_window" in wrong:  # Qwen2 states an unused window
        wrong.remove("sliding_window")
    for key in wrong:
        raise ConfigError(f"{key}={theirs[key]!r:.80} is not supported, only {key}={FIXED[key]!r}")
    if rope["rope_type"] not in ("default", "llama3"):
        raise ConfigError(f"rope_type={rope['rope_type']} is not supported, only default and llama3")
    heads, dim, head_dim = theirs["num_attention_heads"], theirs["hidden_size"], theirs.get("head_dim")
    return {
        "kind": "moe" if experts else "llama",
        "vocab_size": theirs["vocab_size"],
        "dim": dim,
        "n_layers": theirs["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": theirs.get("num_key_value_heads") or heads,
        "ffn_dim": theirs["intermediate_size"],
        "rope_theta": rope["rope_theta"] or (1e6 if family == "mixtral" else 1e4),
        "rope_scaling": None if rope["rope_type"] == "default" else {ours: rope[key] for ours, key in SCALING.items()},
        "head_dim": None if head_dim is None or head_dim * heads == dim else head_dim,
        "qkv_bias": family == "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "norm_eps": theirs["rms_norm_eps"],
        "tie_embeddings": bool(theirs.get("tie_word_embeddings")),
    } | (_experts(theirs) if experts else {})


def _rope(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings in the form of transformers 5. Transformers 4 has `rope_theta` at the top level, and older
    versions have `type` instead of `rope_type`."""
    found = (theirs.get("rope_scaling") or {}) | (theirs.get("rope_parameters") or {})
    return {"rope_type": found.get("type", "default"), "rope_theta": theirs.get("rope_theta")} | found


def _experts(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `kind=moe`. Mixtral and Qwen3-MoE choose experts by softmax scores and do not balance loads."""
    mixtral = theirs["model_type"] == "mixtral"
    experts = {
        "number": theirs["num_experts"] if "num_experts" in theirs else theirs["num_local_experts"],
        "per_token": theirs["num_experts_per_tok"],
        "ffn_dim": theirs["intermediate_size" if mixtral else "moe_intermediate_size"],
        "shared_ffn_dim": 0,
        "score": "softmax",
        "normalize": mixtral or bool(theirs.get("norm_topk_prob")),
        "routing": "router",
        "route_scale": 1.0,
        "balance": "none",
        "balance_rate": 1e-3,
    }
    return {"dense_layers": 0, "experts": experts}


def config_of(model: Model, seq_len: int) -> dict[str, Any]:
    """Return config.json without dtype and token ids. Raise ConfigError if no Hugging Face family computes the same output."""
    if not isinstance(model, Llama):
        raise ConfigError(f"export: no Hugging Face family has the architecture of model.kind={model.kind}")
    name, experts = family(model), model.routed
    rope: dict[str, Any] = {"rope_type": "default"}
    if (s := model.rope_scaling) is not None:
        rope = {"rope_type": "llama3"} | {theirs: getattr(s, ours) for ours, theirs in SCALING.items()}
        seq_len = max(seq_len, int(s.original_seq_len * s.factor))
    config = {
        "architectures": [f"{name.title().replace('_', '')}ForCausalLM"],
        "model_type": name,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": experts.ffn_dim if experts and name == "mixtral" else model.ffn_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": seq_len,
        "rope_theta": model.rope_theta,  # transformers 4 reads this key and `rope_scaling`
        "rope_scaling": rope if s else None,
        "rope_parameters": rope | {"rope_theta": model.rope_theta},
    }
    if experts is not None:
        config |= {
            "num_local_experts": experts.number,
            "num_experts": experts.number,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.ffn_dim,
            "norm_topk_prob": experts.normalize,
        }
    _refuse_lost_keys(model, config)
    return config


def _refuse_lost_keys(model: Llama, config: dict[str, Any]) -> None:
    """Raise ConfigError if the model that config.json describes differs from the given model."""
    described = type(model).model_validate(model_section(config)).model_dump(mode="json")
    # config.json always states head_dim, only dense blocks use ffn_dim, and the other ignored keys do not affect outputs.
    ignored = {"freeze", "weights", "head_dim", "experts.balance_rate", *(["ffn_dim"] if model.routed else [])}
    for key, _, value in differences(described, model.model_dump(mode="json")):
        if key not in ignored and (key, value) != ("experts.balance", "sequence_loss"):
            raise ConfigError(
                f"export: {config['model_type']}, the nearest family, has no equivalent of model.{key}={value}"
            )


def family(model: Llama) -> str:
    """Return the Hugging Face family (`model_type` in config.json) that has the same parameters as the model."""
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
        inside, is_dense = f"model.layers.{layer}", model.routed is None or layer < model.first_blocks
        for name, theirs, shape in _block_tensors(model, is_dense):
            found[f"layers.{layer}.{name}"] = Counterpart((f"{inside}.{theirs}",), shape)
        for name, counterpart in () if is_dense else _expert_tensors(model, inside):
            found[f"layers.{layer}.{name}"] = counterpart
    found["norm.weight"] = Counterpart(("model.norm.weight",), (model.dim,))
    if not model.tie_embeddings:
        found["output.weight"] = Counterpart(("lm_head.weight",), embedding)
    return found


def _block_tensors(model: Llama, is_dense: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name in the network, name in the folder, shape) of each parameter of a block, except router and experts."""
    queries, keys = model.n_heads * model.head_width, model.n_kv_heads * model.head_width
    yield "attention_norm.weight", "input_layernorm.weight", (model.dim,)
    for letter, width in {"q": queries, "k": keys, "v": keys}.items():
        yield f"attention.w{letter}.weight", f"self_attn.{letter}_proj.weight", (width, model.dim)
        if model.qkv_bias:
            yield f"attention.w{letter}.bias", f"self_attn.{letter}_proj.bias", (width,)
    yield "attention.wo.weight", "self_attn.o_proj.weight", (model.dim, queries)
    if model.qk_norm:
        for letter in "qk":
            yield f"attention.{letter}_norm.weight", f"self_attn.{letter}_norm.weight", (model.head_width,)
    yield "ffn_norm.weight", "post_attention_layernorm.weight", (model.dim,)
    for name, theirs, shape in _swiglu(model.dim, model.ffn_dim) if is_dense else ():
        yield f"feed_forward.{name}.weight", f"mlp.{theirs}.weight", shape


def _expert_tensors(model: Llama, inside: str) -> Iterator[tuple[str, Counterpart]]:
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
