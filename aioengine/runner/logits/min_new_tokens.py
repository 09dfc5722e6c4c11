"""``min_new_tokens``: stop tokens are not sampled before this many output tokens, unless no other token is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioengine.runner.token_lists import token_indices

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload


_LEAST = -1e30
"""Finite, even divided by a temperature: if all tokens are stop tokens, one of them is sampled."""


class MinNewTokens:
    def wants(self, sampling: Sampling) -> bool:
        return sampling.min_new_tokens > 0 and bool(sampling.suppressed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Lower the logits [S, W] of suppressed tokens."""
        early = [row for row in rows if row.num_output < row.sampling.min_new_tokens]
        if not early:
            return
        indices = token_indices(
            [row.index for row in early], [row.lists.suppressed for row in early if row.lists is not None], upload
        )
        logits.index_put_(indices, upload(np.full(1, _LEAST, dtype=np.float32)))


PLUGIN = MinNewTokens
