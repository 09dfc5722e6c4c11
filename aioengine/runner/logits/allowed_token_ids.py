"""``allowed_token_ids``: forbid all other tokens."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.runner.logits.grammar import mask_on_cpu

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload


class AllowedTokenIds:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.allowed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the logits [S, W] of all other tokens to -inf."""
        row_masks = {row.index: row.lists.allowed for row in rows if row.lists is not None}
        rules = [(index, -1 - mask_index) for mask_index, index in enumerate(row_masks)]
        masks = torch.stack([mask for mask in row_masks.values() if mask is not None])
        if logits.is_cuda:
            kernel = import_module("aioengine.kernels.triton.grammar_mask")
            kernel.mask(logits, upload(np.array(rules, dtype=np.int32)), masks)
        else:
            mask_on_cpu(logits, rules, masks.numpy())


PLUGIN = AllowedTokenIds
