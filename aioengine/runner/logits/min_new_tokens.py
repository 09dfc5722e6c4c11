"""Stop tokens cannot be drawn before ``min_new_tokens`` output tokens exist."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow


class MinNewTokens:
    def wants(self, sampling: Sampling) -> bool:
        return sampling.min_new_tokens > 0 and bool(sampling.suppressed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow]) -> None:
        early = [row for row in rows if row.num_output < row.sampling.min_new_tokens]
        if not early:
            return
        ids = list(chain.from_iterable(row.sampling.suppressed_token_ids for row in early))
        indices = [row.index for row in early for _ in row.sampling.suppressed_token_ids]
        minus_infinity = torch.tensor(-torch.inf, device=logits.device)
        logits.index_put_((_ids(indices, logits), _ids(ids, logits)), minus_infinity)


def _ids(values: list[int], logits: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=logits.device)


PLUGIN = MinNewTokens
