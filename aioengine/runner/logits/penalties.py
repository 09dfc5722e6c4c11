"""Penalties on a CPU: frequency and presence penalties for output tokens, then the repetition penalty for all tokens.

On a GPU ``runner.sampling.token_counts`` does this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.request_row import LogitsRow
    from aioengine.runner.transfer import Upload


class Penalties:
    def wants(self, sampling: Sampling) -> bool:
        return sampling.has_penalties

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Penalize ``rows`` of logits [S, W]."""
        for row in rows:
            sampling, scores = row.request.sampling, logits[row.index]
            history = row.request.history[: row.num_tokens]
            if row.num_output > 0 and (sampling.frequency_penalty or sampling.presence_penalty):
                ids, counts = history[row.request.num_prompt :].unique(return_counts=True)
                scores[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
            if sampling.repetition_penalty != 1.0:
                ids, penalty = history[row.request.first_id :], sampling.repetition_penalty
                values = scores[ids]
                scores[ids] = torch.where(values < 0, values * penalty, values / penalty)
