"""The verbs, one per file: arguments in, exit status out."""
