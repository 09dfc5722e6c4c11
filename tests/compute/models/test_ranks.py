"""Ranks compute the logits and greedy tokens of one rank, in fp32."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine import models, plugins
from aioengine.families._ranks import part_of, rank_counts
from aioengine.layers.layer import Shard
from aioengine.runner import weights
from aioengine.settings.memory_model import weights_bytes
from tests.compute.models.test_expert_families import CASES as EXPERTS
from tests.compute.models.test_expert_families import SIZES as EXPERT_SIZES
from tests.compute.models.test_expert_families import save_mxfp4
from tests.compute.models.test_hybrids import make_config, make_granite, make_lfm2, make_newer
from tests.compute.models.test_latent_families import CASES as LATENT
from tests.compute.models.test_latent_families import SIZES as LATENT_SIZES
from tests.compute.rank_threads import rank_threads
from tests.compute.stepping import Stepper, options
from tests.kit.decoders import ONE_OF_EACH, config_of, random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

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


def check_ranks(threads: RankThreads, theirs: PreTrainedModel, folder: Path | None = None) -> None:
    """Check that ranks have the parts of a random model of transformers, and return its logits.

    folder: where the model is saved, to read the parts from the files.
    """
    config = theirs.config
    tensors: dict[str, Tensor] = theirs.state_dict()
    raw = {**config.to_dict(), "architectures": [type(theirs).__name__]}
    if folder is not None:
        raw = json.loads((folder / "config.json").read_text())
    token_ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,)).tolist()
    expected = theirs(torch.tensor([token_ids])).logits[0]

    def model_of(shard: Shard) -> Model:
        model = models.build(raw, replace(options(max_positions=64), shard=shard))
        if folder is not None:
            weights.load(model, folder, load_format="auto", seed=0, report=lambda *_: None)
            return model
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
    check_ranks(two_ranks, random_model(config_of(case)))


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "gpt2",
        "cohere head norms",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmo2", "falcon", "phi3")),
    ],
)
def test_four_ranks_return_the_logits_of_one(four_ranks: RankThreads, case: str) -> None:
    """There are fewer KV heads than ranks, and the ranks have different numbers of token ids."""
    check_ranks(four_ranks, random_model(config_of(case, num_attention_heads=8, vocab_size=97)))


@pytest.mark.parametrize(
    ("config_type", "fields"),
    [
        *(
            pytest.param(EXPERTS[name][0], {**EXPERT_SIZES, **EXPERTS[name][1]}, id=name)
            for name in ("mixtral", "qwen2_moe some layers", "qwen3_moe some layers", "olmoe", "gpt_oss", "granitemoe")
        ),
        *(
            pytest.param(LATENT[name][0], {**LATENT_SIZES, **LATENT[name][1]}, id=name)
            for name in ("youtu", "minicpm3", "deepseek_v2")
        ),
    ],
)
def test_two_ranks_divide_experts_and_latent_attention(
    two_ranks: RankThreads, config_type: type[PreTrainedConfig], fields: dict[str, object], tmp_path: Path
) -> None:
    """Each rank has a part of each expert, and the complete latent attention."""
    theirs = random_model(config_type(**fields))
    theirs.save_pretrained(tmp_path)
    check_ranks(two_ranks, theirs, tmp_path)


def test_two_ranks_have_a_part_of_each_mxfp4_expert(two_ranks: RankThreads, tmp_path: Path) -> None:
    check_ranks(two_ranks, save_mxfp4(tmp_path, intermediate_size=64), tmp_path)


@pytest.mark.parametrize("make", [make_config, make_newer, make_lfm2, make_granite])
def test_ranks_have_whole_layers_with_states(
    two_ranks: RankThreads, make: Callable[[], PreTrainedConfig], tmp_path: Path
) -> None:
    theirs = random_model(make())
    theirs.save_pretrained(tmp_path)
    check_ranks(two_ranks, theirs, tmp_path)


def test_plans_count_the_weights_of_a_rank() -> None:
    configs = [config_of(case) for case in ("llama", "qwen2 tied", "gpt2", "falcon 40b", "gptj")]
    for case in ("mixtral", "qwen2_moe some layers", "gpt_oss"):
        config_type, changes = EXPERTS[case]
        configs.append(config_type(**{**EXPERT_SIZES, **changes}))
    config_type, changes = LATENT["deepseek_v2"]
    configs += [config_type(**{**LATENT_SIZES, **changes}), make_config(), make_lfm2()]
    for config in configs:
        raw = config.to_dict()
        family = plugins.load("families", plugins.file_name(config.model_type)).read(raw)
        placed = replace(options(), device=torch.device("meta"), shard=Shard(0, 2))
        num_bytes = sum(target.num_bytes for target in models.build(raw, placed).weights().values())
        assert weights_bytes(part_of(family, 2), 4) == num_bytes, config.model_type
        assert 2 in rank_counts(family)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 2]),
        ({"num_attention_heads": 8, "intermediate_size": 96}, [1, 2, 4, 8]),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96}, [1, 3, 6, 12]),
    ],
)
def test_ranks_divide_heads_and_mlps_evenly(changes: dict[str, int], expected: list[int]) -> None:
    config = config_of("llama", **changes)
    family = plugins.load("families", "llama").read(config.to_dict())
    assert rank_counts(family) == expected
    for num_ranks in (2, 3, 4):
        if num_ranks not in expected:
            with pytest.raises(ValueError, match="cannot be divided evenly among"):
                models.build(config.to_dict(), replace(options(), shard=Shard(0, num_ranks)))
