"""The verbs, one module per verb. A verb is a function that takes arguments and returns an exit status."""
