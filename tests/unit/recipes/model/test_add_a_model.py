"""docs/add_a_model.md quotes the example, which tests/dist/test_examples.py trains."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.composed import experiment

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/add_a_model.md").read_text()
EXAMPLE = ROOT / "examples/own_model"


def blocks(language: str) -> list[str]:
    """Code blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_quotes_the_example() -> None:
    sources = [(EXAMPLE / name).read_text() for name in ("gpt.py", "network.py")]
    assert len(blocks("python")) == 4
    for piece in (piece.strip("\n") for block in blocks("python") for piece in block.split("\n\n\n")):
        as_method = textwrap.indent(piece, "    ")
        assert any(quoted in source for source in sources for quoted in (piece, as_method)), f"not quoted:\n{piece}"
    assert blocks("yaml") == [(EXAMPLE / "model/gpt.yaml").read_text()]


def test_flops_of_the_example_count_every_weight_but_the_tables() -> None:
    model = experiment("--config-dir=examples/own_model", "model=gpt", "seq_len=64").model
    sizes = {name: p.numel() for name, p in model.on_meta(64).named_parameters()}
    multiplied = sum(size for name, size in sizes.items() if name not in ("tokens.weight", "positions.weight"))
    attention = 12 * 4 * 256 * 64
    assert model.flops_per_token(64) == (6 * multiplied + attention, attention)
