"""``allowed_token_ids``: no other token can be drawn."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload


class AllowedTokenIds:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.allowed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set all others to -inf in logits [S, W]."""
        counts = [len(row.sampling.allowed_token_ids) for row in rows]
        indices = np.array([row.index for row in rows], dtype=np.int64)
        ids = chain.from_iterable(row.sampling.allowed_token_ids for row in rows)
        places = upload(np.repeat(indices, counts)), upload(np.fromiter(ids, np.int64, sum(counts)))
        kept = logits[places]
        logits.index_fill_(0, upload(indices), -torch.inf)
        logits.index_put_(places, kept)


PLUGIN = AllowedTokenIds
