"""`Model`, the base class of all options of the config group `model`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Affects, Option, whole

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that FSDP1, activation checkpointing and torch.compile add to parameter names."""


def clean_name(name: str) -> str:
    """Return a parameter's or module's name in the unwrapped network. name: may contain prefixes that wrappers add."""
    name = f"{name}."
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.").removesuffix(".")  # DDP adds `module.`


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return whether a pattern matches the name of a parameter."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(key: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Raise ConfigError if a pattern matches no parameter. key: configuration key of the patterns; names: all names."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{key}: '{pattern}' matches no parameter; names look like {', '.join(list(names)[:3])}")


class Flops(NamedTuple):
    """Floating-point operations per token, forward and backward, as defined in `Model.flops_per_token`."""

    total: int
    attention: int
    """Part of `total` that grows with the sequence length: the matmuls query x key and score x value."""

    def within(self, length: float, seq_len: int) -> Flops:
        """Return the FLOPs for attention within documents. length: length of a token's document, averaged over tokens."""
        attention = round(self.attention * length / seq_len)
        return Flops(self.total - self.attention + attention, attention)


class Model(Option):
    """A language model."""

    kinds: ClassVar[dict[str, str]] = {
        "llama": "meshrunner.recipes.model.llama:Llama",
        "moe": "meshrunner.recipes.model.llama:MoE",
        "hybrid": "meshrunner.recipes.model.hybrid.hybrid:Hybrid",
        "hf": "meshrunner.recipes.weights.hugging_face:HuggingFace",
    }

    vocab_size: Annotated[int, whole(at_most=2**24)]
    """Rows of the embedding table, at least as many as the tokenizer has tokens."""
    freeze: list[str] = []
    """Patterns of parameter names, such as `tok_embeddings.*`. Parameters that match a pattern are not trained."""
    weights: Annotated[str | None, Affects.RESULT] = None
    """Initial weights: a Hugging Face folder, or a run directory or checkpoint; null: random weights."""

    @abstractmethod
    def network(self, seq_len: int) -> Network:
        """Build the network on torch's default device. `Initialiser` sets the initial values of the parameters later."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> Flops:
        """Return training FLOPs per token: 6 for each trained weight that a token uses, plus attention over `seq_len` tokens."""

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output layer uses the embedding table as its weight."""
        return False

    @property
    def tokens_ahead(self) -> int:
        """Number of tokens that the model predicts at every position, in addition to the next token."""
        return 0

    def inactive_parameters(self) -> int:
        """Return the number of parameters that a token does not use, such as the weights of experts that are not chosen."""
        return 0

    def is_frozen(self, name: str) -> bool:
        """Whether a pattern of `freeze` matches the name of a parameter."""
        return matches(self.freeze, name)

    def tensor_problems(self, tensor: int) -> list[str]:
        """Return the reasons why tensor parallelism over `tensor` devices cannot split this model, or [] if it can."""
        return []

    def expert_problems(self, expert: int) -> list[str]:
        """Return the reasons why this model's experts cannot be spread over `expert` devices, or [] if they can."""
        return [] if expert == 1 else ["parallelism.expert: this model has no experts; use parallelism.expert=1"]

    def context_problems(self, context: int, tensor: int, method: str) -> list[str]:
        """Return the reasons why `context` devices (more than 1) cannot divide this model's sequences, or [] if they can."""
        return ["parallelism.context: this model cannot split sequences over devices; use parallelism.context=1"]

    def document_problems(self) -> list[str]:
        """Return the reasons why this model cannot keep the documents of a sequence separate, or [] if it can."""
        return ["data.documents: this model cannot separate documents; use data.documents=joined"]

    def pipeline_problems(self) -> list[str]:
        """Return the reasons why this model cannot be cut into pipeline stages, or [] if it can."""
        return ["parallelism.pipeline: this model cannot be cut into stages; use parallelism.pipeline=1"]

    @property
    def pipeline_blocks(self) -> int:
        """Number of blocks that a pipeline divides into stages."""
        raise NotImplementedError

    def block_flops(self, seq_len: int) -> list[int]:
        """Return training FLOPs per token: a number for each block, then one for all later modules. Only pipelines need it."""
        raise NotImplementedError

    def alignment_problems(self, tensor: int, element_bytes: int) -> list[str]:
        """Return a message for each width, such as `dim`, that grouped matmuls reject. tensor: tensor-parallel degree."""
        return []

    def on(self, device_type: str, *, deterministic: bool = False) -> Self:
        """Return this model with its `auto` keys resolved. device_type: `cpu` or `cuda`."""
        return self

    def remarks(self) -> list[str]:
        """Return a warning for each value chosen by `on()` that costs speed or memory."""
        return []

    def import_kernels(self) -> None:
        """Import the kernel packages that this model uses. Raise ConfigError if an installed package fails to import."""

    def resolved(self) -> dict[str, Any]:
        """Return the keys that `on()` resolves, with their values."""
        return {}

    @property
    def first_blocks(self) -> int:
        """Number of leading blocks that differ from all later blocks, such as dense blocks before blocks with experts."""
        return 0

    def at_depth(self, blocks: int) -> Self | None:
        """Return a copy with `blocks` blocks, or None if the depth is fixed. Blocks after the first `first_blocks` are alike."""
        return None

    def first(self, blocks: int) -> Self | None:
        """Return a copy with only the first `blocks` blocks; None if unsupported. `blocks` must exceed `first_blocks`."""
        return self.at_depth(blocks)

    def build(self, seq_len: int) -> Network:
        """Build the network and freeze parameters. Raise ConfigError if a pattern matches nothing or everything is frozen."""
        network = self.network(seq_len)
        parameters = dict(network.named_parameters())
        check_patterns("model.freeze", self.freeze, parameters)
        for name, parameter in parameters.items():
            if self.is_frozen(name):
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ConfigError("model.freeze: every parameter is frozen, so there is nothing to train; remove a pattern")
        return network

    def on_meta(self, seq_len: int) -> Network:
        """Build the network on the meta device. Meta tensors take no memory, so even the largest model can be built."""
        import torch
        from torch.overrides import TorchFunctionMode

        class NoInitialValues(TorchFunctionMode):
            # Initialising meta tensors has no effect, but makes torch import the compiler. This import takes a second.
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "__module__", "") == "torch.nn.init":
                    return (kwargs or {}).get("tensor", next(iter(args), None))
                return func(*args, **(kwargs or {}))

        with torch.device("meta"), NoInitialValues():
            return self.build(seq_len)
