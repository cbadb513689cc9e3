"""What a shell is offered for each verb, and how it is written for bash."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from meshrunner.runner import completion
from meshrunner.runner.cli import _dispatch
from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.commands.parser import Parser
from meshrunner.runner.commands.usage import describe
from meshrunner.runner.completion import candidates

DIRECTORIES = {
    verb: argument.number in ("any", "several") or len(command.arguments) > 1
    for verb, command in COMMANDS.items()
    for argument in command.arguments
    if argument.value == "directory"
}
"""Verb -> whether it takes several directories."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with runs, a sweep, other folders, and a file."""
    for name, file in (
        ("x_run", "config.yaml"),
        ("y sweep", "sweep.json"),
        ("a_folder", "notes"),
        (".hidden", "notes"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "a_folder" / "inner").mkdir()
    (tmp_path / "a_file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def after(line: str) -> list[str]:
    *before, word = line.split(" ")
    return candidates(before, word)


def folders_of(found: list[str]) -> list[str]:
    return [each for each in found if each in ("x_run/", "y sweep/", "a_folder/", ".hidden/", "a_file")]


def test_verbs() -> None:
    assert after("") == list(COMMANDS)
    assert after("sta") == ["status"]
    assert after("--") == ["--help"]
    assert after("nonsense ") == []


@pytest.mark.parametrize("verb", DIRECTORIES)
def test_folders_runs_and_sweeps_first(verb: str) -> None:
    found = [
        each for each in after(f"{verb} ") if each.endswith("/") and "=" not in each and each.partition("/")[2] == ""
    ]
    assert [each for each in found if each[0] in "xya"] == ["x_run/", "y sweep/", "a_folder/"]
    assert after(f"{verb} ./x") == ["./x_run/"]
    assert after(f"{verb} a_folder/") == ["a_folder/inner/"]
    assert bool(folders_of(after(f"{verb} x_run "))) == DIRECTORIES[verb]
    assert after(f"{verb} nowhere/") == []


def test_what_submitting_a_folder_again_takes() -> None:
    assert after("submit x_run hydra.launcher.part") == ["hydra.launcher.partition="]
    assert after("submit x_run step") == []


def test_what_help_explains() -> None:
    assert {"optimizer", "launch", "steps", "hydra/launcher"} <= set(after("help "))
    assert not [each for each in after("help ") if "." in each], "keys only once a word is begun"
    assert {"optimizer", "optimizer.lr", "optimizer.betas", "objective"} <= set(after("help o"))
    assert after("help hydra.launcher.part") == ["hydra.launcher.partition"]
    assert set(after("help loss=")) == {"loss=plain", "loss=chunked"}
    assert {"status", "steps"} <= set(after("help st"))
    assert after("help nonsense=") == after("help lr ") == after("schema model ") == []
    assert after("schema opt") == ["optimizer"]


def test_flags() -> None:
    assert after("resume --") == ["--force", "--help"]
    assert after("submit --d") == ["--dry-run"]
    assert "-m" in after("run -") and "--config-dir" in after("run -")
    assert after("doctor -") == after("status -") == ["-h", "--help"]
    assert after("doctor ") == []
    assert after("plan --max micro_batch checkp") == after("plan --json checkp") == after("plan checkp") != []
    assert after("run --cfg ") == ["job", "hydra", "all"]
    assert after("run --config-dir a_f") == ["a_folder/"]
    assert after("compare x_run --html a_f") == after("plan --html a_f") == ["a_file", "a_folder/"]
    assert after("compare x_run --baseline ") == []


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_option_is_completed_parsed_and_explained(verb: str) -> None:
    command = COMMANDS[verb]
    flags = {flag for option in command.options for flag in option.flags}
    assert set(after(f"{verb} -")) == flags
    assert all(flag in describe(command) for flag in flags)
    parser = Parser(command)
    taken = {flag for action in parser._actions for flag in action.option_strings}
    hydra = {flag for option in command.options if option.hydra for flag in option.flags}
    assert taken | hydra | {"-h", "--help"} == flags
    known = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert hydra <= known


@pytest.mark.parametrize("verb", [verb for verb, command in COMMANDS.items() if command.overrides])
def test_overrides_through_hydra(verb: str) -> None:
    assert {"parallelism=fsdp1", "parallelism=fsdp2", "parallelism=fsdp1_tp"} <= set(after(f"{verb} parallelism=fs"))
    assert after(f"{verb} steps=5 optimizer.bet") == ["optimizer.betas."]
    assert set(after(f"{verb} checkp")) == {"checkpoint=", "checkpoint."}


def test_values_of_a_sweep_and_paths() -> None:
    assert "parallelism=ddp,fsdp2" in after("run -m parallelism=ddp,fs")
    assert after("run checkpoint=dcp checkpoint.load=x_") == ["checkpoint.load=x_run/"]


def said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, **variables: str) -> str:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.delenv("COMP_POINT", raising=False)
    monkeypatch.delenv("COMP_WORD", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _dispatch(["-sc", "query=bash"]) == 0
    out, err = capfd.readouterr()
    assert err == "", "nothing but candidates may come into the prompt"
    return out


def test_as_bash_inserts_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def bash(line: str, word: str, **variables: str) -> str:
        return said(monkeypatch, capfd, line, COMP_WORD=word, **variables)

    assert bash("meshrunner sta", "sta") == "status \n"
    assert bash("meshrunner status y", "y") == "y\\ sweep/\n"
    assert bash("meshrunner status y\\ s", "y\\ s") == "y\\ sweep/\n"
    assert bash("meshrunner run checkpoint.load=./y\\ s", "./y\\ s") == "./y\\ sweep/\n"
    assert bash("meshrunner run checkpoint=dcp_", "dcp_") == "dcp_async \n", "bash takes key= for words of their own"
    assert bash("meshrunner run checkpoint=dcp_", "checkpoint=dcp_") == "checkpoint=dcp_async \n"
    assert bash("meshrunner sta x_run", "sta", COMP_POINT="14") == "status \n"
    assert said(monkeypatch, capfd, "meshrunner sta") == "status\n"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "meshrunner",
        "meshrunner run 'x",
        "meshrunner run nonsense=1 steps=",
        "meshrunner run --nonsense steps=",
        "meshrunner run --config-dir nowhere par",
        "meshrunner run [[ =",
        "meshrunner run +model.x={ par",
        "meshrunner run -m --multirun=x par",
        "meshrunner submit x_run ste=",
        "meshrunner doctor \N{SNOWMAN}",
    ],
)
def test_never_a_word_into_the_prompt(
    line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for point in (len(line), max(len(line) - 1, 0)):
        said(monkeypatch, capfd, line, COMP_POINT=str(point))


def test_installing(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["-sc", "install=bash"],
        ["run", "-sc", "install=bash"],
        ["run", "--shell-completion", "install=bash"],
    ):
        assert _dispatch(arguments) == 0
        assert capfd.readouterr() == (completion.INSTALL, "")
    assert _dispatch(["-sc", "uninstall=bash"]) == 0
    assert "complete -r meshrunner" in capfd.readouterr().out
    assert _dispatch(["-sc", "install=fish"]) == 2
    assert "install=bash" in capfd.readouterr().err
