"""`meshrunner lock`: facts of a user's model change with a planted fault, and with nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.model.init_weights import Initialiser
from meshrunner.runner.predict import Sections
from meshrunner.runner.verbs.planning.lock import derived, lock
from meshrunner.runner.verbs.planning.lock_file import changes, folded, unfolded
from tests import composed

OWN = Path(__file__).with_name("own_model.py").read_text()
OPTION = """kind: {name}:GPT
vocab_size: 509
dim: 48
n_layers: 4
n_heads: 6
freeze: []
"""
SMALL = ("model=own", "data=random", "seq_len=32", "micro_batch=2", "hardware=h100_80gb", "launch.workers=2")


class Fault(NamedTuple):
    """A change of the user's code, and words of the section and name of a fact that it changes."""

    old: str
    new: str
    section: str
    name: str
    overrides: tuple[str, ...] = ()


COMPILED = ("compile=per_block", "compile.fullgraph=false", "precision=fp32")
# fmt: off
# ruff: noqa: E501
FAULTS = {
    "attention in fp32": Fault("in (q, k, v))", "in (q.float(), k.float(), v.float()))", "forward of blocks 0 to 3", "float32"),
    "an extra matmul": Fault("self.out(attended", "self.out(self.out.weight @ self.out.weight.T)[0] * 0 + self.out(attended", "forward of blocks 0 to 3", "mm of"),
    "in one block only": Fault("x = block(x)", "x = block(block(x)) if block is self.blocks[2] else block(x)", "forward of block 2", "mm of"),
    "recomputation inside a block": Fault("x + self.down(F.gelu(self.up(self.ffn_norm(x))))", "x + torch.utils.checkpoint.checkpoint(lambda y: self.down(F.gelu(self.up(self.ffn_norm(y)))), x, use_reentrant=False)", "backward of blocks 0 to 3", "mm of"),
    "a second copy of the logits": Fault("self.loss(self.output, x, targets)", "self.loss(self.output, x, targets) + 0 * self.output(x).mean()", "peak memory", "bytes"),
    "another initial spread": Fault("if residual else 0.02)", "if residual else 0.2)", "parameters", "blocks.*.qkv.weight"),
    "a forgotten residual scale": Fault('("out.weight", "down.weight")', '("out.weight",)', "parameters", "blocks.*.down.weight"),
    "a lost requires_grad_": Fault("        self.positions.weight.requires_grad_(False)\n", "", "parameters", "positions.weight"),
    "a mask that is not causal": Fault("is_causal=True", "is_causal=False", "forward of blocks 0 to 3", "attention"),
    "a bias": Fault("nn.Linear(dim, dim, bias=False)", "nn.Linear(dim, dim)", "parameters", "blocks.*.out.bias"),
    "a wider feed-forward": Fault("self.up = nn.Linear(dim, 4 * dim, bias=False)\n        self.down = nn.Linear(4 * dim, dim", "self.up = nn.Linear(dim, 5 * dim, bias=False)\n        self.down = nn.Linear(5 * dim, dim", "parameters", "blocks.*.up.weight"),
    "a detached branch": Fault("self.out(attended.", "self.out(attended.detach().", "backward of blocks 0 to 3", "mm of"),
    "a skipped block": Fault("in self.blocks:\n            x = block(x)", "in self.blocks[:3]:\n            x = block(x)", "forward of block 3", "mm of"),
    "a block that is not a unit": Fault("range(len(self.blocks))]", "range(len(self.blocks) - 1)]", "forward of block 3", "all_gather"),
    "a projection in fp32": Fault("self.up(self.ffn_norm(x))", "F.linear(self.ffn_norm(x).float(), self.up.weight.float()).to(x.dtype)", "forward of blocks 0 to 3", "float32"),
    "a copy that is kept": Fault("attended.transpose(1, 2).flatten(2)", "attended.transpose(1, 2).flatten(2) * 1.0", "kept for backward of blocks 0 to 3", "bytes"),
    "dropout": Fault("return x + self.down(F.gelu(self.up(self.ffn_norm(x))))", "return x + F.dropout(self.down(F.gelu(self.up(self.ffn_norm(x)))), 0.1)", "kept for backward of blocks 0 to 3", "bytes"),
    "activations that are never freed": Fault("            x = block(x)", "            x = block(x)\n            self.__dict__.setdefault('seen', []).append(x.detach().clone())", "peak memory", "bytes"),
    "a collective of the user": Fault("        x = self.norm(x)\n", "        x = self.norm(x)\n        torch.distributed.all_reduce(x.detach().clone())\n", "forward", "all_reduce over shard"),
    "a graph break": Fault("        x = x + self.out(", "        torch._dynamo.graph_break()\n        x = x + self.out(", "compiler", "graph", COMPILED),
    "tied tables": Fault("    def block_names", "    def tie_weights(self) -> None:\n        self.output.weight = self.tokens.weight\n\n    def block_names", "peak memory", "parameters"),
    "another count of FLOPs": Fault("6 * weights", "2 * weights", "model", "FLOPs per token"),
}
NEUTRAL = {
    "a comment": ("        x = self.norm(x)\n", "        x = self.norm(x)  # the last norm\n"),
    "a docstring": ("    def block_names(self) -> list[str]:\n", "    def block_names(self) -> list[str]:\n        \"\"\"Return names.\"\"\"\n"),
    "reordered imports": ("import torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n", "from torch import nn, Tensor\nimport torch.nn.functional as F\nimport torch\n"),
    "another import": ("import math\n", "import math\nimport os\n"),
    "a renamed variable": ("attended", "mixed"),
    "a renamed argument": ("def forward(self, x: Tensor) -> Tensor:\n", "def forward(self, hidden: Tensor) -> Tensor:\n        x = hidden\n"),
    "a renamed class": ("Block", "Layer"),
    "a renamed network": ("GPTNetwork", "Decoder"),
    "a list instead of a generator": ("heads = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))", "heads = [t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v)]"),
    "map instead of a generator": ("heads = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))", "heads = map(lambda t: t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2), (q, k, v))"),
    "view instead of unflatten": ("t.unflatten(-1, (self.n_heads, -1))", "t.view(*t.shape[:-1], self.n_heads, -1)"),
    "split instead of chunk": (".chunk(3, -1)", ".split(x.shape[-1], -1)"),
    "flatten as reshape": (".flatten(2)", ".reshape(x.shape)"),
    "an alias of a function": ("x + self.down(F.gelu(", "x + self.down(nn.functional.gelu("),
    "torch.add": ("x = x + self.out(attended.transpose(1, 2).flatten(2))", "x = torch.add(x, self.out(attended.transpose(1, 2).flatten(2)))"),
    "a named intermediate result": ("        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))", "        widened = self.up(self.ffn_norm(x))\n        return x + self.down(F.gelu(widened))"),
    "a method of its own": ("        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))", "        return x + self.feed_forward(self.ffn_norm(x))\n\n    def feed_forward(self, x: Tensor) -> Tensor:\n        return self.down(F.gelu(self.up(x)))"),
    "a function of its own": ("class Block(nn.Module):", "def widen(up: nn.Linear, x: Tensor) -> Tensor:\n    return F.gelu(up(x))\n\n\nclass Block(nn.Module):"),
    "a constant": ("TruncatedNormal(0.02 /", "TruncatedNormal(SPREAD /", ),
    "an f-string": ('f"blocks.{i}"', '"blocks." + str(i)'),
    "a keyword argument": (".chunk(3, -1)", ".chunk(3, dim=-1)"),
    "enumerate": ("        for block in self.blocks:\n", "        for _, block in enumerate(self.blocks):\n"),
    "a typed variable": ("        x = self.norm(x)\n", "        x: Tensor = self.norm(x)\n"),
    "a loop over indices": ("        for block in self.blocks:\n            x = block(x)\n", "        for i in range(len(self.blocks)):\n            x = self.blocks[i](x)\n"),
    "an if statement": ("        return self.output(x) if targets is None else self.loss(self.output, x, targets)", "        if targets is None:\n            return self.output(x)\n        return self.loss(self.output, x, targets)"),
    "a guard": ("        x = self.norm(x)\n", "        assert x.ndim == 3\n        x = self.norm(x)\n"),
    "a property": ("    def block_names", "    @property\n    def depth(self) -> int:\n        return len(self.blocks)\n\n    def block_names"),
    "a list comprehension of modules": ("nn.ModuleList(Block(config.dim, config.n_heads) for _ in range(config.n_layers))", "nn.ModuleList([Block(config.dim, config.n_heads) for _ in range(config.n_layers)])"),
    "another order of keys": ('("out.weight", "down.weight")', '("down.weight", "out.weight")'),
    "positions computed first": ("        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))\n", "        places = torch.arange(tokens.shape[1], device=tokens.device)\n        x = self.tokens(tokens) + self.positions(places)\n        del places\n"),
}
# fmt: on


