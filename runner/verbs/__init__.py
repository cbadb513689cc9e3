"""The verbs, a function in a module each: arguments in, exit status out. `runner/commands` declares them."""
