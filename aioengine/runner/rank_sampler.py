"""Samples on rank 0, and gives the token ids to all ranks.

S rows that sample, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.layers.ranks import RankGroup
    from aioengine.runner.request_row import SampledRows
    from aioengine.runner.sampling.device_sampler import DeviceSampler
    from aioengine.runner.sampling.sampler import Sampler


class RankSampler:
    """The sampler of a rank."""

    def __init__(self, sampler: Sampler | DeviceSampler, ranks: RankGroup) -> None:
        """sampler: the sampler of rank 0."""
        self._sampler = sampler
        self._ranks = ranks

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Sample one token id per row of logits [S, >= V] -> [S] int64; FAILED for a bad row."""
        if self._ranks.rank:
            token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        else:
            token_ids = self._sampler.sample(logits, rows).contiguous()
        return self._ranks.from_first(token_ids)

    def process(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Return the logits [S, V] after the processors."""
        return self._sampler.process(logits, rows)
