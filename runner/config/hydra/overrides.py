"""Parse a command line of Hydra flags and overrides: check the flags, and translate the overrides into Hydra's syntax."""

import argparse
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString, RangeSweep

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner import rundir
from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.commands.parser import suggestion
from meshrunner.runner.config.hydra.private import get_args_parser
from meshrunner.runner.console import printable

QUOTED_KEYS = re.compile(r"(?P<key>\+{0,2}sweep\.(?P<name>exclude|baseline))=(?P<value>.*)", re.DOTALL)
WITHOUT_SECTION = re.compile(r"\+{0,2}(?P<rule>(exclude|baseline)=.*=.*)", re.DOTALL)
SEVERAL = re.compile(r"tracker=\[\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)+)\s*\]", re.ASCII)
"""Pattern of an override such as `tracker=[wandb,tensorboard]`, which Hydra itself would merge into a single tracker."""
MEMBER = re.compile(r"\+tracker@tracker\.of\.(\w+)=\1", re.ASCII)
MAX_RUNS = 100_000
RULE_BEGINS = re.compile(r"\s*([\w./@-]+=|['\"])")


def parse(verb: str, arguments: list[str]) -> argparse.Namespace:
    """Parse the overrides and Hydra flags typed after `verb`. Raise ConfigError if an override or flag is malformed."""

    def refuse(message: str) -> NoReturn:
        hint = suggestion(COMMANDS[verb], message)
        if "--baseline" in message:  # a flag of `compare`
            message += "; for a sweep, give sweep.baseline=KEY=VALUE instead"
        raise ConfigError(f"{message}.{hint} `meshrunner {verb} --help` lists flags and keys")

    parser = get_args_parser()
    parser.prog = f"meshrunner {verb}"
    parser.error = refuse  # type: ignore[method-assign]
    args: argparse.Namespace = parser.parse_intermixed_args(arguments)  # flags may stand between overrides
    args.parser = parser
    args.overrides = prepared(args.overrides)
    return args


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError if one of Hydra's flags is unsupported or has no effect, or if two flags cannot be combined."""
    if args.config_path:
        raise ConfigError("--config-path would replace meshrunner's own options; use --config-dir to add yours")
    if args.experimental_rerun:
        raise ConfigError("--experimental-rerun is not supported; use `meshrunner resume DIR`")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve has no effect without --cfg or --help")
    if args.package and not args.cfg:
        raise ConfigError("--package has no effect without --cfg")
    modes = {"--run": args.run, "--multirun": args.multirun, "--cfg": args.cfg, "--info": args.info}
    if len(given := [flag for flag, value in modes.items() if value]) > 1 and not (args.help or args.hydra_help):
        raise ConfigError(f"{' and '.join(given)} cannot be combined; use one of them")


def prepared(overrides: Iterable[str]) -> list[str]:
    """Translate overrides into Hydra's syntax. For example, `launch.env.NAME=1` becomes `++launch.env.NAME=1`."""
    found: list[str] = []
    for override in overrides:
        if (text := printable(override)) != override:
            raise ConfigError(
                f"{rundir.key_of(text)}: remove the control character or the byte that is not UTF-8: {text!r}"
            )
        if override.startswith("launch.env."):
            found.append(f"++{override}")  # launch.env takes any name, and Hydra adds a key only with plus signs
        elif several := SEVERAL.fullmatch(override):
            names = [name.strip() for name in several[1].split(",")]
            found += ["tracker=several", *(f"+tracker@tracker.of.{name}={name}" for name in names)]
        else:
            found.append(_quoted(override))
    return found


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Return overrides as the user typed them: undo the split of `tracker=[a,b]` by `prepared`."""
    members = {override: found[1] for override in overrides if (found := MEMBER.fullmatch(override))}
    if "tracker=several" not in overrides or not members:
        return list(overrides)
    several = f"tracker=[{','.join(members.values())}]"
    return [several if each == "tracker=several" else each for each in overrides if each not in members]


def _quoted(override: str) -> str:
    """Quote each condition in `sweep.exclude=...` or `sweep.baseline=...`. Hydra requires quotes around a value with `=`."""
    if bare := WITHOUT_SECTION.fullmatch(override):
        meant = shlex.quote(f"sweep.{bare['rule']}")
        raise ConfigError(f"{bare['rule'].partition('=')[0]}: unknown key. Did you mean {meant}?")
    found = QUOTED_KEYS.fullmatch(override)
    if found is None or "=" not in found["value"] or found["value"].lstrip().startswith(("'", '"')):
        return override
    value = found["value"].strip()
    if found["name"] == "baseline":
        return f"{found['key']}={QuotedString(value, Quote.single).with_quotes()}"
    rules: list[str] = []
    for part in split_outside(value[1:-1] if value.startswith("[") and value.endswith("]") else value, ","):
        # A comma separates rules and also the values of one rule: micro_batch=8,16 is one rule.
        if rules and not RULE_BEGINS.match(part):
            rules[-1] += f",{part}"
        else:
            rules.append(part)
    stripped = [rule.strip() for rule in rules]
    quoted = [each if each[:1] in ("'", '"') else QuotedString(each, Quote.single).with_quotes() for each in stripped]
    return f"{found['key']}=[{','.join(quoted)}]"


def split_outside(text: str, separators: str) -> list[str]:
    """Split text at each character of `separators` that is outside brackets and quotes."""
    parts, start, depth, quote = [], 0, 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[index - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character in separators and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def left_to_jobs(overrides: Sequence[str], group: str) -> list[str]:
    """If the sweep varies GROUP, turn `GROUP.key=1` into a sweep over one value. Hydra then sets the key only in the jobs.
    The sweep's own configuration has GROUP's default option, which may lack the key."""
    parser = OverridesParser.create()
    sweeps = {override: parser.parse_override(override).is_sweep_override() for override in overrides}
    if not any(sweeps[override] and override.startswith(f"{group}=") for override in overrides):
        return list(overrides)
    found = []
    for override in overrides:
        key, _, value = override.partition("=")
        inside = key.startswith(f"{group}.") and value and not sweeps[override]
        found.append(f"{key}=choice({value})" if inside else override)
    return found


def check_number(overrides: Sequence[str]) -> None:
    """Raise ConfigError if a sweep has more than MAX_RUNS combinations. Count them without Hydra, which would list them all."""
    counts = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        count, value = 1, override.value()
        if isinstance(value, ChoiceSweep):
            count = len(value.list)
        elif isinstance(value, RangeSweep) and value.start is not None and value.stop is not None and value.step:
            count = max(1, math.ceil((value.stop - value.start) / value.step))
        counts[override.key_or_group] = count
    if (total := math.prod(counts.values())) > MAX_RUNS:
        varying = " x ".join(f"{key}({count:,})" for key, count in counts.items() if count > 1)
        raise ConfigError(f"{varying} = {total:,} combinations; a sweep has at most {MAX_RUNS:,}; give fewer values")
