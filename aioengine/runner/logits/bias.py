"""``logit_bias``: a number added to the logits of chosen tokens."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow


class Bias:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bias_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow]) -> None:
        device = logits.device
        indices = torch.tensor([row.index for row in rows for _ in row.sampling.bias_token_ids], device=device)
        ids = torch.tensor(list(chain.from_iterable(row.sampling.bias_token_ids for row in rows)), device=device)
        values = torch.tensor(list(chain.from_iterable(row.sampling.logit_bias for row in rows)), device=device)
        logits.index_put_((indices, ids), values.to(logits.dtype), accumulate=True)


PLUGIN = Bias
