"""/v1/embeddings: vectors of texts."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Literal

from aioengine.openai.bodies import Body, prompt_arguments, read_fields
from aioengine.openai.replies import json_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from aioengine.api.answers import Embedding, Ranking
    from aioengine.openai.http_call import HttpCall


class EmbeddingBody(Body, kw_only=True):
    """The fields of /v1/embeddings.

    Attributes:
        input: a text or token ids, or a list of either.
        truncate, normalize, prompt_name: as for ``async_encode``.
    """

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate: bool = False
    normalize: bool | None = None
    prompt_name: str | None = None


async def embeddings(call: HttpCall) -> Response:
    """Answer a request to /v1/embeddings."""
    body = read_fields(call.body, EmbeddingBody)
    name, adapter = await call.model.find(body.model)
    generation = call.model.engine.async_encode(
        **prompt_arguments(body.input),
        dimensions=body.dimensions,
        truncate=body.truncate,
        normalize=body.normalize,
        prompt_name=body.prompt_name,
        **call.options(adapter),
    )
    rows: list[Embedding] = await call.rows(generation)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(row, body.encoding_format)}
        for index, row in enumerate(rows)
    ]
    return json_response({"object": "list", "data": data, "model": name, "usage": prompt_usage(rows)})


def _written(row: Embedding, encoding_format: str) -> str | list[float]:
    vector = row["embedding"]
    if encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def prompt_usage(rows: Sequence[Embedding | Ranking]) -> dict[str, int]:
    """Return the usage of calls that generate nothing."""
    num_tokens = sum(row["meta_info"]["prompt_tokens"] for row in rows)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
