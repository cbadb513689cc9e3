"""The `wrap` group: which modules become units of data parallelism.

A policy turns a model into a plan, an ordered mapping from module name to keyword arguments, before anything is wrapped.
Every data-parallel kind consumes the same plan, so a comparison of kinds is a comparison of the same units, and the plan
can be printed and checked without wrapping anything (the idea is that of pytorch pull request #104346).
"""

from __future__ import annotations

from abc import abstractmethod
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Count, Option, Section
from meshrunner.recipes.parallelism.base import Reshard

if TYPE_CHECKING:
    from torch import nn

    from meshrunner.recipes.model.network import Network
    from meshrunner.recipes.parallelism.wrap_plan import WrapPlan


class Wrap(Option):
    """A wrap policy."""

    kinds: ClassVar[dict[str, str]] = {
        "blocks": "meshrunner.recipes.parallelism.wrap_policy:Blocks",
        "size": "meshrunner.recipes.parallelism.wrap_policy:Size",
        "rules": "meshrunner.recipes.parallelism.wrap_policy:Rules",
        "root_only": "meshrunner.recipes.parallelism.wrap_policy:RootOnly",
    }

    by_name: ClassVar[bool] = False
    """Whether the plan depends on names and sizes inside the model, which only the built model shows."""

    @abstractmethod
    def units(self, network: Network) -> dict[str, Reshard | None]:
        """The modules to wrap below the root, in the order of `named_modules`, and their `reshard_after_forward`;
        None: that of the parallelism."""

    def unmentioned(self, network: Network) -> list[str]:
        """Modules with parameters that the policy should decide about and does not."""
        return []

    def remarks(self, network: Network, plan: WrapPlan, kind: str) -> list[str]:
        """What works under a kind of parallelism, but is perhaps not what was meant."""
        from meshrunner.recipes.parallelism.wrap_plan import frozen_waste

        found = [
            f"FSDP1 unit '{name or 'root'}' mixes frozen and trained parameters: {wasted / 2**20:,.2f} MiB of gradients in vain"
            for name, wasted in (frozen_waste(network, plan).items() if kind == "fsdp1" else ())
        ]
        if names := self.unmentioned(network):
            found.append(f"wrap: no rule matches {', '.join(names)}; their parameters belong to the unit around them")
        return found

    def plan(self, network: Network, reshard: Reshard) -> WrapPlan:
        """The plan for a network on meta, with `parallelism.reshard_after_forward` spelled out for every unit."""
        from meshrunner.recipes.parallelism.wrap_plan import Unit, check_units

        units = {name: own or reshard for name, own in self.units(network).items()}
        check_units(network, units)
        # In the order of named_modules a parent precedes what is inside it.
        names = sorted(units, key=lambda name: name.count("."), reverse=True)
        plan = {name: Unit(_spell_out(units[name])) for name in names}
        if blocks := [name for name in network.block_names() if units.get(name) == "except_last"]:
            plan[blocks[-1]] = Unit(False)
        # The root holds what is outside the units. It ends the forward and begins the backward: freeing it between the
        # two would only gather it again at once.
        plan[""] = Unit(False)
        return plan


def _spell_out(reshard: Reshard) -> bool | int:
    return reshard if isinstance(reshard, int) else reshard != "never"


class Blocks(Wrap):
    """Each block of the model is a unit; the embedding, the last norm and the output projection belong to the root."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        return dict.fromkeys(network.block_names())


class RootOnly(Wrap):
    """The whole model is one unit: everything is gathered at once, nothing is freed before backward has ended."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        return {}


class Size(Wrap):
    """The smallest modules that hold at least so many parameters outside the units they contain."""

    by_name: ClassVar[bool] = True
    min_parameters: Count
    """Parameters of a unit."""

    def units(self, network: Network) -> dict[str, Reshard | None]:
        from meshrunner.recipes.parallelism.wrap_plan import is_called, shared_outside

        taken: set[nn.Parameter] = set()
        found: list[str] = []
        shared = shared_outside(network)
        for name, module in reversed(list(network.named_modules())):  # children first
            left = set(module.parameters()) - taken
            if (
                not name
                or not is_called(module)
                or shared.get(name)
                or sum(p.numel() for p in left) < self.min_parameters
            ):
                continue
            found.append(name)
            taken |= left
        if not found:
            raise ConfigError(
                f"wrap.min_parameters({self.min_parameters:,}): no module has so many; use wrap=root_only"
            )
        return dict.fromkeys(reversed(found))


class Rule(Section):
    """Modules and how they are wrapped."""

    match: str
    """A pattern over module names, part by part (`layers.*.attention`), or the name of a class (`Block`)."""
    reshard_after_forward: Reshard | None = None
    """null: that of the parallelism."""
    wrap: bool = True
    """false: modules that match stay in the unit around them, also when a later rule matches."""


class Rules(Wrap):
    """A list of rules; the first that matches a module decides. A rule that matches nothing is an error."""

    by_name: ClassVar[bool] = True
    rules: list[Rule]

    def units(self, network: Network) -> dict[str, Reshard | None]:
        decided = self._decided(network)
        for number, rule in enumerate(self.rules):
            if number not in decided.values():
                modules = ", ".join(sorted({type(module).__name__ for module in network.modules()}))
                raise ConfigError(
                    f"wrap.rules[{number}]: '{rule.match}' matches no module that an earlier rule has left. "
                    f"Classes: {modules}; names such as {network.block_names()[0]}"
                )
        rules = {name: self.rules[number] for name, number in decided.items()}
        return {name: rule.reshard_after_forward for name, rule in rules.items() if rule.wrap}

    def unmentioned(self, network: Network) -> list[str]:
        decided = self._decided(network)
        return [
            name
            for name, module in network.named_modules()
            if any(True for _ in module.parameters(recurse=False))
            and not any(f"{name}.".startswith(f"{other}.") for other in decided)
        ]

    def _decided(self, network: Network) -> dict[str, int]:
        """Module name -> number of the first rule that matches it."""
        found: dict[str, int] = {}
        for name, module in network.named_modules():
            for number, rule in enumerate(self.rules):
                if name and (_matches(name, rule.match) or type(module).__name__ == rule.match):
                    found[name] = number
                    break
        return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
