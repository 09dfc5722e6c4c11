"""/rerank and /score with a cross-encoder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioengine import AsyncEngine
from tests.kit.embedders import write_cross_encoder
from tests.openai_api.serving import Served, served

pytestmark = pytest.mark.process

QUERY = "the cat"
DOCUMENTS = ["a dog ran", "the cat sat on the mat", "moon"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(AsyncEngine(write_cross_encoder(tmp_path_factory.mktemp("reranker")), device="cpu")) as running:
        yield running


def test_documents_are_ranked_best_first(server: Served) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    results = server.post("/v1/rerank", body).json()["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[result["index"]] for result in results]
    assert server.post("/rerank", body | {"top_n": 1}).json()["results"] == results[:1]
    pairs = server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    assert {entry["index"]: entry["score"] for entry in pairs} == {
        result["index"]: pytest.approx(result["relevance_score"]) for result in results
    }


def test_texts_of_different_number_are_refused(server: Served) -> None:
    response = server.post("/score", {"text_1": ["a", "b"], "text_2": DOCUMENTS})
    assert response.status_code == 400
    assert "text_1 has 2 texts and text_2 has 3" in response.json()["error"]["message"]
    assert server.post("/score", {"text_1": "a"}).status_code == 400


def test_chat_with_an_encoder_is_refused(server: Served) -> None:
    response = server.post("/v1/completions", {"prompt": "Hi"})
    assert response.status_code == 400
