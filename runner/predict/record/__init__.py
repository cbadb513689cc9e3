"""Defines the events of a traced run, the costs of operators, and the recorder that logs events."""
