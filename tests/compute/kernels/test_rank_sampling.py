"""Sampling by several ranks in Triton's interpreter: each rank samples the token of all logits."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_compiled, run_interpreted

SETUP = """
import torch

from aioengine.kernels.triton import rank_messages, sampling
from aioengine.kernels.triton.sampling import NUM_FIELDS, Draws, RankSampling, SamplingKernels

SIZE, VOCAB_SIZE, NUM_EMBEDDINGS, PART_SIZE, MAX_ROWS = 3, 9000, 9002, 3001, 4
CPU = torch.device("cpu")
torch.cuda.synchronize = lambda device: None
ranks = [RankSampling(rank, SIZE, max_rows=MAX_ROWS, num_embeddings=NUM_EMBEDDINGS, device=CPU) for rank in range(SIZE)]
for own in ranks:  # all in the memory of this process
    own.memory.addresses = torch.tensor([other.memory._own.data_ptr() for other in ranks])
options = {"max_rows": MAX_ROWS, "vocab_size": VOCAB_SIZE, "num_embeddings": NUM_EMBEDDINGS, "device": CPU}
whole = SamplingKernels(**options, num_parts=SIZE)
parts = [SamplingKernels(**options, num_parts=SIZE, ranks=own) for own in ranks]


def draws(seed, temperature, is_greedy):
    fields = torch.tensor([[seed], [0], [seed], [0], [is_greedy]], dtype=torch.int32)
    fields[3] = torch.tensor([1 / temperature]).view(torch.int32)
    return Draws(fields)
"""

SAMPLED = """
pick, owners = sampling._pick, []
for number in range(24):
    is_greedy = number % 3 == 0
    logits = torch.randn(1, NUM_EMBEDDINGS, generator=torch.Generator().manual_seed(number)).bfloat16() * 2
    if number == 9:
        logits[0, 5000] = torch.nan
    if number == 12:
        logits[0, [2999, 3500, 8999]] = 50.0  # the first of equal maxima
    index = torch.tensor([-1 if number == 10 else 2], dtype=torch.int32)
    settings = draws(number, 0.5 + number % 4, is_greedy)
    expected, found = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    tokens, expected_tokens = torch.full((4,), 7), torch.full((4,), 7)
    whole.sample(logits, settings, expected, (index, expected_tokens))
    of_ranks = [part.contiguous() for part in logits.split(PART_SIZE, 1)]
    owner = max(int(expected), 0) // PART_SIZE
    owners.append(owner)
    sampling._pick = lambda *_: None  # a program would wait for the blocks of the other ranks
    for kernels, part in zip(parts, of_ranks):
        kernels.sample(part, settings, found, (index, tokens))
    sampling._pick = pick
    for rank in sorted(range(SIZE), key=lambda rank: rank != owner):
        found.zero_()
        tokens.fill_(7)
        parts[rank].sample(of_ranks[rank], settings, found, (index, tokens))
        assert torch.equal(found, expected), (number, rank, found, expected)
        assert torch.equal(tokens, expected_tokens)
    assert (int(expected) == -1) == (number in (9, 10))
    assert all(int(own.counts[0]) == number + 1 for own in ranks)
assert set(owners) == {0, 1, 2}
"""

COMPILED = """
token = torch.zeros(1, dtype=torch.int64)
for kernels in (whole, parts[1]):
    kernels.sample(torch.zeros(1, PART_SIZE).bfloat16(), draws(0, 1.0, False), token, (token.int(), token))
"""


def test_all_ranks_sample_the_token_of_all_logits() -> None:
    run_interpreted(SETUP + SAMPLED)


@pytest.mark.slow
def test_sampling_compiles_for_hopper() -> None:
    run_compiled(SETUP + COMPILED)
