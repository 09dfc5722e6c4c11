"""``logit_bias``: add numbers to the logits of chosen tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioengine.runner.token_lists import token_indices

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload


class Bias:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bias_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Add the biases to logits [S, W]."""
        lists = [row.lists for row in rows if row.lists is not None]
        indices = token_indices([row.index for row in rows], [row_lists.bias_ids for row_lists in lists], upload)
        values = np.concatenate([row_lists.bias for row_lists in lists])
        logits.index_put_(indices, upload(values), accumulate=True)


PLUGIN = Bias
