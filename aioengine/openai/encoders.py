"""/v1/embeddings, /rerank and /score: vectors of texts, and how well documents answer a query."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

from starlette.responses import Response

from aioengine.api.answers import Embedding, Ranking
from aioengine.openai.bodies import Body, prompt_arguments, read_fields
from aioengine.openai.http_call import HttpCall
from aioengine.openai.replies import CallError, json_response


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


class RerankBody(Body, kw_only=True):
    """The fields of /v1/rerank, as Cohere and Jina have them."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = False
    truncate: bool = False


class ScoreBody(Body, kw_only=True):
    """The fields of /v1/score.

    With a cross-encoder: ``text_1`` and ``text_2``, texts or lists of them. Otherwise ``query``, ``items`` and
    ``label_token_ids``, as for ``async_score``.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    truncate: bool = False
    query: str | list[int] | None = None
    items: str | list[str | int | list[int]] | None = None
    label_token_ids: list[int | list[int]] | None = None
    apply_softmax: bool = False
    item_first: bool = False


async def rerank(call: HttpCall) -> Response:
    """Answer a request to /v1/rerank: the documents, best first."""
    body = read_fields(call.body, RerankBody)
    name, adapter = await call.model.find(body.model)
    generation = call.model.engine.async_rerank(
        body.query, body.documents, top_n=body.top_n, truncate=body.truncate, **call.options(adapter)
    )
    rows: list[Ranking] = await call.rows(generation)
    results = [
        {"index": row["index"], "relevance_score": row["score"]}
        | ({"document": {"text": body.documents[row["index"]]}} if body.return_documents else {})
        for row in rows
    ]
    head = {"id": f"rerank-{uuid4().hex}", "model": name}
    return json_response({**head, "results": results, "usage": prompt_usage(rows)})


async def score(call: HttpCall) -> Response:
    """Answer a request to /v1/score: the score of each pair, or the probabilities of labels after each item."""
    body = read_fields(call.body, ScoreBody)
    name, adapter = await call.model.find(body.model)
    if body.items is not None:
        inputs: Any = body.query, body.items, body.label_token_ids
        options: Any = {"apply_softmax": body.apply_softmax, "item_first": body.item_first, "lora_path": adapter}
        result = await call.model.engine.async_score(*inputs, **options)
        usage = {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens}
        return json_response({"object": "scoring", "model": name, "scores": result.scores, "usage": usage})
    pairs = _pairs(body.text_1, body.text_2)
    generation = call.model.engine.async_rerank(pairs, truncate=body.truncate, **call.options(adapter))
    rows: list[Ranking] = await call.rows(generation)
    data = [{"object": "score", "index": row["index"], "score": row["score"]} for row in rows]
    return json_response({"object": "list", "model": name, "data": data, "usage": prompt_usage(rows)})


def _pairs(first: str | list[str] | None, second: str | list[str] | None) -> list[list[str]]:
    """Return pairs of texts. A single first text is paired with each second text. Raises CallError."""
    if first is None or second is None:
        raise CallError("give text_1 and text_2 (cross-encoders), or query, items and label_token_ids")
    firsts = [first] if isinstance(first, str) else first
    seconds = [second] if isinstance(second, str) else second
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise CallError(f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; give as many, or one text_1")
    return [list(pair) for pair in zip(firsts, seconds, strict=True)]
