"""The `wrap` group: policies that choose the FSDP units (modules that FSDP gathers as a whole). A policy lists all units in a
wrap plan before any module is wrapped, so the plan can be printed and checked first (an idea from PyTorch pull request #104346).
A plan does not depend on the kind of data parallelism."""

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
    """Settings of one FSDP unit."""

    reshard_after_forward: bool | int
    """True: free the unsharded parameters after forward. False: keep the parameters. N: reshard the parameters over N devices."""
    lookup: bool = False
    """Whether the unit is an embedding outside the blocks. FSDP2 does not gather such a unit in backward."""


WrapPlan = dict[str, Unit]
"""Settings of each unit, keyed by module name. Children come before their parents, and the root ("") is last."""


class Wrap(Option):
    """A policy that chooses the units of a model."""

    kinds: ClassVar[dict[str, str]] = {
        "blocks": "meshrunner.recipes.parallelism.wrap_policy:Blocks",
        "size": "meshrunner.recipes.parallelism.wrap_policy:Size",
        "rules": "meshrunner.recipes.parallelism.wrap_policy:Rules",
        "root_only": "meshrunner.recipes.parallelism.wrap_policy:RootOnly",
    }

    needs_network: ClassVar[bool] = False
    """Whether the plan depends on module names or sizes. If so, checking a configuration requires building the model."""

    @abstractmethod
    def units(self, network: Network) -> dict[str, Reshard | None]:
        """Return `reshard_after_forward` of each unit except the root, in `named_modules` order. None: the default applies."""

    def remarks(self, network: Network, plan: WrapPlan, kind: str) -> list[str]:
        """Return a sentence for each valid but possibly unintended detail of a plan. kind: `parallelism.kind`."""
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
        """Return the wrap plan of a meta-device network. reshard: default of `reshard_after_forward`."""
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
        # Backward begins with the root, so a root resharded after forward would be gathered again immediately.
        plan[""] = Unit(False)
        return plan


class Blocks(Wrap):
    """The embedding, each block and the output projection are units. The final norm belongs to the root unit.

    A separate unit for the output projection saves time: forward starts before the projection is gathered, and the gradient of
    the projection is reduced during the backward of the blocks. If embedding and projection are tied, they belong to the root.
    """

    def units(self, network: Network) -> dict[str, Reshard | None]:
        """Choose the blocks and, outside the blocks, the outermost modules with a weight matrix. A module that contains a block
        or shares parameters with outside modules is not a unit."""
        blocks, shared = network.block_names(), parameters_shared_outside(network)
        around_blocks = {parent for name in blocks for parent in accumulate(name.split(".")[:-1], "{}.{}".format)}
        found: dict[str, Reshard | None] = {}
        for name, module in network.named_modules():
            if not name or name in around_blocks or (found and name.startswith(f"{next(reversed(found))}.")):
                continue
            usable = has_forward(module) and name not in shared
            if name in blocks or (usable and any(parameter.dim() > 1 for parameter in module.parameters())):
                # Backward begins with the modules after the blocks. If resharded, they would be gathered again immediately.
                found[name] = "never" if blocks[-1] in found else None
        return found


class RootOnly(Wrap):
    """The whole model is one unit, unsharded from the beginning of forward to the end of backward."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        return {}


class Size(Wrap):
    """A module is a unit if at least `min_parameters` of its parameters belong to no unit inside it."""

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
                "lower the value or use wrap=root_only"
            )
        return dict.fromkeys(reversed(found))


class Rule(Section):
    """A pattern for modules, and the settings of the modules that match it."""

    match: str
    """A class name (`Block`), or a pattern for module names (`layers.*.attention`). A `*` does not match a dot."""
    reshard_after_forward: Reshard | None = None
    """Override of parallelism.reshard_after_forward for the matching units. null: no override."""
    wrap: bool = True
    """true: a matching module is a unit. false: a matching module belongs to the unit around it, even if a later rule matches."""

    def matches(self, name: str, module: nn.Module) -> bool:
        """Return whether the rule's pattern matches the module's name or is the name of the module's class."""
        parts, wanted = name.split("."), self.match.split(".")
        by_name = len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
        return by_name or type(module).__name__ == self.match


class Rules(Wrap):
    """Units chosen by rules. The first rule that matches a module applies. A rule that applies to no module is an error."""

    needs_network: ClassVar[bool] = True
    rules: list[Rule]
    """The rules in order. The first rule that matches a module applies. A module that no rule matches belongs to the unit
    around it. A rule is {match: PATTERN_OR_CLASS} and two optional keys. `reshard_after_forward`: always, never, except_last
    or a number; null: the value in `parallelism`. `wrap`: false if matching modules are not units. For example
    [{match: layers.*.attention, reshard_after_forward: never}, {match: Block}, {match: "*", wrap: false}]."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        decided = self._first_matches(network)
        for number, rule in enumerate(self.rules):
            if number not in decided.values():
                modules = ", ".join(sorted({type(module).__name__ for module in network.modules()}))
                raise ConfigError(
                    f"wrap.rules[{number}]: '{rule.match}' matches no module, or only modules that earlier rules match. "
                    f"Classes: {modules}; names look like {network.block_names()[0]}"
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
        found: dict[str, int] = {}
        for name, module in network.named_modules():
            for number, rule in enumerate(self.rules):
                if name and rule.matches(name, module):
                    found.setdefault(name, number)
        return found


def check_units(network: Network, names: Iterable[str]) -> None:
    """Raise ConfigError for a unit that is never called, or that shares a parameter with a module outside the unit."""
    shared = parameters_shared_outside(network)
    for name in names:
        if not has_forward(network.get_submodule(name)):
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit: it is a container that is never called; match its children"
            )
        if parameters := shared.get(name):
            raise ConfigError(
                f"wrap: '{name}' cannot be a unit: {parameters[0]} is shared with a module outside it; do not wrap '{name}', "
                "so that the unit around both modules holds the parameter"
            )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module implements forward. Every unit needs a forward, because FSDP gathers a unit in its forward."""
    from torch import nn

    return type(module).forward is not nn.Module.forward


def parameters_shared_outside(network: Network) -> dict[str, list[str]]:
    """Return the parameters that each module shares with modules outside it, such as a tied embedding, keyed by module name."""
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


def inside_blocks(network: Network, names: Iterable[str]) -> list[str]:
    """Return the names of modules that are inside a block, without the blocks themselves."""
    blocks = tuple(f"{block}." for block in network.block_names())
    return [name for name in names if name.startswith(blocks)]


def unit_parameters(network: Network, plan: WrapPlan) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each unit, keyed by unit name. A parameter belongs to the innermost unit that contains it."""
    found: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in plan}
    for name, parameter in network.named_parameters():
        innermost = next(unit for unit in plan if not unit or name.startswith(f"{unit}."))
        found[innermost][name] = parameter
    return found
