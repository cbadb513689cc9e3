"""Declarative experiments for distributed LLM training: compose, check, run, compare.

The folders beside this file are links to those at the top of the repository: `meshrunner.runner` is `runner/`. What is
installed, editable or as a wheel, is this one package.
"""

__version__ = "0.1.0"
