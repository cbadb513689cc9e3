"""The option `model=hf`, which takes the shapes of a model from the config.json of a Hugging Face folder. When a configuration is
composed, an ordinary option replaces this option, so that a run can be resumed and compared without the folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from meshrunner.recipes.config_keys import flatten, with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Flops, Model
from meshrunner.recipes.option import Affects
from meshrunner.recipes.weights.files import CONFIG, has_weights, read_json

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
KIND, AUTO = "hf", "auto"
WINDOW = "attention within a sliding window"
FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "activations other than silu"),
    "attention_bias": (False, "biases in all attention layers"),
    "mlp_bias": (False, "biases in feed-forward layers"),
    "use_sliding_window": (False, WINDOW),
    "quantization_config": (None, "quantised weights"),
    "decoder_sparse_step": (1, "blocks without experts between blocks with experts"),
    "mlp_only_layers": ([], "blocks without experts between blocks with experts"),
    "partial_rotary_factor": (1.0, "heads that are rotated only in part"),
}
"""Values that config.json must have if it has the key, and what the networks of meshrunner lack for other values."""


class HuggingFace(Model):
    """The model in a Hugging Face folder: Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE. Any further key of `kind=llama` or
    `kind=moe`, such as `+model.n_layers=2`, replaces the folder's value. The weights are loaded if the folder has any."""

    vocab_size: ClassVar[int] = 0  # type: ignore[misc]  # not a key of this option
    path: str
    """Folder with config.json and, optionally, safetensors files."""
    weights: Annotated[str | None, Affects.RESULT] = AUTO
    """Initial weights, as for other models; auto: the folder's weights, or random weights if it has none; null: random."""

    def network(self, seq_len: int) -> Network:
        raise AssertionError("the option is expanded before it is used")

    def flops_per_token(self, seq_len: int) -> Flops:
        raise AssertionError("the option is expanded before it is used")


def expanded(config: dict[str, Any]) -> dict[str, Any]:
    """Replace `kind: hf` in a configuration's section `model` by the keys of a `llama` or `moe`; return other configurations
    unchanged. Raise ConfigError if the folder's model cannot be expressed."""
    model = config.get("model")
    if not isinstance(model, dict) or model.get("kind") != KIND:
        return config
    given = {key: value for key, value in model.items() if key not in ("kind", "path")}
    if not isinstance(model.get("path"), str):
        raise ConfigError(f"model.path: expected a folder, got {model.get('path')!r}")
    folder = Path(model["path"]).expanduser().absolute()
    found = model_of(folder)
    if given.get("weights", AUTO) == AUTO:
        given["weights"] = str(folder) if has_weights(folder) else None
    for key, value in flatten(given).items():
        found = with_value(found, key, value)
    return config | {"model": found}


def model_of(folder: Path) -> dict[str, Any]:
    """Return the section `model` for the config.json of a folder. Raise ConfigError if the model cannot be expressed."""
    try:
        config = read_json(folder / CONFIG)
    except ConfigError as error:
        raise ConfigError(f"model.path: {error}; expected a Hugging Face folder") from None
    _refuse_unsupported(folder, config)
    try:
        return _shapes(config) | _rope(config) | _experts(config)
    except KeyError as error:
        raise ConfigError(f"model.path: {folder / CONFIG} has no key {error}") from None


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    where, family = f"model.path: {folder / CONFIG}:", config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where} model_type={family} is not supported; supported are {', '.join(FAMILIES)}")
    found = [(key, config[key], lack) for key, (fixed, lack) in FIXED.items() if config.get(key) not in (None, fixed)]
    if family in ("mistral", "mixtral") and config.get("sliding_window") is not None:
        found.append(("sliding_window", config["sliding_window"], WINDOW))
    kind = _rope_parameters(config).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        found.append(("rope_type", kind, "position scaling other than llama3's"))
    for key, value, lack in found:
        raise ConfigError(f"{where} {key}={value!r:.80} is not supported, because meshrunner has no {lack}")


def _shapes(config: dict[str, Any]) -> dict[str, Any]:
    family, heads, width = config["model_type"], config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim")
    return {
        "kind": "moe" if family in ("mixtral", "qwen3_moe") else "llama",
        "vocab_size": config["vocab_size"],
        "dim": width,
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_dim": config["intermediate_size"],
        "head_dim": None if head_dim is None or head_dim * heads == width else head_dim,
        "qkv_bias": family == "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "norm_eps": config["rms_norm_eps"],
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
    }


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings with the keys of transformers 5. Transformers 4 has `rope_theta` outside, and older `type`."""
    found = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    found |= config.get("rope_parameters") or {}
    return {"rope_type": found.get("type", "default")} | found


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = _rope_parameters(config)
    default = 1e6 if config["model_type"] == "mixtral" else 1e4
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = {
            "factor": float(rope["factor"]),
            "low_freq_factor": float(rope["low_freq_factor"]),
            "high_freq_factor": float(rope["high_freq_factor"]),
            "original_seq_len": rope["original_max_position_embeddings"],
        }
    return {"rope_theta": float(rope["rope_theta"] or default), "rope_scaling": scaling}


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the section `experts`. Both families pick the best softmax scores, without a bias that balances the experts."""
    if config["model_type"] not in ("mixtral", "qwen3_moe"):
        return {}
    mixtral = config["model_type"] == "mixtral"
    experts = {
        "number": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "per_token": config["num_experts_per_tok"],
        "ffn_dim": config["intermediate_size" if mixtral else "moe_intermediate_size"],
        "shared_ffn_dim": 0,
        "score": "softmax",
        "normalize": mixtral or bool(config.get("norm_topk_prob")),
        "routing": "router",
        "route_scale": 1.0,
        "balance": "none",
        "balance_rate": 1e-3,
    }
    return {"dense_layers": 0, "experts": experts}
