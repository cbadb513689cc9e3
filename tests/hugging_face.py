"""Random tiny models of transformers, saved as Hugging Face folders of several files."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA31_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {name: value for name, value in ROPE3.items() if name != "rope_theta"}
    | {"original_max_position_embeddings": 8192},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""config.json of Llama 3.1 8B, as transformers 4 writes it."""
SHAPES = {
    "vocab_size": 509,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
}


class Random(NamedTuple):
    """A random model of a family."""

    family: str
    settings: dict[str, Any]
    dtype: torch.dtype = torch.float32


MODELS = {
    "llama": Random("llama", {"num_key_value_heads": 8}),
    "llama3": Random(
        "llama", {"num_key_value_heads": 2, "rope_parameters": ROPE3, "tie_word_embeddings": True}, torch.bfloat16
    ),
    "mistral": Random("mistral", {"num_key_value_heads": 1, "head_dim": 8}),
    "qwen2": Random("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": Random("qwen3", {"num_key_value_heads": 2, "head_dim": 12}, torch.bfloat16),
    "mixtral": Random("mixtral", {"num_key_value_heads": 2, "num_local_experts": 6}),
    "qwen3_moe": Random(
        "qwen3_moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 28,
            "norm_topk_prob": True,
        },
        torch.bfloat16,
    ),
}
DENSE, EXPERTS = ("llama", "llama3", "mistral", "qwen2", "qwen3"), ("mixtral", "qwen3_moe")


@cache
def saved(name: str) -> Path:
    """Return the folder of a random model, in files of at most 100 kB. The name is a key of MODELS."""
    folder = save(name)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def save(name: str, size: str = "100KB", **more: Any) -> Path:
    """Save a random model in files of at most `size`. more: settings that replace those of MODELS."""
    family, settings, dtype = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPES | settings | more))
        torch.manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in key))
        folder = Path(tempfile.mkdtemp())
        model.to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder


def loaded(folder: Path) -> Any:
    """Return transformers' model of a folder, in fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_only(config: dict[str, Any]) -> Path:
    """Return a new folder that holds only a config.json."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return folder
