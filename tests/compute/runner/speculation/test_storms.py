"""Random requests with and without drafts: the same tokens, ends, logprobs and hidden states, bit for bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from msgspec.structs import replace

from aioengine.constraints.grammars import Grammars
from aioengine.protocol.columns import DRAFTS
from aioengine.protocol.messages import (
    ALL_STATES,
    LAST_STATES,
    FinishCode,
    Limits,
    RequestKind,
    Sampling,
    Submit,
    TextRules,
)
from aioengine.protocol.packed_logprobs import LogprobRules
from tests.compute.rank_threads import ranked_world
from tests.compute.runner_world import World, make_settings, save_model, with_draft
from tests.kit.draft_heads import head_config, random_tensors, save_head, save_repeating, save_with_mtp
from tests.kit.drafts import save_with_draft
from tests.kit.grammar_walks import FOLDER, grammar_of
from tests.kit.integrity import check_scheduler
from tests.kit.processors import ADD
from tests.kit.tiny_sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.settings.config import Settings

FAMILIES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3"]
GRAMMARS = [
    grammar_of(
        json_schema={
            "type": "object",
            "properties": {
                "amounts": {"type": "array", "items": {"type": "integer"}, "maxItems": 9},
                "b": {"enum": ["x", "yyyyyyyyy", "yyyyyyyyzzz"]},
            },
            "required": ["amounts", "b"],
            "additionalProperties": False,
        }
    ),
    grammar_of(regex="([a-b]{3}-){3,30}!"),
    grammar_of(choice=["abcab", "abcabcabcabcabc", "c"]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in paths.items():
        save_model(family, path)
    folder = tmp_path_factory.mktemp("drafted")
    paths |= {"drafted": folder / "model", "equal": folder / "draft"}
    save_with_draft(save_model("llama", paths["drafted"]), paths["drafted"], paths["equal"])
    paths |= {name: folder / name for name in ("EAGLE3", "EAGLE", "MTP")}
    config = head_config(draft_vocab_size=200)
    save_head(paths["EAGLE3"], config, random_tensors(config, "EAGLE3"))
    save_head(paths["EAGLE"], head_config(), random_tensors(head_config(), "EAGLE"))
    paths["repeating"] = folder / "repeating"
    save_repeating(save_model("llama", paths["repeating"]), paths["repeating"], folder / "head", "EAGLE")
    save_with_mtp(save_model("deepseek_v3", paths["MTP"], num_hidden_layers=3), paths["MTP"])
    return paths


def settings_of(folder: Path, *, depth: int, num_pages: int, max_drafts: int, **changes: str) -> Settings:
    settings = make_settings(folder, depth=depth, num_pages=num_pages, chunk_tokens=64)
    kv_dtype = changes.pop("kv_dtype", None)
    return replace(
        settings,
        scheduler=replace(settings.scheduler, max_drafts=max_drafts, has_ngrams=True, max_running=16),
        memory=replace(settings.memory, kv_dtype=kv_dtype),
        runner=replace(settings.runner, logits_processors=(ADD,), **changes),
    )


def random_submit(rng: random.Random, uid: int) -> Submit:
    """Return a request with random options. Few tokens are allowed, so that its output repeats itself."""
    few = tuple(rng.sample(range(1, 20), rng.choice([2, 3, 5])))
    prompt = [rng.randrange(1, 30) for _ in range(rng.randrange(1, 30))] * rng.choice([1, 2, 3])
    stop_token_ids = rng.choice([(), (), few[:1], (rng.randrange(1, VOCAB_SIZE),)])
    min_new_tokens = rng.choice([0, 0, 5])
    sampling = Sampling(
        uid,
        temperature=rng.choice([0.0, 0.0, 0.2, 1.0]),
        top_p=rng.choice([1.0, 1.0, 0.7]),
        top_k=rng.choice([-1, -1, 4]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.4]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3]),
        bias_token_ids=rng.choice([(), (), few]),
        min_new_tokens=min_new_tokens,
        suppressed_token_ids=stop_token_ids if min_new_tokens else (),
        allowed_token_ids=rng.choice([(), few, few, few]),
        bad_token_ids=rng.choice([(), (), ((few[0], few[1]), (few[1], few[0], few[0]))]),
        custom_processor=rng.choice(["", "", "", ADD]),
        custom_params=b'{"token": 7, "bias": 3.0}',
        hidden_states=rng.choice(["", "", "", LAST_STATES, ALL_STATES]),
        grammar=rng.choice([None] * 8 + GRAMMARS),
    )
    if sampling.grammar is not None:
        sampling = replace(sampling, allowed_token_ids=(), bad_token_ids=(), custom_processor="")
    sampling = replace(sampling, logit_bias=(4.0,) * len(sampling.bias_token_ids))
    start = rng.choice([-1, 0, len(prompt) // 2])
    ids = rng.choice([(), (5, 6)])
    logprobs = rng.choice([None, None, None, LogprobRules(start=start, num_top=2, token_ids=ids)])
    limits = Limits(rng.randrange(1, 60), min_new_tokens, stop_token_ids)
    return Submit(uid, prompt, sampling, limits, TextRules(), rng.choice([0, 0, 1]), logprobs=logprobs)


class Storm(NamedTuple):
    """The results of a storm."""

    world: World
    cut: dict[int, FinishCode]

    def answer(self, uid: int) -> tuple[object, ...]:
        """Return all that a request has returned."""
        ended = self.world.ended[uid]
        extras = [(extra.kind, extra.index, extra.data) for extra in self.world.extras[uid] if extra.kind != DRAFTS]
        num_known = len(self.world.outputs[uid])
        return (
            self.world.outputs[uid],
            (ended.code, ended.matched, ended.message),
            sorted({extra for extra in extras if extra[1] < num_known or "prompt" in extra[0]}),
        )


def run(settings: Settings, submits: list[Submit], seed: int, num_ranks: int = 1) -> Storm:
    """Compute requests that come one by one, with preemptions and aborts at random times."""
    if num_ranks == 1:
        return run_in(World(settings), submits, seed)
    with ranked_world(settings, num_ranks) as world:
        return run_in(world, submits, seed)


def run_in(world: World, submits: list[Submit], seed: int) -> Storm:
    rng = random.Random(seed)
    world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
    waiting, cut = submits[::-1], dict[int, FinishCode]()
    while waiting or world.core.has_work:
        while waiting and rng.random() < 0.5:
            submit = waiting.pop()
            world.outputs[submit.uid], world.extras[submit.uid] = [], []
            world.core.requests.submit(submit)
        running = world.core.requests.running
        if running and rng.random() < 0.05:
            world.core.requests.preempt()
        if running and rng.random() < 0.02:
            uid = rng.choice(running).uid
            cut[uid] = FinishCode.ABORT
            world.core.requests.abort([uid], FinishCode.ABORT)
        world.step()
    check_scheduler(world.core.scheduler)
    world.runner.close()
    return Storm(world, cut)


def compare(plain: Storm, storm: Storm) -> int:
    """Compare all answers, up to the shorter one if a request was aborted. Return the number of compared tokens."""
    num_tokens = 0
    assert plain.world.ended.keys() == storm.world.ended.keys()
    for uid in plain.world.ended:
        ours, theirs = storm.world.outputs[uid], plain.world.outputs[uid]
        if uid in plain.cut or uid in storm.cut:
            shorter = min(len(ours), len(theirs))
            assert ours[:shorter] == theirs[:shorter]
        else:
            assert storm.answer(uid) == plain.answer(uid), uid
        num_tokens += len(ours)
    return num_tokens


CASES = [
    ("gemma3_text", 128, 7, 1, {"attention_backend": "fused"}),
    pytest.param("drafted", 64, 4, 1, {"draft": "equal"}, marks=pytest.mark.slow),
    pytest.param("MTP", 128, 4, 1, {"draft": "MTP"}, marks=pytest.mark.slow),
]
LAYERS = {"EAGLE3": (0, 1, 1), "EAGLE": (2,), "MTP": (2,)}
"""The layers whose inputs the draft heads read."""


@pytest.mark.parametrize(("family", "num_pages", "max_drafts", "depth", "changes"), CASES)
def test_answers_equal_the_answers_without_drafts(
    folders: dict[str, Path], family: str, num_pages: int, max_drafts: int, depth: int, changes: dict[str, str]
) -> None:
    check(folders, family, 24, num_pages, max_drafts, depth, changes)


@pytest.mark.parametrize(
    ("family", "num_pages", "max_drafts", "depth", "changes"),
    [
        ("llama", 64, 3, 0, {"logprobs_mode": "processed"}),
        pytest.param("drafted", 64, 4, 1, {"draft": "equal"}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 128, 7, 1, {"attention_backend": "fused"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 128, 3, 0, {"draft": "qwen3"}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 128, 7, 0, {}, marks=pytest.mark.slow),
    ],
)
def test_answers_of_two_ranks_equal_their_answers_without_drafts(
    folders: dict[str, Path], family: str, num_pages: int, max_drafts: int, depth: int, changes: dict[str, str]
) -> None:
    check(folders, family, 24, num_pages, max_drafts, depth, changes, num_ranks=2)


@pytest.mark.parametrize("draft", ["", "equal", "EAGLE3"])
def test_texts_are_encoded_in_steps_with_drafts(folders: dict[str, Path], draft: str) -> None:
    """Prompts that get a vector or a distribution are computed in steps with drafts."""
    settings = [settings_of(folders["drafted"], depth=0, num_pages=256, max_drafts=most) for most in (0, 3)]
    if draft:
        head = draft if draft in LAYERS else ""
        settings[1] = with_draft(settings[1], folders[draft], max_drafts=3, head=head, read_layers=LAYERS.get(head, ()))
    submits = [Submit(1, [1, 2, 3] * 5, Sampling(1, allowed_token_ids=(1, 2)), Limits(60), TextRules())]
    for uid, kind in enumerate([RequestKind.POOL, RequestKind.SCORE] * 8, start=2):
        score = LogprobRules(start=-1, num_top=0, token_ids=(5, 6)) if kind is RequestKind.SCORE else None
        submits.append(Submit(uid, [uid, *range(20)], Sampling(uid), Limits(1), TextRules(), kind=kind, logprobs=score))
    plain, storm = (run(case, submits, seed=3) for case in settings)
    compare(plain, storm)
    assert all(storm.world.extras[uid] for uid in range(2, 18) if uid not in storm.cut)
    assert storm.world.core.scheduler.stats(0.0).num_proposed_drafts > 0


MORE_CASES = [
    *CASES,
    ("llama", 64, 3, 0, {"logprobs_mode": "processed"}),
    ("drafted", 128, 3, 0, {"draft": "qwen3", "kv_dtype": "int8"}),
    ("llama", 128, 4, 1, {"draft": "EAGLE3"}),
    ("llama", 512, 15, 1, {"attention_backend": "fused"}),
    ("llama", 128, 7, 0, {"kv_dtype": "int8", "attention_backend": "fused"}),
    ("gpt_oss", 128, 7, 0, {"attention_backend": "fused"}),
    ("deepseek_v3", 128, 7, 0, {}),
    ("qwen3", 64, 3, 0, {"draft": "EAGLE", "kv_dtype": "int8"}),
    ("llama", 512, 7, 0, {"attention_backend": "fused"}),
    ("gemma3_text", 128, 1, 0, {}),
    ("drafted", 512, 7, 0, {"draft": "equal", "attention_backend": "fused"}),
    ("gemma3_text", 128, 7, 1, {"draft": "deepseek_v3"}),
    ("gemma3_text", 128, 7, 0, {"draft": "EAGLE3"}),
    ("gemma3_text", 64, 15, 1, {"kv_dtype": "int8", "logprobs_mode": "processed", "attention_backend": "fused"}),
    ("drafted", 128, 15, 0, {"draft": "equal", "kv_dtype": "int8", "logprobs_mode": "processed"}),
    ("gpt_oss", 64, 1, 0, {"draft": "llama", "attention_backend": "fused", "logprobs_mode": "processed"}),
    ("deepseek_v3", 512, 15, 1, {"draft": "gemma3_text"}),
]
"""Each proposer (n-grams, a draft model with the same logits, another one) is tested with each value of each option."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_pages", "max_drafts", "depth", "changes"), MORE_CASES)
def test_thousand_answers_equal_the_answers_without_drafts(
    folders: dict[str, Path], family: str, num_pages: int, max_drafts: int, depth: int, changes: dict[str, str]
) -> None:
    check(folders, family, 60, num_pages, max_drafts, depth, changes, seed=1)


def check(
    folders: dict[str, Path],
    family: str,
    num_requests: int,
    num_pages: int,
    max_drafts: int,
    depth: int,
    changes: dict[str, str],
    *,
    seed: int = 0,
    num_ranks: int = 1,
) -> None:
    rng = random.Random(seed)
    submits = [random_submit(rng, uid) for uid in range(num_requests)]
    changes = dict(changes)
    draft = changes.pop("draft", None)
    all_settings = [
        settings_of(folders[family], depth=depth, num_pages=num_pages, max_drafts=most, **changes)
        for most in (0, max_drafts)
    ]
    if draft is not None:
        head = draft if draft in LAYERS else ""
        all_settings[1] = with_draft(
            all_settings[1], folders[draft], max_drafts=max_drafts, head=head, read_layers=LAYERS.get(head, ())
        )
    plain, storm = (run(settings, submits, settings.scheduler.max_drafts, num_ranks) for settings in all_settings)
    compare(plain, storm)
    stats = storm.world.core.scheduler.stats(0.0)
    assert stats.num_accepted_drafts > 20
    assert stats.num_proposed_drafts > stats.num_accepted_drafts