class User:
    """A user's directory with a model, of which each variant is a module of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def derived(self, old: str = "", new: str = "", *overrides: str) -> Sections:
        """Derive the facts of the model after a replacement in its source."""
        assert old in OWN
        self.count += 1
        name = f"own{self.count}_{id(self)}"
        text = OWN.replace(old, new) if old else OWN
        (self.folder / f"{name}.py").write_text(text.replace("class GPT(", "SPREAD = 0.02\n\n\nclass GPT("))
        (self.folder / "model").mkdir(exist_ok=True)
        (self.folder / "model" / "own.yaml").write_text(OPTION.format(name=name))
        return derived([f"--config-dir={self.folder}", *SMALL, *overrides], 0)[""]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield User(folder)


@pytest.fixture(scope="module")
def locked(user: User) -> dict[tuple[str, ...], Sections]:
    return {more: user.derived("", "", *more) for more in ((), COMPILED)}


@pytest.mark.slow_but("a skipped block", "a lost requires_grad_")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_located(name: str, user: User, locked: dict[tuple[str, ...], Sections]) -> None:
    old, new, section, fact, overrides = FAULTS[name]
    found = changes({"": locked[overrides]}, {"": user.derived(old, new, *overrides)})
    assert any(each.section == section and fact in each.name for each in found), found


@pytest.mark.slow_but("a renamed class")
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_change_changes_no_fact(name: str, user: User, locked: dict[tuple[str, ...], Sections]) -> None:
    assert not changes({"": locked[()]}, {"": user.derived(*NEUTRAL[name])})


def test_neighbouring_blocks_with_equal_facts_are_one_section() -> None:
    sections: dict[str, Any] = {f"forward of block {i}": {"mm": 7 + (i == 2)} for i in range(5)}
    sections = {"loss": {"mm": 1}} | sections | {f"backward of block {i}": {"mm": 14} for i in (4, 3, 2, 1, 0)}
    short = folded(sections)
    assert list(short) == [
        "loss",
        "forward of blocks 0 to 1",
        "forward of block 2",
        "forward of blocks 3 to 4",
        "backward of blocks 0 to 4",
    ]
    assert unfolded(short) == sections


@pytest.mark.slow(sampled=True)
def test_check_returns_3_and_update_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"no such file: meshrunner\.lock\.json; `meshrunner lock OVERRIDES` writes it"
    ):
        lock(["--check"])
    assert lock(["model.n_layers=2", "launch.workers=2", "parallelism=fsdp1,fsdp2", "-m", "seq_len=32"]) == 0
    assert lock(["--check"]) == 0
    assert "unchanged: " in capsys.readouterr().out
    file = tmp_path / "meshrunner.lock.json"
    content = json.loads(file.read_text())
    facts = content["runs"]["parallelism=fsdp2"]["forward of blocks 0 to 1"]
    (matmul,) = (name for name in facts if name.startswith("mm of"))
    facts[matmul] = "8 calls, 5 FLOPs"
    content["torch"] = "2.12.0"
    content["runs"]["parallelism=fsdp1"]["model"]["FLOPs per token"] = 5
    file.write_text(json.dumps(content))
    assert lock(["--check"]) == 3
    said = capsys.readouterr().out
    assert "1 fact changed:" in said and "| parallelism=fsdp1 | model | FLOPs per token | 5" in said
    assert "1 fact changed, perhaps because torch changed from 2.12.0 to " in said
    assert "forward of blocks 0 to 1" in said and "| 8 calls, 5 FLOPs | 7 calls, " in said
    assert lock(["--update"]) == 0 and lock(["--check"]) == 0
    file.write_text(json.dumps(content | {"runs": {"": {"model": 5}}}))
    with pytest.raises(ConfigError, match="is damaged"):
        lock(["--check"])
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        lock(["--check"])
    with pytest.raises(ConfigError, match="omit yours"):
        lock(["--check", "steps=3"])


def test_experts_are_drawn_as_in_a_run(tmp_path: Path) -> None:
    """A stack of experts is drawn matrix by matrix."""
    given = ("model=moe_tiny", "data=random", "seq_len=32", "launch.workers=2")
    (found,) = derived(given, 0).values()
    experiment = composed.experiment(*given)
    network = experiment.model.network(32)
    Initialiser(network, experiment.seed, torch.device("cpu")).materialise(network)
    names = [name for name, _ in network.named_parameters() if "experts.w1" in name]
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        digest.update(network.get_parameter(name).detach().numpy().tobytes())
    (stated,) = (str(fact) for name, fact in found["parameters"].items() if "experts.w1" in name)
    assert names and stated.endswith(f"initial values {digest.hexdigest()}")


def test_collectives_over_context_are_named_under_ddp() -> None:
    """DDP shards nothing, so the ranks of `context` count as replicas."""
    layout = ("hardware=cpu", "parallelism=ddp", "parallelism.context=2", "launch.workers=4")
    (found,) = derived([*layout, "model.n_layers=1", "data=random", "seq_len=32"], 0).values()
    names = {name for facts in found.values() for name in facts if " over " in name}
    assert "all_gather over context" in names and "all_reduce over replicate x context" in names


@pytest.mark.slow
def test_losses_are_locked_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["data=random", "seq_len=32", "model.n_layers=1", "launch.workers=1", "micro_batch=1,2", "steps=7", "-m"]
    assert lock([*tiny, "sweep.exclude=[micro_batch=2]", "--losses", "2"]) == 0
    runs = json.loads((tmp_path / "meshrunner.lock.json").read_text())["runs"]
    assert runs["micro_batch=2"]["run"]["impossible"].startswith("sweep.exclude")
    losses = runs["micro_batch=1"]["losses"]
    assert list(losses) == ["step 1", "step 2"] and 5 < float(losses["step 1"]) < 10
    assert lock(["--check"]) == 0
