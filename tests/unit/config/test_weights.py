"""`model=hf` and `model.weights`: shapes from config.json, and folders that are refused before anything starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from meshrunner.recipes.errors import ConfigError, Incompatible
from meshrunner.recipes.model.llama import Llama
from meshrunner.recipes.weights.hugging_face import counterparts, family
from meshrunner.recipes.weights.initial import check_weights
from meshrunner.runner import cli
from meshrunner.runner.config.consistency import fit
from tests.composed import config, experiment
from tests.e2e.command import SCREEN, SLOW_WORK
from tests.hugging_face import LLAMA31_8B, config_only, saved

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
QWEN3_30B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
PUBLISHED = {
    "llama": (LLAMA31_8B, 8_030_261_248),
    "qwen3": (QWEN3_8B, 8_190_735_360),
    "qwen3_moe": (QWEN3_30B, 30_532_122_624),
    "mixtral": (MIXTRAL, 46_702_792_704),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_in_config_json_give_the_published_number_of_parameters(name: str) -> None:
    content, parameters = PUBLISHED[name]
    model = experiment("model=hf", f"model.path={config_only(content)}").model
    assert isinstance(model, Llama)
    network, expected = model.on_meta(8), counterparts(model)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert list(expected) == [key for key, _ in network.named_parameters()]
    assert sum(len(each.tensors) * prod(each.shape) for each in expected.values()) == parameters
    assert (family(model), model.weights) == (name, None)


def test_the_model_of_a_folder_equals_the_shipped_option() -> None:
    found, shipped = (
        config(*words)["model"]
        for words in (("model=hf", f"model.path={config_only(LLAMA31_8B)}"), ("model=llama3_8b",))
    )
    assert found == shipped
    assert (
        config("model=hf", f"model.path={config_only(MIXTRAL)}")["model"]
        == config("model=mixtral_8x7b", "model.experts.balance=none", "model.experts.balance_rate=1e-3")["model"]
    )


def test_other_keys_replace_those_of_the_folder() -> None:
    given = ("model.freeze=[norm.*]", "+model.n_layers=2", "+model.experts.balance=bias")
    model = experiment("model=hf", f"model.path={config_only(QWEN3_30B)}", *given).model
    assert isinstance(model, Llama) and model.routed is not None
    assert (model.freeze, model.n_layers, model.routed.balance, model.routed.number) == (["norm.*"], 2, "bias", 128)
    weights = config("model=hf", f"model.path={saved('llama')}", "data=random")["model"]["weights"]
    assert weights == str(saved("llama"))
    assert experiment("model=hf", f"model.path={saved('llama')}", "model.weights=null").model.weights is None


Change = Callable[[Path], Any]


def setting(**values: Any) -> Change:
    """Change keys of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def tensors_changed(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the tensors of the first file. The index stays as it is."""

    def changed(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = min(folder.glob("*.safetensors"))
        content = load_file(file)
        change(content)
        save_file(content, file)

    return changed


def renamed(old: str, new: str) -> Change:
    """Rename a tensor, in the index, too."""

    def change(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(f'"{old}"', f'"{new}"'))
        for file in folder.glob("*.safetensors"):
            file.write_bytes(file.read_bytes().replace(f'"{old}"'.encode(), f'"{new}"'.encode().ljust(len(old) + 2)))

    return change


def first_file(change: Callable[[Path], Any]) -> Change:
    return lambda folder: change(min(folder.glob("*.safetensors")))


GATE = "model.layers.1.mlp.gate_proj.weight"
WRONG: dict[str, tuple[str, Change, str]] = {
    "no config": ("", lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json"),
    "no JSON": ("", lambda folder: (folder / "config.json").write_text("{"), "config.json holds no JSON object"),
    "family": ("", setting(model_type="gpt2"), "model_type=gpt2 is not supported; supported are llama, mistral"),
    "activation": ("", setting(hidden_act="gelu"), "hidden_act='gelu' is not supported, only hidden_act='silu'"),
    "rope": (
        "",
        setting(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
        "rope_type=yarn is not supported, only default",
    ),
    "quantised": ("", setting(quantization_config={"bits": 4}), "quantization_config={'bits': 4} is not supported"),
    "biases": ("", setting(attention_bias=True), "attention_bias=True is not supported"),
    "window": ("", setting(model_type="mistral", sliding_window=8), "sliding_window=8 is not supported"),
    "sparse step": ("", setting(decoder_sparse_step=2), "decoder_sparse_step=2 is not"),
    "dense blocks": ("", setting(mlp_only_layers=[0]), r"mlp_only_layers=\[0\] is not"),
    "no key": ("", setting(model_type="mixtral"), "lacks the key 'num_"),
    "other shape": ("", setting(intermediate_size=60), r"with shape \[100, 64\], but the model needs \[60, 64\]"),
    "missing": ("", renamed(GATE, "x"), f"lacks {GATE} .tensors that differ: 2"),
    "unexpected": ("+model.n_layers=2", lambda folder: None, r"has model.layers.2\..*, which the model lacks .*: 9"),
    "index": ("", tensors_changed(dict.popitem), "lists .* but .* does not hold this tensor"),
    "dtype": ("", tensors_changed(lambda found: found.update({k: v.char() for k, v in found.items()})), "dtype I8"),
    "no file": ("", first_file(Path.unlink), "cannot read .*safetensors"),
    "truncated": (
        "",
        first_file(lambda file: file.write_bytes(file.read_bytes()[:-9])),
        "bytes, but .* are expected",
    ),
    "short": ("", first_file(lambda file: file.write_bytes(file.read_bytes()[:20])), "header of .* is damaged"),
    "damaged": (
        "",
        first_file(lambda file: file.write_bytes(file.read_bytes()[:8] + b"}" * 9999)),
        "header of .* is damaged",
    ),
    "no weights": (
        "model.weights=empty",
        lambda folder: Path("empty").mkdir(),
        "cannot read .*empty.*expected safetensors files",
    ),
    "no folder": ("model.weights=nowhere", lambda folder: None, "cannot read .*nowhere/model.safetensors"),
    "tokenizer": ("data=stdlib", lambda folder: None, "trains a new tokenizer, but"),
    "kind": ("model=hybrid_tiny model.weights=folder", lambda folder: None, "folder cannot hold a kind=hybrid model"),
}
"""(overrides, change of the folder, the message)."""


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights_are_refused_on_one_screen(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, change, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved("llama"), "folder")
    change(Path("folder"))
    words = overrides.split() if "model=" in overrides else ["model=hf", "model.path=folder", *overrides.split()]
    assert cli._dispatch(["place", "data=random", "hydra.run.dir=out", *words]) == 2
    said = SLOW_WORK.sub("", "".join(capsys.readouterr()))
    assert "Traceback" not in said and len(said.splitlines()) < SCREEN
    assert re.search(message, said), said
    assert not Path("out").exists()


def test_files_of_no_interest_are_ignored(tmp_path: Path) -> None:
    """A tied output projection and inverse frequencies, which older versions of transformers saved."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "folder"
    shutil.copytree(saved("qwen2"), folder)
    file = min(folder.glob("*.safetensors"))
    content = load_file(file)
    one = next(iter(content.values())).flatten()[:4].clone()
    save_file(content | {"lm_head.weight": one, "model.layers.0.self_attn.rotary_emb.inv_freq": one.clone()}, file)
    check_weights(experiment("model=hf", f"model.path={folder}", "data=random"))
    with pytest.raises(ConfigError, match=r"has lm_head\.weight with shape \[4\], but the model needs"):
        check_weights(experiment("model=hf", f"model.path={folder}", "data=random", "+model.tie_embeddings=false"))


def test_weights_cannot_be_combined_with_a_checkpoint() -> None:
    with pytest.raises(Incompatible, match="either from initial weights or from a checkpoint"):
        fit(experiment("model.weights=x", "checkpoint.load=y"), workers=2)


def test_checking_weights_imports_nothing_heavy() -> None:
    script = (
        "import sys; from meshrunner.runner.config.compose import Composer; "
        "from meshrunner.runner.config.experiment import check; "
        "from meshrunner.recipes.weights.initial import check_weights; "
        f"check_weights(check(Composer('run', ['model=hf', 'model.path={saved('qwen3_moe')}', 'data=random'])"
        ".single_run().config)); "
        "print([name for name in ('torch', 'safetensors', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
