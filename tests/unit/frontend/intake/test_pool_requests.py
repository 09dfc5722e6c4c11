"""Arguments of ``encode`` and ``rerank`` are accepted, or refused by name."""

from __future__ import annotations

from functools import partial

import pytest

from aioengine.frontend.intake.pool_requests import encode_request, rerank_request
from aioengine.frontend.intake.pooling import Pooled, completed
from aioengine.frontend.intake.prompts import PooledPrompt
from aioengine.settings.config import PoolingSettings
from tests.kit.settings import small_settings


def texts(request: object) -> list[tuple[str, str | None]]:
    prompts = [prompt for prompt in request.prompts if isinstance(prompt, PooledPrompt)]
    return [(prompt.first.text, None if prompt.second is None else prompt.second.text) for prompt in prompts]


def test_encode_accepts_a_text_or_a_list() -> None:
    single = encode_request("a text", None, {"dimensions": 3, "normalize": False, "truncate": True, "prompt_name": "q"})
    assert (single.is_batch, texts(single)) == (False, [("a text", None)])
    assert single.pooled == Pooled(is_normalized=False, dimensions=3, truncates=True, prompt_name="q")
    many = encode_request(["a", "", "é"], None, {})
    assert (many.is_batch, texts(many)) == (True, [("a", None), ("", None), ("é", None)])
    assert encode_request(None, [[1, 2], [3]], {}).num_prompts == 2


def test_rerank_accepts_a_query_with_documents_or_pairs() -> None:
    ranked = rerank_request("q", ["a", "b"], 1, {})
    assert texts(ranked) == [("q", "a"), ("q", "b")]
    assert ranked.pooled == Pooled(is_normalized=False, gives_scores=True, is_ranked=True, top_n=1)
    pairs = rerank_request([["q", "a"], ("r", "b")], None, None, {"truncate": True})
    assert texts(pairs) == [("q", "a"), ("r", "b")]
    assert pairs.pooled == Pooled(is_normalized=False, gives_scores=True, truncates=True)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None, None), {}, ValueError, "prompt and input_ids are both missing"),
        (("a", [1]), {}, ValueError, "both given"),
        ((5, None), {}, TypeError, "prompt must be"),
        ((["a", 5], None), {}, TypeError, r"prompt\[1\] must be a string"),
        (("a\ud800", None), {}, ValueError, "lone surrogate"),
        ((None, []), {}, ValueError, "input_ids is empty"),
        (("a", None), {"dimensions": 0}, ValueError, "dimensions .*got 0"),
        (("a", None), {"dimensions": "8"}, TypeError, "dimensions"),
        (("a", None), {"truncate": 1}, TypeError, "truncate"),
        (("a", None), {"normalize": "yes"}, TypeError, "normalize"),
        (("a", None), {"prompt_name": 3}, TypeError, "prompt_name"),
        ((None, [1]), {"prompt_name": "q"}, ValueError, "prompt_name is for texts"),
        (("a", None), {"dimension": 3}, TypeError, "did you mean 'dimensions'"),
        (("a", None), {"stream": True}, TypeError, "unexpected argument 'stream'"),
        (("a", None), {"audio_data": "x.wav"}, ValueError, "audio_data"),
        (("a", None), {"rid": ["x"]}, TypeError, "rid is a list"),
    ],
)
def test_encode_refuses_wrong_arguments(
    arguments: tuple[object, object], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        encode_request(*arguments, options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("q", None, None), TypeError, "documents is missing"),
        (("q", "a", None), TypeError, r"documents must be a list of strings \(\[document\] for a.* one\), got 'a'"),
        (([["q", "a"]], None, 1), ValueError, "top_n is for a query with documents"),
        (("q", ["a"], 0), ValueError, "top_n .*got 0"),
        (("q", [1], None), TypeError, r"documents\[0\] must be a string, got 1 of type int"),
        (([["q"]], None, None), ValueError, "a pair .query, document., got 1"),
        (([["q", "a", "b"]], None, None), ValueError, "a pair .query, document., got 3"),
        (([["q", 5]], None, None), TypeError, "must be a string"),
        ((5, ["a"], None), TypeError, "query must be a string"),
    ],
)
def test_rerank_refuses_wrong_arguments(
    arguments: tuple[object, object, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rerank_request(*arguments, {})


@pytest.mark.parametrize("name", ["temperature", "enable_thinking", "return_logprob"])
def test_error_for_arguments_of_other_calls_does_not_suggest_sampling_parameters(name: str) -> None:
    for make in (partial(encode_request, "a", None), partial(rerank_request, "a", ["b"], None)):
        with pytest.raises(TypeError, match=f"^unexpected argument '{name}'; allowed: .*truncate"):
            make({name: 1})


def test_wrong_rows_fail_alone() -> None:
    request = rerank_request([["q", "a"], ["q"], "q"], None, None, {"return_exceptions": True})
    assert [type(prompt) for prompt in request.prompts] == [PooledPrompt, ValueError, TypeError]


@pytest.mark.parametrize(
    ("pooled", "settings", "task", "message"),
    [
        (Pooled(gives_scores=True), PoolingSettings(), "generate", "rerank needs .* has the task 'generate'"),
        (Pooled(gives_scores=True), PoolingSettings(num_labels=3), "classify", "this model gives 3 scores"),
        (Pooled(dimensions=9), PoolingSettings(), "embed", "at most 8 with this model, got 9"),
        (Pooled(prompt_name="x"), PoolingSettings(), "embed", "'x' is not known; the model's prompts: none"),
    ],
)
def test_options_that_the_model_does_not_support_are_refused(
    pooled: Pooled, settings: PoolingSettings, task: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        completed(pooled, small_settings(pooling=settings, task=task, hidden_size=8).model)
    completed(Pooled(gives_scores=True), small_settings(pooling=PoolingSettings(num_labels=1), task="classify").model)
