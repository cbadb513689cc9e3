"""The trace of a step as data: its events, the operators' costs, and the recorder that writes it."""
