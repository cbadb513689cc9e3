"""Format the help texts of the command line: the list of verbs (subcommands such as `plan`), and a page for each verb."""

from collections.abc import Iterator

from meshrunner.runner.commands.command_table import COMMANDS
from meshrunner.runner.commands.declaration import Command
from meshrunner.runner.console import in_two_columns, paragraph

OVERRIDES = "key=value or group=option; +key=value adds a key, ~key removes one; with -m, key=a,b tries both values"
ENDED = "every run completed; in a sweep, out-of-memory and skipped runs are not failures"
WRONG = "the arguments or the configuration are wrong; nothing was started"
STOPPED = {75: "preempted; `resume DIR` continues", 130: "interrupted"}


def overview() -> str:
    """Return the text that `meshrunner --help` prints."""
    parts = ["usage: meshrunner VERB ..."]
    width = max(len(command.synopsis) for command in COMMANDS.values())
    for room in dict.fromkeys(command.room for command in COMMANDS.values()):
        inside = [command for command in COMMANDS.values() if command.room == room]
        parts.append(f"{room}:\n{in_two_columns((each.synopsis.ljust(width), each.summary) for each in inside)}")
    parts += [
        paragraph(
            "`meshrunner VERB --help` explains a verb, and `meshrunner help KEY` explains a configuration key. "
            "OVERRIDES use Hydra's syntax: model=llama3_8b parallelism.shard=4 +key=value ~key. `meshrunner run --help`"
            " lists groups and keys. `meshrunner --version` prints the versions of meshrunner, torch and Python.",
            0,
        ),
        _exit_statuses({0: ENDED, 1: "a run failed", 2: WRONG, 3: "a rule of compare --fail-if failed"} | STOPPED),
    ]
    return "\n\n".join(parts)


def describe(command: Command) -> str:
    """Return the text that `meshrunner help VERB` prints."""
    parts = ["\n".join(usage_lines(command)), paragraph(f"{command.summary[0].upper()}{command.summary[1:]}.", 0)]
    if command.description:
        parts.append(paragraph(command.description, 0))
    arguments = [("OVERRIDES", OVERRIDES)] * command.overrides
    arguments += [(argument.metavar, argument.help) for argument in command.arguments]
    if arguments:
        parts.append(f"arguments:\n{in_two_columns(arguments)}")
    for title, hydra in (("options", False), ("options of Hydra", True)):
        if options := [(each.synopsis, each.help) for each in command.options if each.hydra == hydra]:
            parts.append(f"{title}:\n{in_two_columns(options)}")
    if command.examples:
        parts.append("\n".join(["examples:", *(f"  meshrunner {example}" for example in command.examples)]))
    wrong = WRONG if command.executes or command.overrides else "the arguments are wrong"
    ended = {0: ENDED if command.executes else "success", 1: command.fails_if, 2: wrong, 3: command.found_if}
    parts.append(_exit_statuses(ended | STOPPED if command.executes else ended))
    return "\n\n".join(parts)


def usage_lines(command: Command) -> Iterator[str]:
    """Yield one usage line for each form of a verb. The verb `submit` has two forms: `submit [OVERRIDES]` and `submit DIR`."""
    begin = "usage:"
    for form in command.synopsis.removeprefix(command.verb).split(" | "):
        options = " [OPTIONS]" if command.own_options else ""
        yield f"{begin} meshrunner {command.verb} {form.strip()}".rstrip() + options
        begin = " " * len(begin)


def _exit_statuses(meanings: dict[int, str]) -> str:
    return f"exit status:\n{in_two_columns((f'{status:<3}', text) for status, text in meanings.items() if text)}"
