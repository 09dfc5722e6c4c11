"""Models with recurrent states match transformers, in fp32 with small random weights; requests in a runner."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from aioengine import plugins
from aioengine.constraints.grammars import Grammars
from aioengine.model_files.model_folder import find_facts
from aioengine.protocol.messages import Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.runner.device_memory import PoolBudget, fit_pool, kv_cache_of
from aioengine.scheduler.request import Gate
from aioengine.settings.config import EngineConfig, MemoryConfig, ModelConfig
from aioengine.settings.machine import DeviceFacts
from aioengine.settings.memory_model import PoolDemand, kv_cache, num_parameters, state_bytes
from aioengine.settings.page_groups import PageGroups
from aioengine.settings.planning import plan
from aioengine.settings.resolve import CPU_MEMORY_FRACTION, resolve
from tests.compute.models.test_expert_families import pair as saved_pair
from tests.compute.models.test_families import pair
from tests.compute.runner_world import World
from tests.compute.stepping import Request, Stepper
from tests.kit.grammar_walks import FOLDER, grammar_of
from tests.kit.hybrid_models import save_hybrid
from tests.kit.settings import small_settings
from tests.kit.tiny_sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedConfig

    from aioengine.settings.config import Settings

NUM_TOKENS = 70
GROUPS = PageGroups(windows=(None,), page_size=4)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 0,
}
WITHOUT_EXPERTS = {name: size for name, size in SIZES.items() if name != "num_experts"}
CASES: dict[str, dict[str, object]] = {
    "every fourth layer has attention": {},
    "other layers, filters and rotations": {
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_num_key_heads": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
}


def make_config(**changes: object) -> PreTrainedConfig:
    make: Callable[..., PreTrainedConfig] = Qwen3NextConfig
    return make(**{**SIZES, **changes})


def make_newer(**changes: object) -> PreTrainedConfig:
    """Return a config of Qwen3.5."""
    make: Callable[..., PreTrainedConfig] = Qwen3_5TextConfig
    return make(**{**WITHOUT_EXPERTS, **changes})


def make_lfm2(**changes: object) -> PreTrainedConfig:
    make: Callable[..., PreTrainedConfig] = Lfm2Config
    own = {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8, **changes}
    sizes = {name: size for name, size in WITHOUT_EXPERTS.items() if "linear" not in name}
    return make(**{**sizes, **own})


def make_granite(**changes: object) -> PreTrainedConfig:
    make: Callable[..., PreTrainedConfig] = GraniteMoeHybridConfig
    own = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
        **changes,
    }
    sizes = {name: size for name, size in WITHOUT_EXPERTS.items() if "linear" not in name and name != "head_dim"}
    return make(**{**sizes, **own})


OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_5_text": make_newer,
    "lfm2": make_lfm2,
    "granitemoehybrid": make_granite,
    "granitemoehybrid rotated": lambda: make_granite(
        position_embedding_type="rope",
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mlp_bias=True,  # transformers does not read it
        time_step_limit=(0.1, 0.9),
    ),
    "lfm2 biases": lambda: make_lfm2(conv_bias=True, block_auto_adjust_ff_dim=False, conv_L_cache=4),
}


WITH_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


EXPERTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: make_config(**WITH_EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_next some layers": lambda: make_config(
        **WITH_EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False
    ),
}


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    """For 24 seeds, the logits of both differed from transformers' in float64 by up to 1.1e-4, in the median 3e-5."""
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("case", EXPERTS)
def test_logits_of_hybrids_with_experts_match_transformers(case: str, tmp_path: Path) -> None:
    theirs, ours = saved_pair(EXPERTS[case](), tmp_path)
    token_ids = torch.randint(0, 96, (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    whole = Stepper(ours).run(token_ids.tolist(), [NUM_TOKENS])
    assert_same_logits(whole, expected)
    assert torch.equal(Stepper(ours).run(token_ids.tolist(), [7] * 10), whole)


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_logits_and_greedy_tokens_match_transformers(case: str) -> None:
    config = make_config(**CASES[case]) if case in CASES else OTHERS[case]()
    theirs, ours = pair(config, max_positions=128)
    token_ids = torch.randint(0, 96, (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    whole = Stepper(ours).run(token_ids.tolist(), [NUM_TOKENS])
    assert_same_logits(whole, expected)
    for page_size, chunks in ((16, [1] * 9), (4, [3] * 20), (1, [7] * 10)):
        logits = Stepper(ours, page_size=page_size).run(token_ids.tolist(), chunks)
        assert torch.equal(logits, whole), chunks


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_config_gives_sizes_of_weights_pages_and_states(case: str) -> None:
    config = make_config(**CASES[case]) if case in CASES else OTHERS[case]()
    read = plugins.load("families", config.model_type).read(config.to_dict() | {"architectures": ["AnyForCausalLM"]})
    _, model = pair(config, max_positions=128)
    model.open_for_loading()
    assert num_parameters(read) == sum(target.tensor.numel() for target in model.weights().values())
    assert kv_cache(read, 512) == kv_cache_of(model.attention_shape)
    assert model.state_shape is not None
    assert state_bytes(read, model.dtype.itemsize) == model.state_shape.num_bytes


def test_bits_do_not_depend_on_other_rows() -> None:
    _, ours = pair(make_config(), max_positions=128)
    texts = [torch.randint(0, 96, (count,)).tolist() for count in (30, 9, 1, 17)]
    alone = [Stepper(ours).run(text, [len(text)]) for text in texts]
    stepper = Stepper(ours)
    requests = [Request(text) for text in texts]
    while any(request.num_computed < len(request.token_ids) for request in requests):
        rows = [
            (request, min(4 + place, len(request.token_ids) - request.num_computed))
            for place, request in enumerate(requests)
        ]
        stepper.step([(request, count) for request, count in rows if count])
    for request, expected in zip(requests, alone, strict=True):
        assert torch.equal(torch.stack(request.logits), expected)


PROMPTS = [random.Random(i).choices(range(1, 96), k=length) for i, length in enumerate((1, 5, 19, 33, 64))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(make_config(), tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Return the greedy tokens of transformers for PROMPTS."""
    model = cast("Any", AutoModelForCausalLM.from_pretrained(folder))
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def make_settings(folder: Path, **changes: object) -> Settings:
    """Return settings for this model with snapshots at multiples of 16 tokens, and with ``changes``."""
    sizes = {"page_size": 4, "num_pages": 256, "max_running": 8, "chunk_tokens": 512, "vocab_size": 96, **changes}
    sizes = {"snapshot_tokens": 16, **sizes}
    return small_settings(path=str(folder), load_format="auto", context_length=128, **sizes)


def make_world(folder: Path, **changes: object) -> World:
    return World(make_settings(folder, **changes))


@pytest.mark.parametrize(
    ("page_size", "chunk_tokens", "depth", "max_running"), [(1, 9, 0, 8), (4, 512, 1, 3), (16, 32, 0, 2)]
)
def test_requests_share_a_runner_and_reuse_slots(
    page_size: int, chunk_tokens: int, depth: int, max_running: int, folder: Path, expected: list[list[int]]
) -> None:
    world = make_world(
        folder,
        page_size=page_size,
        num_pages=1024 // page_size,
        chunk_tokens=chunk_tokens,
        depth=depth,
        max_running=max_running,
    )
    assert world.answers(PROMPTS) == expected
    assert set(world.num_cached.values()) == {0}
    assert [world.answers([prompt])[0] for prompt in PROMPTS] == expected
    assert list(world.num_cached.values())[-2:] == [32, 48]


@pytest.mark.parametrize("make", [make_config, make_newer, make_lfm2, make_granite])
def test_prefix_hit_gives_same_bits(make: Callable[[], PreTrainedConfig], tmp_path: Path) -> None:
    folder = save_hybrid(make(), tmp_path)
    model = cast("Any", AutoModelForCausalLM.from_pretrained(folder))
    drawn = random.Random(1)
    history = drawn.choices(range(1, 96), k=20)
    cold = make_world(folder, prefix_cache=False)
    world = make_world(folder, depth=1)
    for turn in range(3):
        rules = LogprobRules(num_top=3, start=-1)
        alone, warm = (
            runner_world.submit(history, max_new_tokens=16, logprobs=rules) for runner_world in (cold, world)
        )
        cold.run()
        world.run()
        expected = model.generate(torch.tensor([history]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert world.outputs[warm] == cold.outputs[alone] == expected[0, len(history) :].tolist()
        assert [extra.data for extra in world.extras[warm]] == [extra.data for extra in cold.extras[alone]]
        assert world.num_cached[warm] == (0 if not turn else len(history) // 16 * 16 - 16 * (len(history) % 16 < 5))
        history += world.outputs[warm] + drawn.choices(range(1, 96), k=5)


def test_preempted_requests_continue_from_a_snapshot(folder: Path) -> None:
    expected = make_world(folder).answers(PROMPTS[2:], max_new_tokens=24)
    for depth in (0, 1):
        world = make_world(folder, num_pages=34, depth=depth)
        assert world.answers(PROMPTS[2:] * 2, max_new_tokens=24) == expected * 2
        assert world.num_preemptions > 0


def test_int8_keys_and_values_do_not_depend_on_snapshots(folder: Path) -> None:
    cold = make_world(folder, kv_dtype="int8", prefix_cache=False)
    alone = [cold.answers([prompt], max_new_tokens=40)[0] for prompt in PROMPTS[2:]]
    world = make_world(folder, kv_dtype="int8", num_pages=34, chunk_tokens=24)
    assert world.answers(PROMPTS[2:] * 2, max_new_tokens=40) == alone * 2
    assert world.num_preemptions > 0
    world = make_world(folder, kv_dtype="int8", chunk_tokens=24)
    for _ in range(2):
        assert world.answers(PROMPTS[2:], max_new_tokens=40) == alone
    assert any(world.num_cached.values())


def test_nonfinite_states_do_not_reach_the_next_request_of_a_slot(folder: Path, expected: list[list[int]]) -> None:
    world = make_world(folder)
    states = world.runner._inputs.states
    assert states is not None
    for tensor in states.tensors:
        tensor.fill_(torch.nan)
    assert world.answers(PROMPTS) == expected


def test_request_continues_after_its_output_tokens(folder: Path, expected: list[list[int]]) -> None:
    world = make_world(folder)
    again = world.answers([[*prompt, *answer[:5]] for prompt, answer in zip(PROMPTS, expected, strict=True)])
    assert [answer[:7] for answer in again] == [answer[5:] for answer in expected]


def test_number_of_states_limits_running_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolDemand, "state_limit", lambda demand, num_bytes: 3 * demand.state_bytes)
    world = make_world(folder)
    assert world.runner.facts["max_running_requests"] == 2


@pytest.mark.parametrize(("page_size", "expected"), [(16, 64), (1, 64), (64, 64), (128, 128)])
def test_snapshots_are_taken_at_page_boundaries(page_size: int, expected: int, folder: Path) -> None:
    facts = find_facts(ModelConfig(path=str(folder)))
    assert facts.keeps_states
    settings = resolve(
        EngineConfig(model=ModelConfig(tokenizer=False), memory=MemoryConfig(page_size=page_size)),
        facts,
        DeviceFacts(num_gpus=0, num_threads=1, drawn_seed=0, cpu_bfloat16=False),
    )
    assert settings.scheduler.prefix_cache
    assert settings.scheduler.snapshot_tokens == expected


@pytest.mark.parametrize("device_memory", [1 << 20, 2 << 20, 1 << 26])
def test_plan_and_runner_agree_on_states_and_snapshots(device_memory: int, folder: Path) -> None:
    planned = plan(folder, device="cpu", dtype="float32", device_memory=device_memory, page_size=4)
    slot_bytes, room = (
        planned.state_bytes_per_request,
        int((device_memory - planned.weights_bytes) * CPU_MEMORY_FRACTION),
    )
    demand = PoolDemand(
        num_tokens=None,
        groups=GROUPS,
        page_bytes=4 * planned.kv_bytes_per_token,
        context_length=planned.context_length,
        max_running=64,
        state_bytes=slot_bytes,
        has_snapshots=True,
    )
    pool = fit_pool(demand, PoolBudget(room, ""))
    assert pool.num_snapshots > 0
    assert planned.max_total_tokens == 4 * pool.num_pages


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_tokens_do_not_depend_on_concurrent_requests(folder: Path, depth: int) -> None:
    drawn = random.Random(depth)
    prompts = [drawn.choices(range(1, 96), k=drawn.choice((1, 2, 7, 20, 41))) for _ in range(9)]
    alone = make_world(folder)
    expected = [alone.answers([prompt], max_new_tokens=30)[0] for prompt in prompts]
    world = make_world(folder, num_pages=30, max_running=3, chunk_tokens=16, depth=depth)
    waiting, uids, aborted = list(prompts), list[int](), set[int]()
    while waiting or world.core.has_work:
        if waiting and drawn.random() < 0.8:
            uids.append(world.submit(waiting.pop(0), max_new_tokens=30))
        living = [uid for uid in uids if uid not in world.ended]
        if living and drawn.random() < 0.02:
            aborted.add(drawn.choice(living))
            world.core.requests.abort(aborted)
        if living and drawn.random() < 0.02:
            chosen = [drawn.choice(living)]
            world.core.requests.close_gate(chosen, Gate.SUSPENDED)
            world.step()
            world.core.requests.open_gate(chosen, Gate.SUSPENDED)
        world.step()
    assert world.num_preemptions > 0
    for uid, answer in zip(uids, expected, strict=True):
        actual = world.outputs[uid]
        assert actual == answer[: len(actual)]
        assert len(actual) == len(answer) or uid in aborted


def test_forced_tokens_are_not_computed_twice_with_a_step_in_flight(tmp_path: Path) -> None:
    folder = save_hybrid(make_config(vocab_size=VOCAB_SIZE), tmp_path)
    grammar = grammar_of(regex="(abcdabcd|dcba)[a-z]{10}")
    answers: list[list[list[int]]] = []
    num_steps: list[int] = []
    for depth, min_forced in ((0, 1_000_000), (0, 1), (1, 1), (1, 4), (2, 1)):
        world = make_world(folder, depth=depth, vocab_size=VOCAB_SIZE)
        world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
        world.runner._constrained.min_forced = min_forced
        samplings = [Sampling(index, temperature=1.0, grammar=grammar) for index in range(len(PROMPTS))]
        answers.append(world.answers(PROMPTS, samplings, max_new_tokens=20))
        num_steps.append(world.core.scheduler.stats(0.0).num_steps)
    assert answers[1:] == answers[:1] * 4
    assert max(num_steps[1:4]) < num_steps[0]


def test_published_qwen3_5_loads_text_model_without_tower(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
    text = {**make_newer().to_dict(), "vocab_size": 96}
    make: Callable[..., PreTrainedConfig] = Qwen3_5Config
    config = make(text_config=text, vision_config=vision, image_token_id=90, video_token_id=91)
    torch.manual_seed(3)
    theirs = cast("Any", AutoModelForImageTextToText.from_config(config)).eval()
    theirs.save_pretrained(tmp_path)
    assert find_facts(ModelConfig(path=str(tmp_path))).keeps_states
    expected = [
        theirs.generate(input_ids=torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS[:3]
    ]
    assert make_world(tmp_path).answers(PROMPTS[:3], max_new_tokens=8) == expected


def test_granite_4_with_attention_in_all_layers_has_no_states() -> None:
    config = make_granite(layer_types=["full_attention"] * 4, position_embedding_type="rope")
    theirs, ours = pair(config, max_positions=128)
    assert ours.state_shape is None
    token_ids = torch.randint(0, 96, (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(Stepper(ours).run(token_ids.tolist(), [9]), expected, atol=3e-5, rtol=1e-5)
    read = plugins.load("families", "granitemoehybrid").read
    assert read({**config.to_dict(), "mamba_n_heads": 7}) == read(config.to_dict())


@pytest.mark.parametrize("make", [make_newer, make_granite])
def test_unsupported_activations_are_refused_by_name(make: Callable[..., PreTrainedConfig]) -> None:
    config = make(hidden_act="gelu").to_dict()
    with pytest.raises(ValueError, match="hidden_act"):
        plugins.load("families", config["model_type"]).read(config)


def test_zero_size_is_refused_by_name() -> None:
    raw = {**make_lfm2().to_dict(), "block_ff_dim": 0}
    with pytest.raises(ValueError, match="block_ff_dim 0 is not implemented"):
        plugins.load("families", "lfm2").read(raw)
