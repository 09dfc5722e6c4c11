"""Compare LoRA adapters in the runner with weights merged by peft, on tiny random models in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from aioengine.model_files.adapter_folder import fingerprint
from aioengine.protocol.messages import Adapter, Sampling
from aioengine.protocol.packed_logprobs import LogprobDecoder, LogprobRules
from aioengine.runner.build import build
from aioengine.scheduler.plan import TOKENS, NewRow, Row, StepPlan
from aioengine.settings.config import LoraSettings
from tests.compute.models.test_hybrids import make_config
from tests.compute.rank_threads import ranked_world
from tests.compute.runner_world import make_settings, save_model
from tests.kit.adapters import change_tensors, merged, save_adapter
from tests.kit.decoders import config_of, random_model
from tests.kit.settings import small_settings
from tests.kit.vision_models import save_vision_model

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.runner.model_runner import ModelRunner
    from aioengine.runner.ticket import Ticket
    from aioengine.scheduler.runner import Runner
    from aioengine.settings.config import Settings

NUM_SLOTS, PAGE_SIZE = 3, 4
KINDS: dict[str, dict[str, object]] = {
    "all": {},
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 20, "use_rslora": True},
    "ranks": {"rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 17}, "alpha_pattern": {"o_proj": 3.0}},
}
PROMPTS = [[(7 * i + 3 * j) % 290 + 1 for j in range(3 + 5 * i)] for i in range(8)]


class Case(NamedTuple):
    """A model folder, its adapters, and the continuation of each prompt with weights merged by peft; 0: the base."""

    settings: Settings
    adapters: list[Path]
    expected: list[list[list[int]]]
    logits: list[list[torch.Tensor]]


def with_adapters(settings: Settings, *, max_rank: int = 20, modules: tuple[str, ...] = ()) -> Settings:
    lora = LoraSettings(num_slots=NUM_SLOTS, max_rank=max_rank, modules=modules)
    return msgspec.structs.replace(settings, runner=msgspec.structs.replace(settings.runner, lora=lora))


def adapter(path: Path, number: int = 1, *, fingerprint: str = "") -> Adapter:
    return Adapter(number, path.name, str(path), fingerprint)


def continued(model: torch.nn.Module, num_tokens: int = 6) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return the greedy continuation of each prompt, and the logits [V] of its first token."""
    outputs, logits = list[list[int]](), list[torch.Tensor]()
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(num_tokens):
            last = model(torch.tensor([ids])).logits[0, -1]
            if len(ids) == len(prompt):
                logits.append(last)
            ids.append(int(last.argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs, logits


def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int = 6) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.slow), "qwen3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder / "model")
    base = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    folders = [
        save_adapter(base, folder / name, seed=seed, **options) for seed, (name, options) in enumerate(KINDS.items())
    ]
    with torch.inference_mode():
        models = [base, *(merged(AutoModelForCausalLM.from_pretrained(folder / "model"), path) for path in folders)]
        results = [continued(model) for model in models]
    return Case(with_adapters(make_settings(folder / "model")), folders, *map(list, zip(*results, strict=True)))


def runner_with(case: Case) -> ModelRunner:
    """Build a runner with the adapters in slots 1 to 3."""
    runner = build(case.settings, lambda _: None)
    assert runner.adapters is not None
    assert runner.adapters.num_slots == NUM_SLOTS
    for slot, path in enumerate(case.adapters, 1):
        runner.adapters.place(slot, runner.adapters.read(adapter(path, slot))).result(timeout=60)
    return runner


def opened(uid: int, slot: int, prompt: list[int], sampling: Sampling | None = None) -> NewRow:
    pages = list(range(uid * 20, uid * 20 + 20))
    return NewRow(uid, sampling or Sampling(uid, temperature=0.0), len(prompt), prompt, pages, adapter_slot=slot)


