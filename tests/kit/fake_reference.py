"""The correct output of ``FakeRunner``, without pages and steps."""

from __future__ import annotations

import zlib
from array import array

from aioengine.protocol.messages import Limits, Sampling
from aioengine.testing.fake_runner import FakeModel, NextToken, fake_vector


def reference_output(
    prompt_token_ids: list[int], sampling: Sampling, limits: Limits, model: FakeModel, *, adapter: int = 0
) -> list[int]:
    """Return the complete output of a request, by definition. adapter: its number; 0: none."""
    next_token = NextToken(model)
    token_ids = list(prompt_token_ids)
    while len(token_ids) < len(prompt_token_ids) + limits.max_new_tokens:
        checksum = zlib.crc32(array("q", [token_id + (adapter << 32) for token_id in token_ids]))
        token_ids.append(next_token(checksum, len(token_ids), len(prompt_token_ids), sampling))
        num_before = len(token_ids) - len(prompt_token_ids) - 1
        if token_ids[-1] in limits.stop_token_ids and num_before >= limits.min_new_tokens:
            break
    return token_ids[len(prompt_token_ids) :]


def reference_vector(prompt_token_ids: list[int]) -> bytes:
    """Return the vector of a pooled request, which depends on the checksum of its prompt."""
    return fake_vector(zlib.crc32(array("q", prompt_token_ids)))
