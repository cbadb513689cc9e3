"""The config.json of a model, for transformers 4 and 5. This module imports neither torch nor safetensors."""

from typing import Any

from meshrunner.recipes.config_keys import differences
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.base import Model
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.weights.hugging_face import SCALING, model_section
from meshrunner.recipes.weights.names import family

IGNORED = {"freeze", "weights", "head_dim", "experts.balance_rate"}
"""Keys that do not change a model's output, and head_dim, which config.json always states, even if it is null here."""


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
        "rope_theta": model.rope_theta,  # of transformers 4, as `rope_scaling`
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
    # ffn_dim is the width of dense blocks, which a model of these families with experts lacks.
    ignored = IGNORED | ({"ffn_dim"} if model.routed else set())
    for key, _, value in differences(described, model.model_dump(mode="json")):
        if key not in ignored and (key, value) != ("experts.balance", "sequence_loss"):
            raise ConfigError(
                f"export: {config['model_type']}, the nearest family, has no equivalent of model.{key}={value}"
            )
