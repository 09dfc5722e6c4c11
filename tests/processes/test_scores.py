"""``score``: probabilities of labels after a query and its items, equal to a plain forward pass.

test_embedding_engine.py has the scores of classifiers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioengine import Engine, ScoreResult
from aioengine.model_files.model_folder import DEMO_MODEL

QUERY, ITEMS = "The capital of ", ["France is", "Norway is", "Egypt is"]


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(device="cpu", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def labels(llm: Engine) -> list[int]:
    return [llm.tokenizer.encode(f" {city}", add_special_tokens=False)[0] for city in ("Paris", "Oslo", "Cairo")]


@torch.inference_mode()
def logits_of(llm: Engine, texts: list[str]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    return [model(torch.tensor([llm.tokenizer.encode(text)])).logits[0, -1] for text in texts]


def test_scores_equal_a_plain_forward(llm: Engine, labels: list[int]) -> None:
    actual = llm.score(QUERY, ITEMS, labels, return_token_logprobs=True)
    assert isinstance(actual, ScoreResult)
    assert actual.scores == list(actual)
    logits = logits_of(llm, [QUERY + item for item in ITEMS])
    for row, logprobs, expected in zip(actual, actual.token_logprobs or [], logits, strict=True):
        wanted = expected.log_softmax(-1)[labels]
        assert logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
        assert row == pytest.approx(wanted.exp().tolist(), abs=1e-4)
    soft = llm.score(QUERY, ITEMS, labels, apply_softmax=True, temperature=2.0)
    for row, expected in zip(soft, logits, strict=True):
        assert row == pytest.approx((expected[labels] / 2).softmax(-1).tolist(), abs=1e-4)
        assert math.fsum(row) == pytest.approx(1.0)
    assert [row.index(max(row)) for row in actual] == [0, 1, 2]
    assert actual.prompt_tokens == sum(len(llm.tokenizer.encode(QUERY + item)) for item in ITEMS)


def test_items_may_be_ids_have_own_labels_or_come_first(llm: Engine, labels: list[int]) -> None:
    whole = [llm.tokenizer.encode(QUERY + item) for item in ITEMS]
    expected = llm.score(QUERY, ITEMS, labels)
    by_ids = llm.score(whole[0][:2], [ids[2:] if ids[:2] == whole[0][:2] else ids for ids in whole], labels)
    assert by_ids[0] == pytest.approx(expected[0], abs=1e-6)
    own = llm.score(QUERY, ITEMS, [[label] for label in labels])
    assert [row[0] for row in own] == pytest.approx([expected[i][i] for i in range(3)], abs=1e-6)
    turned = llm.score(" is", ["The capital of France"], labels, item_first=True)
    assert turned[0] == pytest.approx(llm.score("The capital of France", " is", labels)[0], abs=1e-6)
    assert llm.score(QUERY, [], labels) == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("q", None, [1]), {}, "items is missing"),
        (("q", ["a"], None), {}, "label_token_ids is missing"),
        (("q", ["a"], []), {}, "label_token_ids is empty"),
        (("q", ["a"], "invalid"), {}, "label_token_ids must be"),
        (("q", ["a"], [[1], [2]]), {}, "2 lists for 1 item;"),
        (("q", ["a"], [[]]), {}, r"label_token_ids\[0\] is empty"),
        (("q", ["a"], [3, 3]), {}, "has 3 twice"),
        (("q", ["a"], [True]), {}, "label_token_ids entries"),
        (
            ("q", ["a"], [" Rome"]),
            {},
            r"label_token_ids entries must be token ids, .*tokenizer\.encode\(' Rome', .*got",
        ),
        (("q", ["a"], [-1]), {}, "label_token_ids entries .*-1"),
        (("q", ["a"], [10**7]), {}, "label_token_ids entries .*10000000"),
        (([1, 2], ["a"], [1]), {}, r"items\[0\] is 'a' and query is \[1, 2\]; give all of them as texts"),
        (("q", [[1, 2]], [1]), {}, r"items\[0\] is \[1, 2\] and query is 'q'"),
        ((None, ["a", [1, 2]], [1]), {}, r"items\[1\] is \[1, 2\] and items\[0\] is 'a'"),
        ((5, ["a"], [1]), {}, "query must be a string or a list of token ids, got 5"),
        (("q", [None], [1]), {}, r"items\[0\] must be a string or a list of token ids, got None"),
        (("q", 5, [1]), {}, "items must be a string, or a list of strings or of lists of token ids, got 5"),
        (("", ["a", ""], [1]), {}, r"query and items\[1\] are both empty"),
        (([], [[]], [1]), {}, r"query and items\[0\] are both empty"),
        (("q", ["a"], [1]), {"temperature": 2.0}, "temperature 2 needs apply_softmax"),
        (("q", ["a"], [1]), {"temperature": 0.0, "apply_softmax": True}, "temperature"),
        (("q", ["a"], [1]), {"temperature": math.inf, "apply_softmax": True}, "temperature"),
        (("q", ["a"], [1]), {"item_first": 1}, "item_first"),
    ],
)
def test_wrong_arguments_of_score_are_refused_by_name(
    llm: Engine, arguments: tuple[object, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        llm.score(*arguments, **options)
