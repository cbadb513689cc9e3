"""Verbs (subcommands such as `meshrunner run`), one per module. A verb is a function that returns the exit status."""
