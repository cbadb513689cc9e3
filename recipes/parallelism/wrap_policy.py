"""The `wrap` group: which modules become FSDP units.

A policy makes a wrap plan for a model before any module is wrapped (an idea from PyTorch pull request #104346). A plan can be
printed and checked. All kinds of data parallelism use the same plan, so runs that differ only in the kind have equal units.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Count, Option, Section, whole

if TYPE_CHECKING:
    from torch import nn

    from meshrunner.recipes.model.network import Network

RESHARD = ("always", "never", "except_last")
Reshard = Annotated[int | Literal["always", "never", "except_last"], whole(*RESHARD, at_least=2)]


@dataclass(frozen=True)
class Unit:
    """The wrapping of one module."""

    reshard_after_forward: bool | int
    """Whether to free the unsharded parameters after forward, or the number of devices to reshard them over."""
    lookup: bool = False
    """Whether the module is an embedding outside the blocks. Backward does not need its table."""


WrapPlan = dict[str, Unit]
"""The wrapping of each unit, keyed by module name. Children come before their parents, and the root ("") is last."""


class Wrap(Option):
    """A wrap policy."""

    kinds: ClassVar[dict[str, str]] = {
        "blocks": "meshrunner.recipes.parallelism.wrap_policy:Blocks",
        "size": "meshrunner.recipes.parallelism.wrap_policy:Size",
        "rules": "meshrunner.recipes.parallelism.wrap_policy:Rules",
        "root_only": "meshrunner.recipes.parallelism.wrap_policy:RootOnly",
    }

    needs_network: ClassVar[bool] = False
    """Whether the plan depends on module names and sizes. If so, checking a plan needs the built model."""

    @abstractmethod
    def units(self, network: Network) -> dict[str, Reshard | None]:
        """Return `reshard_after_forward` for each unit but the root, in `named_modules` order. None: no override."""

    def remarks(self, network: Network, plan: WrapPlan, kind: str) -> list[str]:
        """Return remarks on a plan: details that the kind of parallelism supports but the user may not intend."""
        found = []
        for name, parameters in unit_parameters(network, plan).items() if kind == "fsdp1" else ():
            frozen = sum(p.numel() for p in parameters.values() if not p.requires_grad)
            if frozen and any(p.requires_grad for p in parameters.values()):
                found.append(
                    f"wrap: the FSDP1 unit '{name or 'root'}' mixes frozen and trained parameters, which allocates "
                    f"{4 * frozen / 2**20:,.2f} MiB of unused gradients"
                )
        return found

    def plan(self, network: Network, reshard: Reshard) -> WrapPlan:
        """Return the plan for a network on meta. reshard: `parallelism.reshard_after_forward` with `auto` resolved."""
        from torch import nn

        units = {name: own or reshard for name, own in self.units(network).items()}
        check_units(network, units)
        plan, inside = {}, inside_blocks(network, units)
        for name in sorted(units, key=lambda name: name.count("."), reverse=True):  # children before parents
            own = units[name]
            # An embedding inside a block is called again when the block is recomputed.
            lookup = type(network.get_submodule(name)) is nn.Embedding and name not in inside
            plan[name] = Unit(own if isinstance(own, int) else own != "never", lookup)
        if blocks := [name for name in network.block_names() if units.get(name) == "except_last"]:
            plan[blocks[-1]] = Unit(False)
        # Backward begins with the root, so resharding it after forward would gather it again immediately.
        plan[""] = Unit(False)
        return plan


class Blocks(Wrap):
    """
    The embedding, each block and the output projection are units; the final norm belongs to the root.

    With these units, a device looks up tokens without first gathering the output projection, and reduces the projection's
    gradient while the blocks run backward. If the embedding and the projection are tied, their parameter belongs to the root.
    """

    def units(self, network: Network) -> dict[str, Reshard | None]:
        names = top_modules(network)
        last_block = names.index(network.block_names()[-1])
        # Backward begins with the modules behind the blocks, so resharding them would gather them again immediately.
        return {name: None if number <= last_block else "never" for number, name in enumerate(names)}


class RootOnly(Wrap):
    """The whole model is one unit, unsharded from the beginning of forward to the end of backward."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        return {}


