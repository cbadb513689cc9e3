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
"""Purposes of a storage, in the order of tables and charts; `ledger.memory_ledger` assigns them."""
