"""Read YAML with libyaml, which is ten times faster than PyYAML's pure-Python parser."""

import re
from typing import Any

import yaml


class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that reads `1e-3` as a number, as OmegaConf does. PyYAML itself would read `1e-3` as a string."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse a YAML document; raise ValueError with the parser's message if the document is malformed."""
    try:
        return yaml.load(text, YamlLoader)
    except Exception as error:  # int() and datetime() raise other errors for malformed values
        raise ValueError(" ".join(str(error).split())) from None
