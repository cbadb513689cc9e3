"""The documentation site: generated pages, and links between files."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshrunner.runner import shipped

REPOSITORY = Path(__file__).parents[2]
WRITTEN = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?P<target>[^)\s#:]*)(#(?P<anchor>[^)\s]+))?\)")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The mkdocs hook docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_exist(file: Path) -> None:
    for link in LINK.finditer(file.read_text()):
        target = file.parent / link["target"] if link["target"] else file
        assert target.exists(), link.group()
        if link["anchor"]:
            assert link["anchor"] in anchors(target.read_text()), link.group()


def test_every_group_has_a_page_with_its_options_and_keys(generate: ModuleType) -> None:
    pages = generate.group_pages()
    for group in shipped.groups():
        page = pages[generate.page_of(group)]
        assert page.startswith(f"# {group}\n")
        assert all(f"| `{option}`" in page for option in shipped.options(group))
    text = "\n".join(pages.values())
    for key in (
        "optimizer.lr",
        "launch.workers",
        "sweep.repeat",
        "steps",
        "hydra.launcher.time",
        "model.experts.balance",
    ):
        assert f"\n## {key} {{" in text
    assert "- Default: 30\n" in pages[generate.page_of("run.yaml")]


def test_every_verb_has_a_page(generate: ModuleType) -> None:
    pages = generate.verb_pages()
    assert {"run", "resume", "plan", "compare", "submit", "help"} <= {Path(page).stem for page in pages}
    for page, text in pages.items():
        assert text.startswith(f"# meshrunner {Path(page).stem}\n")
    assert "--html FILE" in pages["reference/verbs/plan.md"]


def test_links_of_the_site_lead_to_its_pages_or_become_code(generate: ModuleType) -> None:
    readme = "[a](docs/plan.md#x) [conf/experiment](conf/experiment) [b](CONTRIBUTING.md) ![c](docs/report.png) [d](https://a.b)"
    expected = "[a](plan.md#x) `conf/experiment` [b](contributing.md) ![c](report.png) [d](https://a.b)"
    assert generate.with_links(readme, "index.md") == expected
    inside = "[tests/a.py](../tests/a.py) [e](measurements/start.md) [f](#here)"
    assert generate.with_links(inside, "plan.md") == "`tests/a.py` [e](measurements/start.md) [f](#here)"


def test_text_of_docstrings_is_shown_as_it_is(generate: ModuleType) -> None:
    assert generate.escaped("a_b <x> `c_d <y>` e|f") == r"a\_b &lt;x&gt; `c_d <y>` e\|f"