def generate(runner: Runner[Ticket], rows: list[NewRow], *, chunk: int = 100, num_tokens: int = 6) -> list[list[int]]:
    """Compute all rows together, with prompts in chunks of up to ``chunk`` tokens."""
    outputs: dict[int, list[int]] = {row.uid: [] for row in rows}
    done = dict.fromkeys(outputs, 0)
    prompts = {row.uid: row.token_ids for row in rows}
    new = rows
    while any(len(tokens) < num_tokens for tokens in outputs.values()):
        planned: list[Row] = []
        for uid, start in done.items():
            if len(outputs[uid]) == num_tokens:
                continue
            part = prompts[uid][start : start + chunk]
            ends = start + len(part) >= len(prompts[uid])
            planned.append(Row(uid, start, max(len(part), 1), TOKENS if ends else 0, part))
            done[uid] += max(len(part), 1)
        result = runner.collect(runner.launch(StepPlan(planned, new)))
        assert not result.failed, result.failed
        for uid, token in zip(result.tokens.uid_of_each(), result.tokens.token_ids, strict=True):
            outputs[uid].append(token)
        new = []
    runner.launch(StepPlan([], closed=list(outputs)))
    return list(outputs.values())


def test_tokens_of_adapters_in_one_batch_equal_merged_weights(case: Case) -> None:
    runner = runner_with(case)
    slots = [i % (NUM_SLOTS + 1) for i in range(len(PROMPTS))]
    expected = [case.expected[slot][i] for i, slot in enumerate(slots)]
    assert len({tuple(case_of_slot[1]) for case_of_slot in case.expected}) == NUM_SLOTS + 1, (
        "the adapters change nothing"
    )
    rows = [opened(i, slot, prompt) for i, (slot, prompt) in enumerate(zip(slots, PROMPTS, strict=True))]
    assert generate(runner, rows) == expected
    assert generate(runner, rows, chunk=4) == expected
    for row, tokens in zip(rows[:5], expected, strict=False):
        assert generate(runner, [row]) == [tokens]


def test_logits_equal_merged_weights(case: Case) -> None:
    runner = runner_with(case)
    seen: list[torch.Tensor] = []
    compute_logits = runner._model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute_logits(hidden))
        return seen[-1]

    runner._model.compute_logits = watched  # type: ignore[method-assign]
    for slot in range(NUM_SLOTS + 1):
        rows = [opened(i, slot, prompt) for i, prompt in enumerate(PROMPTS)]
        generate(runner, rows, num_tokens=1)
        torch.testing.assert_close(seen[-1], torch.stack(case.logits[slot]), atol=1e-4, rtol=1e-4)
    alone = [*seen]
    slots = [i % (NUM_SLOTS + 1) for i in range(len(PROMPTS))]
    generate(runner, [opened(i, slot, PROMPTS[i]) for i, slot in enumerate(slots)], num_tokens=1)
    for i, slot in enumerate(slots):
        assert torch.equal(seen[-1][i], alone[slot][i]), "the bits depend on the batch"


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        *((case, 1) for case in ("gpt2", "gpt_neox", "glm4", "phi3", "qwen3_next", "falcon 40b")),
        *((case, 2) for case in ("gpt2", "qwen3_next", "llama one kv head")),
        *(pytest.param(case, 2, marks=pytest.mark.slow) for case in ("gpt_neox", "glm4", "phi3", "falcon 40b")),
    ],
)
def test_adapters_of_fused_and_reordered_layers_equal_merged_weights(case: str, num_ranks: int, tmp_path: Path) -> None:
    is_hybrid = case == "qwen3_next"
    base = random_model(make_config() if is_hybrid else config_of(case, max_position_embeddings=128))
    base.save_pretrained(tmp_path / "model")
    modules = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    path = save_adapter(base, tmp_path / "adapter", target_modules=modules if is_hybrid else "all-linear")
    settings = small_settings(path=str(tmp_path / "model"), load_format="auto", context_length=128, page_size=4)
    prompts = [[(7 * i + 3 * j) % 90 + 1 for j in range(3 + 5 * i)] for i in range(4)]
    with ranked_world(with_adapters(settings), num_ranks) as world:
        adapters = world.leading.adapters
        assert adapters is not None
        adapters.place(1, adapters.read(adapter(path, fingerprint=fingerprint(path)))).result(timeout=60)
        result = generate(world.leading, [opened(i, i % 2, prompt) for i, prompt in enumerate(prompts)])
    before = [greedy(base, prompt) for prompt in prompts]
    adapted = merged(base, path)
    after = [greedy(adapted, prompt) for prompt in prompts]
    assert result == [after[i] if i % 2 else before[i] for i in range(len(prompts))]
    assert before != after


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("one")
    save_model("llama", folder / "model")
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    return folder / "model", save_adapter(base, folder / "adapter")


