"""The arguments of ``encode`` and ``rerank``, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # for the annotations of the options
from functools import partial
from typing import Final, cast

from aioengine.api import checks
from aioengine.frontend.intake import requests
from aioengine.frontend.intake.pooling import Pooled
from aioengine.frontend.intake.prompts import ids_prompt, pair_prompt, pooled_prompt
from aioengine.frontend.intake.request_options import CommonOptions, ImageData
from aioengine.frontend.intake.requests import CallRequest

Pairs = list[list[str]] | list[tuple[str, str]] | tuple[tuple[str, str], ...]

PAIRS: Final = "a list of pairs [query, document]"
DOCUMENTS: Final = "a list of strings ([document] for a single one)"


class PlainPoolOptions(CommonOptions, total=False):
    """``PoolOptions`` without ``return_exceptions``, which changes the type of the result."""

    truncate: bool


class PoolOptions(PlainPoolOptions, total=False):
    """Keyword arguments of ``rerank``: the applicable ones of ``RequestOptions``, and

    truncate: cut the end of a text that exceeds the model's limit; special tokens stay. In a pair, the longer text is
        cut first. By default, such a text is an error.
    """

    return_exceptions: bool


class PlainEncodeOptions(PlainPoolOptions, total=False):
    """``EncodeOptions`` without ``return_exceptions``."""

    dimensions: int | None
    normalize: bool | None
    prompt_name: str | None
    image_data: ImageData | Sequence[ImageData | Sequence[ImageData] | None] | None


class EncodeOptions(PlainEncodeOptions, total=False):
    """Keyword arguments of ``encode``: ``PoolOptions``, and

    dimensions: cut the embedding to this length, then normalize it.
    normalize: whether to normalize embeddings to length 1; None: as the model's files specify.
    prompt_name: the model's prompt to put before each text ("query", "document"); None: its default prompt.
    image_data: images of the texts, for models that read images; as in ``RequestOptions``.
    """

    return_exceptions: bool


def encode_request(prompt: object, input_ids: object, options: Mapping[str, object]) -> CallRequest:
    """Check a call of ``encode``.

    Raises:
        TypeError, ValueError: an argument is wrong; the message has its name and value.
    """
    requests.check_names(options, ("prompt", "input_ids"), EncodeOptions.__annotations__)
    dimensions, normalize, name = (options.get(field) for field in ("dimensions", "normalize", "prompt_name"))
    pooled = Pooled(
        is_normalized=None if normalize is None else checks.switch("normalize", normalize),
        dimensions=None if dimensions is None else checks.whole("dimensions", dimensions, 1),
        truncates=checks.switch("truncate", options.get("truncate", False)),
        prompt_name=None if name is None else checks.text("prompt_name", name),
    )
    if input_ids is not None and pooled.prompt_name is not None:
        raise ValueError("prompt_name is for texts, and input_ids are given; put the prompt's ids before them")
    check = ids_prompt if prompt is None else partial(pooled_prompt, options=pooled)
    return _complete(requests.prompt_request(prompt, input_ids, check, options), pooled, options)


def rerank_request(query: object, documents: object, top_n: object, options: Mapping[str, object]) -> CallRequest:
    """Check a call of ``rerank``.

    Raises:
        TypeError, ValueError: an argument is wrong; the message has its name and value.
    """
    requests.check_names(options, ("query", "documents", "top_n"), PoolOptions.__annotations__)
    pooled = Pooled(
        is_normalized=False,
        truncates=checks.switch("truncate", options.get("truncate", False)),
        gives_scores=True,
        is_ranked=documents is not None,
        top_n=None if top_n is None else checks.whole("top_n", top_n, 1),
    )
    if documents is not None:
        text = checks.text("query", query)
        rows = checks.items("documents", documents, checks.MAX_COUNT, allowed=DOCUMENTS)
        request = CallRequest("documents", rows, partial(pair_prompt, options=pooled, query=text), is_batch=True)
    elif top_n is not None:
        raise ValueError("top_n is for a query with documents; pairs keep their order")
    elif isinstance(query, str):
        raise TypeError(f"rerank takes a query and documents, or {PAIRS}; documents is missing")
    else:
        pairs = checks.items("query", query, checks.MAX_COUNT, allowed=PAIRS)
        request = CallRequest(
            "query", cast("Sequence[object]", pairs), partial(pair_prompt, options=pooled), is_batch=True
        )
    return _complete(request, pooled, options)


def _complete(request: CallRequest, pooled: Pooled, options: Mapping[str, object]) -> CallRequest:
    request.pooled = pooled
    return requests.complete(request, None, stream=False, options=options)
