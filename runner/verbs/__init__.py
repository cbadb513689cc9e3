"""The verbs, one module per verb. A verb is a function from arguments to the exit status, declared in `runner/commands`."""
