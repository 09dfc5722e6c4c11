"""Vectors and scores of engines equal those of transformers with the rules of sentence-transformers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from aioengine import Engine, RequestError, RequestTooLargeError
from tests.kit.embedders import MAX_TOKENS, PROMPTS, Reference, write_cross_encoder, write_embedder
from tests.kit.waiting import until

TEXTS = ["the cat sat on the mat", "a dog ran", "?", "", "Very HOT sun . " * 4, "moon"]
LONG = "the cat sat on the mat . " * 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"embedder": write_embedder(root / "embedder"), "reranker": write_cross_encoder(root / "reranker")}


@pytest.fixture(scope="module")
def embedder(folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine(folders["embedder"], device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def reranker(folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine(folders["reranker"], device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Reference:
    return Reference(folders["embedder"])


def unit(vector: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def test_vectors_equal_transformers(embedder: Engine, reference: Reference) -> None:
    outs = embedder.encode(TEXTS)
    assert [vector.dtype for vector in outs["embedding"]] == [np.float32] * len(TEXTS)
    for text, out in zip(TEXTS, outs, strict=True):
        np.testing.assert_allclose(out["embedding"], unit(reference.vector(text)), atol=1e-5)
        assert out["meta_info"]["finish_reason"] == "stop"
        assert out["meta_info"]["prompt_tokens"] == len(reference.tokenizer(text)["input_ids"])
    alone = embedder.encode(TEXTS[0])
    assert np.array_equal(alone["embedding"], outs[0]["embedding"])
    alone["embedding"][0] = 1.0  # the caller owns the vector


def test_prompts_may_be_ids(embedder: Engine, reference: Reference) -> None:
    ids = [reference.tokenizer(text)["input_ids"] for text in TEXTS]
    for by_text, by_ids in zip(embedder.encode(TEXTS), embedder.encode(input_ids=ids), strict=True):
        assert np.array_equal(by_text["embedding"], by_ids["embedding"])
    assert np.array_equal(
        embedder.encode(input_ids=ids[0] * 9, truncate=True)["embedding"],
        embedder.encode(input_ids=(ids[0] * 9)[:MAX_TOKENS])["embedding"],
    )


def test_ids_outside_the_vocabulary_are_refused_even_if_they_are_cut(embedder: Engine) -> None:
    for wrong in (10**6, -1):
        with pytest.raises(ValueError, match=f"input_ids has {wrong}, outside the vocabulary"):
            embedder.encode(input_ids=[wrong] * 5000, truncate=True)


def test_dimensions_norm_and_prompts(embedder: Engine, reference: Reference) -> None:
    text = TEXTS[0]
    raw = embedder.encode(text, normalize=False)["embedding"]
    np.testing.assert_allclose(raw, reference.vector(text).numpy(), atol=1e-5)
    short = embedder.encode(text, dimensions=8)["embedding"]
    np.testing.assert_allclose(short, raw[:8] / np.linalg.norm(raw[:8]), atol=1e-6)
    prompted = embedder.encode(text, prompt_name="query")["embedding"]
    np.testing.assert_allclose(prompted, unit(reference.vector(PROMPTS["query"] + text)), atol=1e-5)
    assert np.array_equal(
        embedder.encode(text, prompt_name="document")["embedding"], embedder.encode(text)["embedding"]
    )


def test_long_texts_are_refused_or_cut(embedder: Engine, reference: Reference) -> None:
    with pytest.raises(RequestTooLargeError, match=f"at most {MAX_TOKENS} are allowed; truncate=True cuts its end"):
        embedder.encode(LONG)
    outs = embedder.encode([LONG, "a dog"], truncate=True)
    np.testing.assert_allclose(outs[0]["embedding"], unit(reference.vector(LONG)), atol=1e-5)
    assert outs["meta_info"]["prompt_tokens"] == [MAX_TOKENS, 4]
    huge = embedder.encode("the cat sat " * 1_000_000, truncate=True)["embedding"]
    np.testing.assert_allclose(huge, unit(reference.vector("the cat sat " * 20)), atol=1e-5)
    mixed = embedder.encode(["a cat", LONG, "a dog"], return_exceptions=True)
    assert [isinstance(entry, RequestTooLargeError) for entry in mixed] == [False, True, False]


def test_a_long_batch_keeps_its_order(embedder: Engine) -> None:
    texts = [f"the {'very ' * (i % 20)}hot {chr(97 + i % 26)}" for i in range(1500)]
    outs = embedder.encode(texts)
    few = embedder.encode(texts[700:710])
    assert len(outs) == len(texts)
    assert all(
        np.array_equal(actual, other)
        for actual, other in zip(outs["embedding"][700:710], few["embedding"], strict=True)
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.encode("a", dimensions=49), ValueError, "dimensions must be at most 48 .*got 49"),
        (lambda llm: llm.encode("a", prompt_name="x"), ValueError, "prompt_name 'x' .*'query', 'document'"),
        (lambda llm: llm.rerank("a", ["b"]), ValueError, "rerank needs a cross-encoder.*task 'embed'"),
        (lambda llm: llm.generate("a"), ValueError, "task 'embed'\\) does not generate; use encode"),
        (lambda llm: llm.encode(input_ids=[5, 10**6]), ValueError, "input_ids has 1000000, outside the vocabulary"),
    ],
)
def test_calls_that_the_model_does_not_support_are_refused(
    embedder: Engine, call: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(embedder)


def test_async_calls_return_vectors(embedder: Engine) -> None:
    async def main() -> list[int]:
        single, batch = await asyncio.gather(embedder.async_encode("a"), embedder.async_encode(["a", "b"]))
        assert np.array_equal(single["embedding"], batch[0]["embedding"])
        return [len(vector) for vector in batch["embedding"]]

    assert asyncio.run(main()) == [48, 48]
    assert embedder.get_model_info()["is_generation"] is False


def test_an_aborted_request_has_no_vector(embedder: Engine) -> None:
    async def main() -> None:
        call = embedder.async_encode(TEXTS * 200, rid="mine")
        embedder.abort_request("mine")
        await call

    with pytest.raises(RequestError, match="ended before its vector was computed"):
        asyncio.run(main())


def test_a_killed_scheduler_loses_no_text(embedder: Engine) -> None:
    texts = [f"the cat {'very ' * (i % 20)}hot" for i in range(600)]
    expected = embedder.encode(texts)["embedding"]

    async def main() -> list[np.ndarray]:
        scheduler = next(process for process in embedder.health()["processes"] if process["role"] == "scheduler")
        first = asyncio.ensure_future(embedder.async_encode(texts))
        await until(lambda: embedder.stats()["num_streams"])
        os.kill(scheduler["pid"], signal.SIGSTOP)  # so that the second call is unfinished when the scheduler dies
        second = asyncio.ensure_future(embedder.async_encode(texts))
        await asyncio.sleep(0.05)
        os.kill(scheduler["pid"], signal.SIGKILL)
        return [*(await first)["embedding"], *(await second)["embedding"]]

    outputs = asyncio.run(main())
    assert embedder.stats()["num_restarts"] == 1
    assert all(np.array_equal(actual, other) for actual, other in zip(outputs, [*expected, *expected], strict=True))


DOCUMENTS = ["the cat sat on the mat", "moon", "a very cold road . " * 3, "where is the sun ?"]


def test_scores_equal_a_cross_encoder(reranker: Engine, folders: dict[str, Path]) -> None:
    reference = Reference(folders["reranker"])
    query = "what is on the mat ?"
    expected = [reference.score(query, document) for document in DOCUMENTS]
    pairs = reranker.rerank([[query, document] for document in DOCUMENTS])
    assert pairs["index"] == [0, 1, 2, 3]
    np.testing.assert_allclose(pairs["score"], expected, atol=1e-5)
    ranked = reranker.rerank(query, DOCUMENTS)
    assert ranked["index"] == sorted(range(4), key=lambda i: -expected[i])
    assert ranked["score"] == sorted(pairs["score"], reverse=True)
    assert reranker.rerank(query, DOCUMENTS, top_n=2)["index"] == ranked["index"][:2]
    logit = reranker.encode("the cat")["embedding"]
    assert logit.shape == (1,)


def test_score_of_a_classifier_is_its_logit(reranker: Engine, folders: dict[str, Path]) -> None:
    reference = Reference(folders["reranker"])
    actual = reranker.score("the cat ", ["sat", "ran"])
    for row, text in zip(actual, ["the cat sat", "the cat ran"], strict=True):
        logits = reference.model(**reference.tokenizer(text, return_tensors="pt")).logits
        assert row == pytest.approx(logits[0].tolist(), abs=1e-5)


@pytest.mark.parametrize(("query", "document"), [("the cat " * 30, "a dog"), ("a dog", LONG), (LONG, LONG)])
def test_of_a_long_pair_the_longer_text_is_cut_first(
    query: str, document: str, reranker: Engine, folders: dict[str, Path]
) -> None:
    reference = Reference(folders["reranker"])
    with pytest.raises(RequestTooLargeError, match="the pair of texts has"):
        reranker.rerank(query, [document])
    [actual] = reranker.rerank(query, [document], truncate=True)
    assert actual["score"] == pytest.approx(reference.score(query, document), abs=1e-5)
    assert actual["meta_info"]["prompt_tokens"] == 64


def test_failed_pair_is_ranked_last(reranker: Engine) -> None:
    ranked = reranker.rerank("a cat", ["moon", LONG, "sun"], return_exceptions=True)
    assert isinstance(ranked[2], RequestTooLargeError)
    assert sorted(ranked["index"][:2]) == [0, 2]
