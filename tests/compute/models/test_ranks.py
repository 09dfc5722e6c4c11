"""Ranks compute the logits and greedy tokens of one rank, in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine import models
from tests.compute.rank_threads import rank_threads
from tests.compute.stepping import Stepper, options
from tests.kit.decoders import ONE_OF_EACH, config_of, random_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedConfig

    from aioengine.layers.placement import Shard
    from aioengine.models._base import Model
    from tests.compute.rank_threads import RankThreads

NUM_TOKENS = 16
OTHERS = [
    "llama biases",
    "llama one kv head",
    "qwen2 tied",
    "gemma2 no caps",
    "olmo2 yarn",
    "cohere head norms, one kv head",
    "stablelm side by side",
    "phi head norms",
    "gpt_neox one after the other",
    "falcon 40b",
    "falcon one after the other",
    "gpt_bigcode all heads",
]
"""Cases with other tensors or layouts than the first case of their family."""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankThreads]:
    with rank_threads(2) as threads:
        yield threads


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankThreads]:
    with rank_threads(4) as threads:
        yield threads


def check_ranks(threads: RankThreads, config: PreTrainedConfig) -> None:
    """The ranks have the parts of a random model of transformers, and return its logits."""
    theirs = random_model(config)
    tensors: dict[str, Tensor] = theirs.state_dict()
    raw = {**config.to_dict(), "architectures": [type(theirs).__name__]}
    token_ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,)).tolist()
    expected = theirs(torch.tensor([token_ids])).logits[0]

    def model_of(shard: Shard) -> Model:
        model = models.build(raw, replace(options(max_positions=64), shard=shard))
        for name, target in model.weights().items():
            target.write(tensors[name][target.index])
        model.finish_loading()
        return model

    ours = [model_of(shard) for shard in threads.shards]  # msgspec does not read configs in several threads
    results = threads.call(lambda rank: Stepper(ours[rank], page_size=4).run(token_ids, [7, 5, 3]))
    for logits in results:
        torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    for logits in threads.call(lambda rank: Stepper(ours[rank]).run(token_ids, [NUM_TOKENS])):
        assert torch.equal(logits, results[0])  # the bits do not depend on chunks and ranks


@pytest.mark.parametrize("case", [*ONE_OF_EACH.values(), *OTHERS])
def test_two_ranks_return_the_logits_of_one(two_ranks: RankThreads, case: str) -> None:
    check_ranks(two_ranks, config_of(case))


@pytest.mark.parametrize("case", ["llama", "olmo2", "gpt2", "falcon", "cohere head norms", "phi3"])
def test_four_ranks_return_the_logits_of_one(four_ranks: RankThreads, case: str) -> None:
    """There are fewer KV heads than ranks, and the ranks have different numbers of token ids."""
    check_ranks(four_ranks, config_of(case, num_attention_heads=8, vocab_size=97))