class Size(Wrap):
    """Units are the smallest modules with at least `min_parameters` parameters, not counting parameters of units inside them."""

    needs_network: ClassVar[bool] = True
    min_parameters: Count
    """Minimum number of parameters in a unit."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        covered: set[nn.Parameter] = set()
        found: list[str] = []
        shared = parameters_shared_outside(network)
        for name, module in reversed(list(network.named_modules())):  # children first
            remaining = set(module.parameters()) - covered
            usable = name and has_forward(module) and name not in shared
            if usable and sum(p.numel() for p in remaining) >= self.min_parameters:
                found.append(name)
                covered |= remaining
        if not found:
            raise ConfigError(
                f"wrap.min_parameters({self.min_parameters:,}): no module has that many parameters; "
                "lower it or use wrap=root_only"
            )
        return dict.fromkeys(reversed(found))


class Rule(Section):
    """A pattern for modules, and the wrapping of the modules that match."""

    match: str
    """A pattern for module names, matched part by part (`layers.*.attention`), or a class name (`Block`)."""
    reshard_after_forward: Reshard | None = None
    """Overrides parallelism.reshard_after_forward for the unit; null: no override."""
    wrap: bool = True
    """true: a matching module is a unit. false: a matching module belongs to the unit around it, even if a later rule matches."""

    def matches(self, name: str, module: nn.Module) -> bool:
        """Return whether the rule matches a module."""
        parts, wanted = name.split("."), self.match.split(".")
        by_name = len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
        return by_name or type(module).__name__ == self.match


class Rules(Wrap):
    """A list of rules. The first rule that matches a module applies. A rule that matches no module is an error."""

    needs_network: ClassVar[bool] = True
    rules: list[Rule]
    """The rules in order. A rule is {match: PATTERN_OR_CLASS} with optional reshard_after_forward (always, never, except_last, a
    number; null: as in parallelism) and wrap (false: no unit). For example
    [{match: layers.*.attention, reshard_after_forward: never}, {match: Block}, {match: "*", wrap: false}]. The first rule
    that matches a module's name or class applies. A module that no rule matches belongs to the unit around it."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        decided = self._first_matches(network)
        for number, rule in enumerate(self.rules):
            if number not in decided.values():
                modules = ", ".join(sorted({type(module).__name__ for module in network.modules()}))
                raise ConfigError(
                    f"wrap.rules[{number}]: '{rule.match}' matches no module, or only modules that earlier rules match. "
                    f"Classes: {modules}; names such as {network.block_names()[0]}"
                )
        return {name: self.rules[i].reshard_after_forward for name, i in decided.items() if self.rules[i].wrap}

    def remarks(self, network: Network, plan: WrapPlan, kind: str) -> list[str]:
        decided = tuple(f"{name}." for name in self._first_matches(network))
        unmatched = [
            name
            for name, module in network.named_modules()
            if any(True for _ in module.parameters(recurse=False)) and not f"{name}.".startswith(decided)
        ]
        remark = f"wrap: no rule matches {', '.join(unmatched)}; their parameters belong to the unit around them"
        return super().remarks(network, plan, kind) + [remark] * bool(unmatched)

    def _first_matches(self, network: Network) -> dict[str, int]:
        """Return, by module name, the index of the first rule that matches the module."""
        found: dict[str, int] = {}
        for name, module in network.named_modules():
            for number, rule in enumerate(self.rules):
                if name and rule.matches(name, module):
                    found.setdefault(name, number)
        return found


def check_units(network: Network, names: Iterable[str]) -> None:
    """Raise ConfigError for a unit that is never called or that shares a parameter with a module outside it."""
    shared = parameters_shared_outside(network)
    for name in names:
        if not has_forward(network.get_submodule(name)):
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit: it is a container that is never called; match its children"
            )
        if parameters := shared.get(name):
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit: {parameters[0]} is shared with a module outside it; leave '{name}' out, so "
                "that the unit around both modules holds the parameter"
            )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module implements forward. FSDP gathers a unit when the unit's forward is called."""
    from torch import nn

    return type(module).forward is not nn.Module.forward


def parameters_shared_outside(network: Network) -> dict[str, list[str]]:
    """Return, by module name, the parameters that are also used outside the module, such as a tied embedding table."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    found: dict[str, list[str]] = {}
    for names in filter(lambda names: len(names) > 1, users.values()):
        for name in names:
            for module in accumulate(name.split(".")[:-1], "{}.{}".format):
                if not all(other.startswith(f"{module}.") for other in names):
                    found.setdefault(module, []).append(name)
    return found


def top_modules(network: Network) -> list[str]:
    """
    Return, in `named_modules` order, the blocks and other modules with a matrix, such as the embedding.

    Other modules are left out if they contain a block, are inside a returned module, or share parameters with outside modules.
    """
    blocks, shared = set(network.block_names()), parameters_shared_outside(network)
    around_blocks = {parent for name in blocks for parent in accumulate(name.split(".")[:-1], "{}.{}".format)}
    found: list[str] = []
    for name, module in network.named_modules():
        if not name or name in around_blocks or (found and name.startswith(f"{found[-1]}.")):
            continue
        usable = has_forward(module) and name not in shared
        if name in blocks or (usable and any(parameter.dim() > 1 for parameter in module.parameters())):
            found.append(name)
    return found


def inside_blocks(network: Network, names: Iterable[str]) -> list[str]:
    """Return the names of modules that are inside a block, without the blocks themselves."""
    blocks = tuple(f"{block}." for block in network.block_names())
    return [name for name in names if name.startswith(blocks)]


def unit_parameters(network: Network, plan: WrapPlan) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each unit by name. A parameter belongs to the innermost unit that contains it."""
    found: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in plan}
    for name, parameter in network.named_parameters():
        innermost = next(unit for unit in plan if not unit or name.startswith(f"{unit}."))
        found[innermost][name] = parameter
    return found
