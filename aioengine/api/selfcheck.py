"""``selfcheck``: compute the last finished requests again, and compare their tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from aioengine.api import checks
from aioengine.api.answers import Answer
from aioengine.errors import RequestError
from aioengine.frontend.calls.finished import SELFCHECK_SALT, RecordedRequest
from aioengine.frontend.frontend import Frontend
from aioengine.supervision.ledger import NUM_FINISHED


class TokenDifference(NamedTuple):
    """The first token of a request that differs when the request is computed again.

    ``position``: its index in ``output_ids``. ``token_ids``: the tokens of the old and the new output; None: that
    output is shorter.
    """

    rid: str
    position: int
    token_ids: tuple[int | None, int | None]


async def selfcheck(self: Any, num_requests: int = 8) -> list[TokenDifference]:
    """Compute the last ``num_requests`` finished requests again, and return the differences.

    The list should be empty on a CPU, and on a GPU with ``enable_deterministic_inference=True``: output then depends
    neither on other requests nor on cached prefixes. Otherwise, a token sometimes differs because of rounding. The same
    holds for models in transformers' code. The requests are computed one after the other, without prefix hits. Other
    requests continue; for a comparison without them, call it when the engine is idle.

    The engine remembers up to 32 requests. It skips aborted and failed requests, and requests with images or
    embeddings. It skips prompts and outputs of more than 16,384 tokens, and requests whose weights or adapter are not
    loaded any more.

    Raises:
        TypeError, ValueError: ``num_requests`` is wrong.
        Exception: the errors of ``async_generate``.
    """
    num_requests = checks.whole("num_requests", num_requests, 1, NUM_FINISHED)
    frontend: Frontend = self._frontend_here()
    differences: list[TokenDifference] = []
    for request in list(frontend.calls.finished)[-num_requests:]:
        is_loaded = request.adapter is None or frontend.adapters.is_loaded(request.adapter)
        if not is_loaded or request.weight_version != frontend.weights.loaded.version:
            continue
        difference = _first_difference(request.output_ids, await _compute_again(self, request))
        if difference is not None:
            differences.append(TokenDifference(request.rid, *difference))
    return differences


async def _compute_again(engine: Any, request: RecordedRequest) -> list[int]:
    """Compute a request again, and return its output ids. Raises RequestError if it was aborted."""
    again = cast(
        "Answer",
        await engine.async_generate(
            input_ids=request.prompt_token_ids,
            sampling_params=replace(request.params, n=1, sampling_seed=request.seed),
            cache_salt=SELFCHECK_SALT + os.urandom(16).hex(),
            lora_path=None if request.adapter is None else request.adapter.name,
            custom_logit_processor=request.processor or None,
        ),
    )
    reason = again["meta_info"]["finish_reason"]
    if reason not in ("stop", "length"):
        raise RequestError("engine", f"the request {request.rid!r} ended with reason {reason} when computed again")
    return again["output_ids"]


def _first_difference(old: Sequence[int], new: Sequence[int]) -> tuple[int, tuple[int | None, int | None]] | None:
    """Return the index of the first difference, and both ids there."""
    pairs = enumerate(zip_longest(old, new))
    return next(((position, ids) for position, ids in pairs if ids[0] != ids[1]), None)
