"""The last finished requests, which ``selfcheck`` computes again."""

from __future__ import annotations

from typing import Final, NamedTuple

from aioengine.api.params import SamplingParams
from aioengine.frontend.calls.call import CallRow
from aioengine.frontend.intake.prompts import EmbedsIds, MediaIds
from aioengine.protocol.messages import Adapter
from aioengine.supervision.ledger import MAX_FINISHED_TOKENS

SELFCHECK_SALT: Final = "selfcheck "
"""The beginning of ``cache_salt`` of requests that are computed again."""


class RecordedRequest(NamedTuple):
    """A finished request: everything that determines its output, and its output ids."""

    rid: str
    prompt_token_ids: list[int]
    output_ids: list[int]
    params: SamplingParams
    seed: int
    weight_version: str
    adapter: Adapter | None
    processor: str


def recorded_request(row: CallRow, output_ids: list[int]) -> RecordedRequest | None:
    """Return the record of an ended row with these ``output_ids``. None: it cannot be computed again.

    Files of images are deleted with their request, and embeddings need too much memory.
    """
    request, prompt_ids = row.call.request, row.prompt_token_ids
    version = row.info["weight_version"]
    if {*(row.versions or {}).values()} - {version}:  # the weights were replaced meanwhile
        return None
    if isinstance(prompt_ids, EmbedsIds | MediaIds) or len(prompt_ids) > MAX_FINISHED_TOKENS:
        return None
    prompt_index = row.prompt_index
    if request.salts is not None and request.salts.of(prompt_index).startswith(SELFCHECK_SALT):
        return None
    return RecordedRequest(
        row.info["id"],
        prompt_ids,
        output_ids,
        request.params_of(prompt_index),
        row.seed,
        version,
        None if request.adapters is None else request.adapters.of(prompt_index),
        "" if request.processors is None else request.processors.of(prompt_index),
    )
