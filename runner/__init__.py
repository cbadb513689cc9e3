"""The experiment engine: it composes, checks, launches, measures, records and compares runs. Model code is in `recipes`.
The import contracts in `pyproject.toml` list the layers of packages. A package may import only the packages below it."""
