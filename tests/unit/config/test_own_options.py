"""User classes as options: help on their keys, messages for wrong keys and for mistakes in the class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrunner.runner import cli
from meshrunner.runner.completion import candidates
from meshrunner.runner.rundir.states import read_status
from meshrunner.runner.shipped import also_in, options
from tests.e2e.command import SLOW_WORK, TINY

OWN = """
from meshrunner.recipes.model.base import Flops
from meshrunner.recipes.model.llama import Llama


class Mine(Llama):
    \"\"\"A Llama with something added.

    More of it.
    \"\"\"

    twist: str
    \"\"\"What is added to a block.\"\"\"

    bent: float = 1.5
    \"\"\"Angle of the twist.\"\"\"

    def network(self, seq_len):
        if self.twist == "network":
            return build(seq_len)
        return super().network(seq_len)

    def flops_per_token(self, seq_len):
        if self.twist == "flops":
            return Flops(seq_len // 0, 0)
        return super().flops_per_token(seq_len)


def build(seq_len):
    raise ValueError(f"no network\\nof {seq_len} tokens")
"""
MINE = "# Mine, with a twist\ndefaults: [llama_tiny]\nkind: own_twist:Mine\ntwist: none\n"
MODELS = ("model=llama_tiny,mine", "hydra.sweep.dir=out")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory: a module of the user's, and a YAML file for it."""
    (tmp_path / "own_twist.py").write_text(OWN)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_twist", None)


def said(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """What a command says, on either stream; on one screen, and no traceback."""
    assert cli._dispatch(list(arguments)) == code, capsys.readouterr()
    text = SLOW_WORK.sub("", "".join(capsys.readouterr()))
    assert "Traceback" not in text
    return text


def test_a_key_that_one_of_the_options_lacks_is_named_with_its_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 2, "place", "-m", "--config-dir=mine", *TINY, *MODELS, "model.twist=a,b")
    assert text.startswith(
        "job 0 (model=llama_tiny model.twist=a), job 1 (model=llama_tiny model.twist=b): model.twist:"
    )
    assert "unknown key" in text and "model=mine" not in text
    assert not Path("out").exists()


def test_the_default_option_may_lack_what_all_that_are_tried_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra composes what the combinations have in common with model=llama_tiny."""
    Path("mine/model/other.yaml").write_text(MINE.replace("none", "other"))
    tried = ("model=mine,other", "model.twist=c", "hydra.sweep.dir=out")
    said(capsys, 0, "place", "-m", "--config-dir=mine", *TINY, *tried)
    assert [path.parent.name for path in sorted(Path("out").glob("*/config.yaml"))] == [
        "000_model-mine",
        "001_model-other",
    ]
    assert all("twist: c\n" in path.read_text() for path in Path("out").glob("*/config.yaml"))
    text = said(capsys, 2, "place", "-m", "--config-dir=mine", *TINY, *MODELS, "model.twist=c")
    assert text.startswith("job 0 (model=llama_tiny): model.twist: unknown key.")


def test_what_no_combination_has_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 2, "place", "-m", "--config-dir=mine", *TINY, *MODELS, "model.twits=a,b", "optimizer.lrr=1,2")
    assert text.startswith("model.twits: unknown key.") and "job" not in text


def test_options_that_each_lack_a_key_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("parallelism=fsdp1,fsdp2", "parallelism.prefetch=2", "parallelism.backward_prefetch=pre")
    text = said(capsys, 2, "place", "-m", *TINY, *given, "hydra.sweep.dir=out")
    assert "job 0 (parallelism=fsdp1): parallelism.prefetch: unknown key." in text
    assert "job 1 (parallelism=fsdp2): parallelism.backward_prefetch: unknown key." in text


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("baseline=model=llama_tiny", "sweep.baseline=model=llama_tiny"),
        ("+baseline=model=llama_tiny", "sweep.baseline=model=llama_tiny"),
        ("baseline='model=llama_tiny'", "'sweep.baseline='\"'\"'model=llama_tiny'\"'\"''"),
        ("exclude=[model=mine precision=bf16]", "'sweep.exclude=[model=mine precision=bf16]'"),
    ],
)
def test_a_rule_of_a_sweep_without_its_section(override: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 2, "place", "-m", *TINY, *MODELS, override)
    assert text == f"{override.lstrip('+').partition('=')[0]}: unknown key. Did you mean {meant}?\n"


def test_the_baseline_of_a_sweep_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (("--baseline", "model=llama_tiny"), ("--baseline=model=llama_tiny",)):
        assert "sweep.baseline=KEY=VALUE" in said(capsys, 2, "place", "-m", *TINY, *MODELS, *flag)


def test_a_value_with_an_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 2, "place", *TINY, "tracker.project=a=b")
    assert "must be quoted for the shell and for Hydra: 'tracker.project=\"a=b\"'" in text
    said(capsys, 0, "place", *TINY[:-4], "hydra.run.dir=out", 'tracker.project="a=b"')


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.bent=2", "model.bent: the YAML file of the chosen option lacks this key. Use +model.bent=VALUE\n"),
        ("model.bend=2", "model.bend: unknown key. Did you mean 'bent'? Keys of model: bent, dim, "),
        ("bent=2", "bent: unknown key. Did you mean model.bent?"),
        ("optimizer.bent=2", "optimizer.bent: unknown key. Did you mean model.bent?"),
        ("+model.bend=2", "model.bend: unknown key. Did you mean 'bent'?"),
    ],
)
def test_a_key_that_only_the_class_has_is_suggested(
    override: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("place", "--config-dir=mine", *TINY, "model=mine", "hydra.run.dir=out")
    assert says in said(capsys, 2, *given, override)
    said(capsys, 0, *given, "+model.bent=2")
    assert "\n  bent: 2\n" in Path("out/config.yaml").read_text()


def test_help_shows_the_default_of_a_key_that_only_the_class_has(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 0, "help", "--config-dir=mine", "bent")
    assert text.startswith("model.bent\n  Angle of the twist.") and "default   1.5" in text
    assert "a key of  model=mine" in text
    assert "model.bent = 1.5" in said(capsys, 0, "help", "--config-dir=mine", "model=mine")
    assert "model.bent = 1.5" in said(capsys, 0, "run", "--config-dir=mine", "model=mine", "--help")
    assert "rope_scaling.low_freq_factor" not in said(capsys, 0, "run", "--help"), "llama_tiny has no rope_scaling"


@pytest.mark.parametrize("flags", [("--config-dir", "mine"), ("--config-dir=mine",), ("-cd", "mine")])
def test_help_knows_a_folder_of_ones_own(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 0, "help", *flags, "model=mine")
    assert text.startswith("model=mine\n  Mine, with a twist\n  A Llama with something added.\n\n")
    assert "model.twist = none" in text and "What is added to a block. [text]" in text
    assert "model.dim = 256" in text and "llama_tiny" not in text
    text = said(capsys, 0, "help", "twist", *flags)
    assert text.startswith("model.twist\n  What is added to a block.") and "a key of  model=mine" in text
    assert "none" in text
    assert "mine" in said(capsys, 0, "help", *flags, "model") and "Mine, with a twist" in said(
        capsys, 0, "help", *flags, "mine"
    )
    assert "Did you mean 'mine'?" in said(capsys, 2, "help", *flags, "model=mien")


def test_help_without_the_folder_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --config-dir DIR" in said(capsys, 2, "help", "model=mine")
    assert "no such directory" in said(capsys, 2, "help", "--config-dir=nowhere", "lr")
    assert "usage" in said(capsys, 2, "help", "lr", "--config-dir") and "usage" in said(
        capsys, 2, "help", "--config-dir=mine"
    )
    Path("mine/model/mine.yaml").write_text(MINE.replace("own_twist", "own_twits"))
    text = said(capsys, 2, "help", "--config-dir=mine", "model=mine")
    assert text.startswith("model=mine: cannot import 'own_twits'")
    assert "vocab_size" in said(capsys, 0, "help", "--config-dir=mine", "vocab_size"), "what can be known is"


def test_options_of_ones_own_count_only_inside() -> None:
    with also_in("mine"):
        assert options("model")["mine"] == "Mine, with a twist"
    assert "mine" not in options("model")
    assert candidates(["help", "--config-dir", "mine"], "model=min") == ["model=mine"]
    assert candidates(["help", "--config-dir"], "mi") == ["mine/"]
    assert candidates(["help"], "model=min") == []


def test_the_help_of_a_verb_lists_options_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 0, "run", "--config-dir=mine", "model=mine", "--help")
    assert "model.twist = none" in text and ", mine" in text


def test_a_class_that_cannot_be_imported_damages_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, 0, "place", "-m", "--config-dir=mine", *TINY, *MODELS)
    del sys.modules["own_twist"]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for place in ("out", "out/001_model-mine"):
        text = said(capsys, 2, "resume", str(folder / place))
        assert "cannot import 'own_twist': ModuleNotFoundError" in text
        assert "run the command in the directory that contains 'own_twist', or add that directory to PYTHONPATH" in text
        assert "damaged" not in text
    for run in (folder / "out").glob("0*"):
        assert read_status(run).state == "pending"
    monkeypatch.chdir(folder)
    (folder / "own_twist.py").write_text("x = nonesuch\n")
    text = said(capsys, 2, "resume", "out")
    assert "NameError" in text and "PYTHONPATH" not in text and "damaged" not in text


@pytest.mark.parametrize(
    ("twist", "begins", "line"),
    [
        ("flops", "own_twist:Mine.flops_per_token raised ZeroDivisionError: ", "return Flops(seq_len // 0, 0)"),
        ("network", "own_twist:Mine.network raised ValueError: no network of 16 tokens\n", "return build(seq_len)"),
    ],
)
def test_a_mistake_in_a_class_of_ones_own(
    twist: str, begins: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, 2, "show", "--config-dir=mine", *TINY, "model=mine", f"model.twist={twist}")
    assert text.startswith(begins)
    number = OWN.splitlines().index(f"            {line}") + 1
    assert f"  {folder / 'own_twist.py'}, line {number}: {line}\n" in text
    assert len(text.splitlines()) <= 3 and ("raise ValueError" in text) == (twist == "network")


def test_a_fault_of_this_program_is_none_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrunner.runner.verbs.planning.show._facts", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli._dispatch(["show", *TINY])
