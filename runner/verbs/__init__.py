"""The verbs (subcommands such as `meshrunner run`), one module each. A verb is a function: arguments in, exit status out."""
