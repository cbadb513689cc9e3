"""Attention within documents. Packed sequences contain several documents, each of which ends with the same token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Documents(NamedTuple):
    """The documents of a batch, in the form that attention layers need. Blocks get this tuple in place of the rotary table."""

    rope: Tensor | None
    """Rows of the rotary table, [batch, seq, 2, head_dim], or None if positions are not encoded. Positions count from the
    beginning of each document."""
    mask: Tensor
    """Summand of the attention scores, [batch, 1, query, key]: 0 for keys of the query's document up to the query's position,
    -inf for all other keys."""


Rope = Tensor | Documents | None
"""Positions of tokens: rows of the rotary table, [seq, 2, head_dim]; documents; or None if positions are not encoded."""


def find_documents(tokens: Tensor, end: int, rope: Tensor | None, dtype: torch.dtype) -> Documents:
    """Divide sequences into documents. tokens: [batch, seq]; end: the last token of every document; rope: rows of the rotary
    table, [seq, 2, head_dim]; dtype: compute dtype of attention."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    begins = F.pad(tokens[:, :-1] == end, (1, 0))
    first = torch.where(begins, place, 0).cummax(1).values  # place of the document's first token, [batch, seq]
    hidden = (place < first.unsqueeze(-1)) | (place > place.unsqueeze(-1))  # [batch, query, key]
    # torch converts a boolean mask to numbers in every block, and every block would keep the result for backward.
    mask = torch.zeros(hidden.shape, dtype=dtype, device=tokens.device).masked_fill_(hidden, -torch.inf)
    return Documents(None if rope is None else rope[place - first], mask.unsqueeze(1))
