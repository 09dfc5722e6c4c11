"""Stop tokens cannot be drawn before ``min_new_tokens`` output tokens exist, unless there are no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioengine.runner.token_lists import token_places

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload


_LEAST = -1e30
"""Finite, also when divided by a temperature: where all tokens are stop tokens, one of them is drawn."""


class MinNewTokens:
    def wants(self, sampling: Sampling) -> bool:
        return sampling.min_new_tokens > 0 and bool(sampling.suppressed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Lower the suppressed tokens in logits [S, W]."""
        early = [row for row in rows if row.num_output < row.sampling.min_new_tokens]
        if not early:
            return
        places = token_places(
            [row.index for row in early], [row.lists.suppressed for row in early if row.lists is not None], upload
        )
        logits.index_put_(places, upload(np.full(1, _LEAST, dtype=np.float32)))


PLUGIN = MinNewTokens