def test_adapter_that_a_rank_cannot_read_is_refused_until_it_can(llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder, path = llama
    prompt = [5, 17, 42, 9, 88]
    with ranked_world(with_adapters(make_settings(folder)), 2) as world:
        adapters = world.leading.adapters
        assert adapters is not None
        copy = adapters.read(adapter(path, fingerprint=fingerprint(path)))
        path.rename(tmp_path / "moved")
        with pytest.raises(ValueError, match="removed or changed before all ranks read"):
            adapters.place(1, copy)
        before = generate(world.leading, [opened(1, 0, prompt)])
        (tmp_path / "moved").rename(path)
        adapters.place(1, copy).result(timeout=60)
        after = generate(world.leading, [opened(2, 1, prompt)])
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert before == [greedy(base, prompt)]
    assert after == [greedy(merged(base, path), prompt)]


def test_adapter_replaces_the_previous_one_in_its_slot(llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder, first = llama
    base = AutoModelForCausalLM.from_pretrained(folder)
    second = save_adapter(base, tmp_path / "second", seed=5, target_modules=["q_proj"], layers_to_transform=[1])
    runner = build(with_adapters(make_settings(folder)), lambda _: None)
    tokens: list[list[int]] = []
    for number, path in enumerate([first, second, first], 1):
        host = runner.adapters.read(adapter(path, number))
        assert host.num_bytes > 0
        runner.adapters.place(2, host).result(timeout=60)
        tokens += generate(runner, [opened(0, 2, PROMPTS[4])])
    assert tokens[0] == tokens[2] != tokens[1]
    with torch.inference_mode():
        expected, _ = continued(merged(base, second))
    assert tokens[1] == expected[4]


def test_logprobs_of_a_prompt_equal_merged_weights(llama: tuple[Path, Path]) -> None:
    folder, path = llama
    runner = build(with_adapters(make_settings(folder)), lambda _: None)
    runner.adapters.place(3, runner.adapters.read(adapter(path))).result(timeout=60)
    rules = LogprobRules(start=0)
    prompt = PROMPTS[6]
    row = msgspec.structs.replace(opened(0, 3, prompt), logprobs=rules)
    others = [opened(1, 0, PROMPTS[5]), opened(2, 3, PROMPTS[2])]
    plans = [
        StepPlan(
            [Row(0, 0, 20, 0, prompt[:20]), *(Row(request.uid, 0, 7, 0, request.token_ids[:7]) for request in others)],
            [row, *others],
        ),
        StepPlan([Row(0, 20, len(prompt) - 20, TOKENS, prompt[20:])]),
    ]
    decoder = LogprobDecoder(rules, len(prompt))
    for plan in plans:
        result = runner.collect(runner.launch(plan))
        for extra in result.tokens.extras:
            decoder.decode(extra)
    actual = cast("dict[str, list]", decoder.lists(0, 1, keeps=False))["input_token_logprobs"]
    with torch.inference_mode():
        logits = merged(AutoModelForCausalLM.from_pretrained(folder), path)(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    values = torch.tensor([value for value, *_ in actual[1:]])
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)


def test_preempted_request_continues_with_its_adapter_in_another_slot(llama: tuple[Path, Path]) -> None:
    folder, path = llama
    runner = build(with_adapters(make_settings(folder)), lambda _: None)
    host = runner.adapters.read(adapter(path))
    for slot in (1, 3):
        runner.adapters.place(slot, host).result(timeout=60)
    prompt = PROMPTS[3]
    (whole,) = generate(runner, [opened(0, 1, prompt)], num_tokens=6)
    (rest,) = generate(runner, [opened(0, 3, [*prompt, *whole[:3]])], num_tokens=3)
    assert rest == whole[3:]
    (of_base,) = generate(runner, [opened(0, 0, prompt)], num_tokens=6)
    assert of_base != whole


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_numbers_that_are_not_finite_are_refused(llama: tuple[Path, Path], tmp_path: Path, value: float) -> None:
    folder, _ = llama
    path = save_adapter(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    name = "layers.1.mlp.up_proj.lora_B.weight"
    wrong = torch.zeros(96, 4, dtype=torch.float64)
    wrong[5, 1] = value
    change_tensors(path, {name: wrong})
    runner = build(with_adapters(make_settings(folder)), lambda _: None)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.lora_B\.weight has numbers that are not finite"):
        runner.adapters.read(adapter(path))


def test_unreadable_adapters_are_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder, path = llama
    runner = build(with_adapters(make_settings(folder), max_rank=2, modules=("q_proj",)), lambda _: None)
    with pytest.raises(ValueError, match="rank 4, and max_lora_rank is 2"):
        runner.adapters.read(adapter(path))
    with pytest.raises(ValueError, match="missing' is no folder"):
        runner.adapters.read(adapter(tmp_path / "missing"))


def test_adapter_works_if_only_its_modules_may_change(llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = llama
    base = AutoModelForCausalLM.from_pretrained(folder)
    path = save_adapter(base, tmp_path, target_modules=["k_proj", "up_proj"])
    runner = build(with_adapters(make_settings(folder), modules=("k_proj", "up_proj")), lambda _: None)
    runner.adapters.place(1, runner.adapters.read(adapter(path))).result(timeout=60)
    with torch.inference_mode():
        expected, _ = continued(merged(base, path))
    assert generate(runner, [opened(i, 1, prompt) for i, prompt in enumerate(PROMPTS)]) == expected


def test_rows_without_adapter_are_the_same_with_and_without_slots(llama: tuple[Path, Path]) -> None:
    folder, _ = llama
    runner = build(with_adapters(make_settings(folder)), lambda _: None)
    rows = [opened(i, 0, prompt) for i, prompt in enumerate(PROMPTS)]
    assert generate(runner, rows) == generate(build(make_settings(folder), lambda _: None), rows)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl"])
def test_adapters_of_a_vision_model_change_its_text_model(model_type: str, tmp_path: Path) -> None:
    base = save_vision_model(model_type, tmp_path / "model")
    folder = save_adapter(base, tmp_path / "adapter", target_modules=r".*language_model.*\.(q_proj|o_proj|up_proj)")
    runner = build(with_adapters(make_settings(tmp_path / "model")), lambda _: None)
    runner.adapters.place(1, runner.adapters.read(adapter(folder))).result(timeout=60)
    results = [generate(runner, [opened(i, slot, prompt) for i, prompt in enumerate(PROMPTS)]) for slot in (0, 1)]
    with torch.inference_mode():
        expected = [continued(base)[0], continued(merged(base, folder))[0]]
    assert results == expected
    assert results[0] != results[1]
    towers = save_adapter(
        save_vision_model(model_type, tmp_path / "again"), tmp_path / "towers", target_modules="all-linear"
    )
    with pytest.raises(ValueError, match="the base model has no such layer for adapters"):
        runner.adapters.read(adapter(towers))
