"""``logit_bias``: a number added to the logits of chosen tokens."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

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
        indices = np.array([row.index for row in rows for _ in row.sampling.bias_token_ids], dtype=np.int64)
        ids = np.array(list(chain.from_iterable(row.sampling.bias_token_ids for row in rows)), dtype=np.int64)
        values = np.array(list(chain.from_iterable(row.sampling.logit_bias for row in rows)), dtype=np.float32)
        logits.index_put_((upload(indices), upload(ids)), upload(values), accumulate=True)


PLUGIN = Bias
