"""The `model` group: the base class of model options."""

from __future__ import annotations

from abc import abstractmethod
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Option, whole

if TYPE_CHECKING:
    from meshrunner.recipes.model.network import Network


class Flops(NamedTuple):
    """Floating-point operations per token, forward and backward, as defined in `Model.flops_per_token`."""

    total: int
    attention: int


class Model(Option):
    """A language model."""

    kinds: ClassVar[dict[str, str]] = {
        "llama": "meshrunner.recipes.model.llama:Llama",
        "moe": "meshrunner.recipes.model.experts.moe:MoE",
        "hybrid": "meshrunner.recipes.model.hybrid.hybrid:Hybrid",
    }

    vocab_size: Annotated[int, whole(at_most=2**24)]
    """Rows of the embedding table. A tokenizer may have fewer tokens, never more."""
    freeze: list[str] = []
    """Parameters that are not trained: patterns for their names, such as `tok_embeddings.*`."""

    @abstractmethod
    def network(self, seq_len: int) -> Network:
        """The module on the default device, uninitialised."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs to train on one token of a sequence of `seq_len`: 6 per active parameter that is trained, plus attention."""

    def inactive_parameters(self) -> int:
        """Number of parameters that one token does not pass through, such as those of the experts it is not sent to."""
        return 0

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter is not trained."""
        return any(fnmatchcase(name, pattern) for pattern in self.freeze)

    def tensor_problems(self, tensor: int) -> list[str]:
        """Reasons that this model cannot be split over `tensor` devices; [] if it can."""
        return []

    def expert_problems(self, expert: int) -> list[str]:
        """Reasons that this model's experts cannot lie on `expert` devices; [] if they can."""
        return [] if expert == 1 else ["parallelism.expert: this model has no experts; use parallelism.expert=1"]

    def alignment_problems(self, tensor: int, element_bytes: int) -> list[str]:
        """Reasons that its matrix products do not work in a dtype of so many bytes, split over `tensor` devices."""
        return []

    def unsupported(self, device_type: str) -> str | None:
        """Reason that `cpu` or `cuda` devices of this node do not support it, with an alternative; None if they do."""
        return None

    def on(self, device_type: str) -> Self:
        """This model on `cpu` or `cuda` devices, what is `auto` about it resolved."""
        return self

    def resolved(self) -> dict[str, Any]:
        """Key -> value, for keys that `on` resolves."""
        return {}

    @property
    def first_blocks(self) -> int:
        """Number of first blocks that are of another kind than all that follow."""
        return 0

    def at_depth(self, blocks: int) -> Self | None:
        """This model with another number of blocks, which are all alike but for `first_blocks`; None: it cannot be changed."""
        return None

    def first(self, blocks: int) -> Self | None:
        """This model with its first blocks alone, at least one more than `first_blocks`; None: it cannot be cut."""
        return self.at_depth(blocks)

    def build(self, seq_len: int) -> Network:
        """The module with `freeze` applied; raises ConfigError for a pattern that matches nothing."""
        network = self.network(seq_len)
        parameters = dict(network.named_parameters())
        for pattern in self.freeze:
            matched = [name for name in parameters if fnmatchcase(name, pattern)]
            if not matched:
                raise ConfigError(
                    f"model.freeze: '{pattern}' matches no parameter; names look like {', '.join(list(parameters)[:3])}"
                )
            for name in matched:
                parameters[name].requires_grad_(False)
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ConfigError("model.freeze: every parameter is frozen, nothing is left to train")
        return network

    def on_meta(self, seq_len: int) -> Network:
        """As `build`, on meta: there no model is too large, and no module has initial values."""
        import torch
        from torch.overrides import TorchFunctionMode

        class NoInitialValues(TorchFunctionMode):
            # On meta they are nothing, but to compute them torch imports its compiler: a second.
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "__module__", "") == "torch.nn.init":
                    return (kwargs or {}).get("tensor", next(iter(args), None))
                return func(*args, **(kwargs or {}))

        with torch.device("meta"), NoInitialValues():
            return self.build(seq_len)
