"""The categories of device memory."""

from __future__ import annotations

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "unsharded",
    "communication",
    "logits",
    "temporary",
)
"""Purposes of memory, in the order of tables and charts. `MemoryLedger` defines and assigns them."""
