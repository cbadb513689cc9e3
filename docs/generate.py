"""mkdocs hook: write a page for every verb and config group, and turn the files at the top of the repository into pages."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshrunner.runner import shipped
from meshrunner.runner.commands import COMMANDS
from meshrunner.runner.config.reference.explain import default_of
from meshrunner.runner.verbs.reference.help import every_key, explanation

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

    from meshrunner.runner.commands import Command
    from meshrunner.runner.config.reference.catalog import Key

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
FROM_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Name of the page on the site for each file at the top of the repository."""
GROUP_PAGES, VERB_PAGES = "reference/config", "reference/verbs"
"""Folders of the generated pages."""
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
TOP_LEVEL = "run.yaml"


def pages() -> dict[str, str]:
    """Return the Markdown of all generated pages. Keys are the paths of the pages in docs/."""
    top = {page: (REPOSITORY / name).read_text() for name, page in FROM_TOP.items()}
    return top | group_pages() | verb_pages()


def group_pages() -> dict[str, str]:
    """Return a page for every config group and for every section of run.yaml."""
    groups = shipped.groups()
    keys: dict[str, list[Key]] = {group: [] for group in groups} | {TOP_LEVEL: []}
    for key in every_key():
        if key.field == "kind" or key.name in groups:
            continue
        section = key.group if key.group in groups or "." in key.name else TOP_LEVEL
        keys.setdefault(section, []).append(key)
    keys[TOP_LEVEL] = [key for key in keys[TOP_LEVEL] if key.name not in keys]
    return {page_of(section): "\n".join(group_page(section, inside)) + "\n" for section, inside in keys.items()}


def page_of(section: str) -> str:
    """Return the path of the page of a config group or section, relative to docs/."""
    return f"{GROUP_PAGES}/{section.replace('/', '_').replace('.yaml', '')}.md"


def group_page(section: str, keys: Iterable[Key]) -> Iterator[str]:
    """Yield the lines of a group's page: a description, the options and the keys."""
    yield f"# {section}"
    yield ""
    if section in shipped.groups():
        yield escaped(about(section))
        yield from ["", "| option | |", "|---|---|"]
        default = shipped.defaults().get(section)
        for option, text in shipped.options(section).items():
            yield f"| `{option}`{' (default)' if option == default else ''} | {escaped(text)} |"
    elif section == TOP_LEVEL:
        yield "Keys that belong to no group."
    else:
        yield escaped(about(section))
    for key in keys:
        yield from ["", *key_lines(key)]
    if section in shipped.GLOBAL:
        for option in shipped.options(section):
            yield from ["", f"## {option}", "", "```yaml", shipped.file_text(section, option).rstrip(), "```"]


def about(section: str) -> str:
    """Return the first sentences that `meshrunner help` prints about a group or section."""
    lines = explanation(section).splitlines()[1:]
    return " ".join(line.strip() for line in lines[: lines.index("")])


def key_lines(key: Key) -> Iterator[str]:
    """Yield the lines about one key: its meaning, its allowed values and its default."""
    yield f"## {key.name} {{ #{key.name.replace('[]', '')} }}"
    yield ""
    documentation = key.documentation()
    for text, kinds in documentation.items():
        yield (
            f"{', '.join(f'`{kind}`' for kind in kinds)}: {escaped(text)}" if len(documentation) > 1 else escaped(text)
        )
        yield ""
    yield f"- Expected: {escaped(key.expected(whole=True))}"
    if default := default_of(key):
        yield f"- Default: {escaped(default)}"


def verb_pages() -> dict[str, str]:
    """Return a page for every verb."""
    return {f"{VERB_PAGES}/{verb}.md": "\n".join(verb_page(command)) + "\n" for verb, command in COMMANDS.items()}


def verb_page(command: Command) -> Iterator[str]:
    """Yield the lines of a verb's page: usage, description, arguments, options, examples and exit status."""
    yield from [f"# meshrunner {command.verb}", "", f"{command.summary[:1].upper()}{escaped(command.summary[1:])}.", ""]
    yield from ["```", f"meshrunner {command.synopsis}", "```", ""]
    if command.description:
        yield from [escaped(command.description), ""]
    for title, given in (("argument", command.arguments), ("option", command.options)):
        if given:
            yield from [f"| {title} | |", "|---|---|"]
            yield from (f"| `{each.synopsis.replace('|', chr(92) + '|')}` | {escaped(each.help)} |" for each in given)
            yield ""
    if command.examples:
        yield from ["Examples:", "", "```", *(f"meshrunner {example}" for example in command.examples), "```", ""]
    if command.fails_if:
        yield f"Exits with 1 if {escaped(command.fails_if)}."


def escaped(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, even in a table. Text between backticks stays code."""
    parts = text.split("`")
    plain = [re.sub(r"([*_|\[\]])", r"\\\1", html.escape(part, quote=False)) for part in parts]
    return "".join(f"`{part}`" if number % 2 else plain[number] for number, part in enumerate(parts))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    assert config.nav is not None
    sections = {name: entries for each in config.nav for name, entries in each.items()}
    sections["Contributing"] += [{Path(name).stem.capitalize(): FROM_TOP[name]} for name in [*FROM_TOP][1:]]
    sections["Reference"] += [
        {"Verbs": [{Path(page).stem: page} for page in verb_pages()]},
        {"Configuration": [{Path(page).stem: page} for page in group_pages()]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page for the site. Remove comments, because a table directly below a comment is not rendered."""
    return with_links(re.sub(r"<!--.*?-->\n?", "\n", markdown), page.file.src_uri)


def with_links(markdown: str, page: str) -> str:
    """
    Return a page whose links lead to pages of the site. Links to files that are not part of the site become code.

    Args:
        page: path of the page in docs/.
    """
    sources = {path: name for name, path in FROM_TOP.items()}
    written = REPOSITORY / sources[page] if page in sources else DOCS / page

    def rewritten(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(written.parent / link["target"]))
        if target.parent == REPOSITORY and target.name in FROM_TOP:
            target = DOCS / FROM_TOP[target.name]
        elif target.is_dir() or not target.is_relative_to(DOCS):
            return link["text"] if "`" in link["text"] else f"`{link['text']}`"
        return f"[{link['text']}]({os.path.relpath(target, (DOCS / page).parent)}{link['anchor'] or ''})"

    return LINK.sub(rewritten, markdown)
