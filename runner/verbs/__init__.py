"""One file a verb: arguments in, exit status out."""
