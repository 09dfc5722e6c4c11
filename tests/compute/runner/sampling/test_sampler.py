"""The token of a row does not depend on other rows, and has the requested distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioengine.protocol.messages import Sampling
from aioengine.runner import logits as logits_processors
from aioengine.runner.page_tables import PageTables
from aioengine.runner.request_row import SampledRows
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED, Sampler, greedy
from aioengine.scheduler.plan import NewRow


@pytest.fixture(autouse=True)
def one_thread(few_threads: None) -> None:
    """Use one thread. On a busy machine, two threads mostly wait for each other."""
    torch.set_num_threads(1)


CPU = torch.device("cpu")
NUM_EMBEDDINGS = 10_240
VOCAB_SIZE = 10_100


def make(
    samplings: list[Sampling], prompts: list[list[int]] | None = None, *, width: int, padding: int
) -> tuple[Sampler, SampledRows]:
    processors = logits_processors.in_order()
    table = RowTable(
        page_tables=PageTables(max_rows=max(len(samplings), 1), max_row_pages=4),
        num_embeddings=width,
        device=CPU,
        processors=processors,
        max_rows=max(len(samplings), 1),
    )
    prompts = prompts or [[1, 2, 3]] * len(samplings)
    for i, (sampling, prompt) in enumerate(zip(samplings, prompts, strict=True)):
        table.open(NewRow(i, sampling, 2, prompt))
    requests = [table.requests[i] for i in range(len(samplings))]
    positions = np.array([len(prompt) for prompt in prompts])
    rows = table.sampled(requests, np.array([request.row_index for request in requests]), positions)
    return Sampler(width - padding, table), rows


def sample(logits: torch.Tensor, samplings: list[Sampling], prompts: list[list[int]] | None = None) -> list[int]:
    width = logits.shape[-1]
    sampler, rows = make(samplings, prompts, width=width, padding=140 if width > 1000 else 0)
    with torch.inference_mode():
        return sampler.sample(logits, rows).tolist()


MIXTURE = [
    Sampling(1, temperature=0.0),
    Sampling(2),
    Sampling(3, temperature=0.3, top_p=0.9),
    Sampling(4, top_k=40),
    Sampling(5, top_k=300, top_p=0.95),
    Sampling(6, min_p=0.1),
    Sampling(7, temperature=2.0, top_p=0.99),
    Sampling(8, repetition_penalty=1.3, frequency_penalty=0.5),
    Sampling(9, temperature=0.0, presence_penalty=1.5),
    Sampling(10, temperature=0.0, bias_token_ids=(5, 6), logit_bias=(100.0, -3.0)),
    Sampling(11, min_new_tokens=9, suppressed_token_ids=(7, 8), top_k=5),
    Sampling(12, temperature=1e-6),
]


def random_logits(num_rows: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, NUM_EMBEDDINGS, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_mixed_batch_equal_the_same_rows_alone(dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    samplings = [sampling for sampling in MIXTURE for _ in range(4)]  # more rows than a chunk of the sampler
    logits = random_logits(len(samplings), dtype=dtype)
    prompts = [[i % 50, 3, 4, 3 + i] for i in range(len(samplings))]
    together = sample(logits, samplings, prompts)
    alone = [sample(logits[i : i + 1], samplings[i : i + 1], prompts[i : i + 1])[0] for i in range(len(samplings))]
    assert together == alone
    order = np.random.default_rng(0).permutation(len(samplings)).tolist()
    shuffled = sample(logits[order], [samplings[i] for i in order], [prompts[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_greedy_sampling_takes_the_first_of_equal_logits() -> None:
    logits = random_logits(40, dtype=torch.bfloat16)
    assert greedy(logits).tolist() == logits.float().argmax(-1).tolist()
    for width in (1, 31, 33, 1000):
        assert greedy(logits[:, :width]).tolist() == logits[:, :width].float().argmax(-1).tolist()
    assert sample(logits, [Sampling(0, temperature=0.0)] * 40) == logits[:, :VOCAB_SIZE].float().argmax(-1).tolist()


@pytest.mark.parametrize("sampling", MIXTURE)
def test_padding_of_the_vocabulary_is_never_sampled(sampling: Sampling) -> None:
    logits = random_logits(20)
    logits[:, VOCAB_SIZE:] = 50.0
    assert max(sample(logits, [sampling] * 20)) < VOCAB_SIZE


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"temperature": 1e-6}, {"top_k": 5, "top_p": 0.9}])
def test_one_of_the_tokens_is_drawn_if_all_are_suppressed(sampling: dict[str, float]) -> None:
    """Padding ids are not drawn: a tokenizer may have fewer tokens than the embedding, and all may be stop tokens."""
    logits = random_logits(2)[:, :1040]
    suppressing = Sampling(1, min_new_tokens=9, suppressed_token_ids=tuple(range(900)), **sampling)  # type: ignore[arg-type]
    assert all(0 <= token_id < 900 for token_id in sample(logits, [suppressing] * 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_logits_fail_only_their_row(value: float) -> None:
    logits = random_logits(2 * len(MIXTURE))
    samplings = [sampling for sampling in MIXTURE for _ in range(2)]
    expected = sample(logits, samplings)
    logits[1::2, 17] = value
    actual = sample(logits, samplings)
    assert actual[0::2] == expected[0::2]
    assert actual[1::2] == [FAILED] * len(MIXTURE)


def test_a_row_without_any_token_fails() -> None:
    logits = torch.full((2, NUM_EMBEDDINGS), -torch.inf)
    assert sample(logits, [Sampling(0), Sampling(0, temperature=0.0)]) == [FAILED, FAILED]


def test_token_depends_on_seed_and_position() -> None:
    logits = random_logits(1).repeat(64, 1)
    by_seed = sample(logits, [Sampling(seed) for seed in range(64)])
    assert len(set(by_seed)) > 8
    assert by_seed == sample(logits, [Sampling(seed) for seed in range(64)])
    by_position = sample(logits, [Sampling(5)] * 64, [[0] * (2 + i) for i in range(64)])
    assert len(set(by_position)) > 8
    assert sample(logits[:2], [Sampling(-1), Sampling(2**64 - 1)])[0] == sample(logits[:1], [Sampling(2**64 - 1)])[0]


CASES = [
    Sampling(0),
    Sampling(0, temperature=0.6),
    Sampling(0, top_p=0.8),
    Sampling(0, top_k=5),
    Sampling(0, min_p=0.2),
    Sampling(0, temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_distribution(case: Sampling) -> None:
    """Chi-square over 4,000 fixed seeds against the definition in float64."""
    num_draws, width, num_tokens = 4000, 128, 24
    logits = torch.full((1, width), -40.0)
    logits[0, :num_tokens] = torch.linspace(2.0, -1.0, num_tokens).roll(7)
    p = torch.softmax(logits[0].double() / case.temperature, -1)
    order = p.argsort(descending=True, stable=True)
    keep = torch.zeros_like(p, dtype=torch.bool)
    top = order[: case.top_k] if case.top_k > 0 else order
    before = p[top].cumsum(-1) - p[top]
    keep[top[before < case.top_p * p[top].sum()]] = True
    keep &= p >= case.min_p * p.max()
    expected = torch.where(keep, p, 0.0) / p[keep].sum() * num_draws

    samplings = [
        Sampling(seed, temperature=case.temperature, top_p=case.top_p, top_k=case.top_k, min_p=case.min_p)
        for seed in range(num_draws)
    ]
    counts = torch.bincount(torch.tensor(sample(logits.expand(num_draws, -1), samplings)), minlength=width)
    assert counts[expected < 1e-6].sum() == 0
    kept = expected >= 1e-6
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 4.5 * (2 * max(degrees, 1)) ** 0.5


def test_stop_tokens_are_not_sampled_before_min_new_tokens() -> None:
    logits = random_logits(3)
    logits[:, 7] = 60.0
    samplings = [Sampling(0, temperature=0.0, min_new_tokens=2, suppressed_token_ids=(7,))] * 3
    prompts = [[1, 2], [1, 2, 3], [1, 2, 3, 4]]  # two are the prompt: 0, 1 and 2 output tokens
    token_ids = sample(logits, samplings, prompts)
    assert token_ids[0] != 7
    assert token_ids[1] != 7
    assert token_ids[2] == 7


def test_bias_adds_to_the_logits() -> None:
    logits = torch.zeros(1, NUM_EMBEDDINGS)
    logits[0, 9] = 2.0
    biased = Sampling(0, temperature=0.0, bias_token_ids=(9, 30), logit_bias=(-1.0, 1.5))
    assert sample(logits, [biased]) == [30]
    assert sample(logits, [Sampling(0, temperature=0.0, bias_token_ids=(9,), logit_bias=(-1.0,))]) == [9]
