"""The z-loss keeps log(Z) near 0, so that logits do not drift (Chowdhery et al. 2022, section 5). Z: sum of exp(logit)."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

IGNORED = -100
"""Target of tokens that F.cross_entropy ignores."""


def squared_log_z(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a 0-d fp32 tensor with the gradient, but not the value, of the sum of log(Z)^2 over the tokens.

    log(Z) is the logsumexp of a token's logits. logits: [batch, seq, vocab], fp32, whole or split over the
    vocabulary; targets: [batch, seq]. With split logits, d log(Z) = (Z_rank / Z) x d log(Z_rank).
    Z_rank is the sum of exp(logit) over this rank's part of the vocabulary.
    """
    own = (logits.to_local() if isinstance(logits, DTensor) else logits).logsumexp(-1)
    with torch.no_grad():
        log_z = own
        if isinstance(logits, DTensor):
            parts = DTensor.from_local(own.unsqueeze(-1), logits.device_mesh, [Shard(-1)], run_check=False)
            log_z = parts.full_tensor().logsumexp(-1)
        slope = torch.where(targets == IGNORED, 0.0, 2 * log_z * (own - log_z).exp())
    return (slope * own).sum()
