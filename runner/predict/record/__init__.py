"""The events of a traced run, the costs of its operators, and the recorder that writes them down."""
