"""Requests with grammars, processors, hidden states and embeddings on a GPU, in batches with plain rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from aioengine.constraints.grammars import Grammars
from aioengine.protocol.columns import HIDDEN_STATES, PROMPT_STATES
from aioengine.protocol.messages import ALL_STATES, LAST_STATES, FinishCode, Sampling
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.grammar_walks import FOLDER, grammar_of, text_of
from tests.kit.processors import ADD, BROKEN, FORCE, NAMES
from tests.kit.tiny_sizes import VOCAB_SIZE

HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
PROMPT = [(7 * i) % 290 + 1 for i in range(37)]
WAYS = pytest.mark.parametrize(("graphs", "depth"), [(0, 0), (16, 0), (16, 1)])


class Saved(NamedTuple):
    folder: Path
    theirs: torch.nn.Module

    def world(self, *, graphs: int, depth: int, chunk_tokens: int = 512) -> World:
        settings = make_settings(self.folder, dtype="float32", depth=depth, page_size=16, chunk_tokens=chunk_tokens)
        runner = msgspec.structs.replace(
            settings.runner,
            device="cuda",
            attention_backend="triton",
            cuda_graph_max_rows=graphs,
            logits_processors=tuple(NAMES),
        )
        return World(msgspec.structs.replace(settings, runner=runner))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen3", folder, **HEADS)
    return Saved(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval())


def custom(name: str, **params: object) -> Sampling:
    return Sampling(1, custom_processor=name, custom_params=json.dumps(params).encode())


@WAYS
def test_outputs_fit_their_grammars(saved: Saved, graphs: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.constraints.grammars._MIN_IN_BACKGROUND", 2)
    world = saved.world(graphs=graphs, depth=depth)
    world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
    plain = world.submit(PROMPT, Sampling(3, temperature=1.0))
    samplings = [Sampling(seed, temperature=1.0, grammar=grammar_of(regex="[a-d]{3,9}!")) for seed in range(4)]
    constrained = [world.submit(PROMPT, sampling, max_new_tokens=30) for sampling in samplings]
    world.run()
    for uid in constrained:
        assert world.ended[uid].code is FinishCode.STOP
        assert re.fullmatch("[a-d]{3,9}!", text_of(world.outputs[uid]))
    alone = saved.world(graphs=graphs, depth=depth)
    assert alone.answers([PROMPT], [Sampling(3, temperature=1.0)])[0] == world.outputs[plain]


@WAYS
def test_forced_tokens_take_no_steps_and_change_nothing(saved: Saved, graphs: int, depth: int) -> None:
    """Small steps run in a graph, and large ones outside of it."""
    grammar = grammar_of(regex="[ab]hello, these words are forced[cd]{2,4}!")
    results: list[list[list[int]]] = []
    num_steps: list[int] = []
    for min_forced, max_tokens in ((1000, 16), (2, 16), (2, 1000)):
        world = saved.world(graphs=graphs, depth=depth)
        world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
        world.runner._constrained.min_forced = min_forced
        world.runner._constrained.max_tokens = max_tokens
        uids = [world.submit(PROMPT, Sampling(3, temperature=1.0), max_new_tokens=8)]
        penalized = Sampling(5, temperature=1.0, frequency_penalty=1.5, repetition_penalty=1.5)
        uids += [world.submit(PROMPT, penalized, max_new_tokens=12)]
        uids += [
            world.submit(PROMPT, Sampling(seed, temperature=1.0, grammar=grammar), max_new_tokens=60)
            for seed in range(3)
        ]
        world.run()
        results.append([world.outputs[uid] for uid in uids])
        num_steps.append(world.core.scheduler.stats(0.0).num_steps)
        world.runner.close()
    assert results[1] == results[2] == results[0]
    assert num_steps[1] < num_steps[0]
    assert num_steps[2] < num_steps[0]


@WAYS
def test_excluded_tokens_are_not_sampled(saved: Saved, graphs: int, depth: int) -> None:
    world = saved.world(graphs=graphs, depth=depth)
    greedy = Sampling(0, temperature=0.0)
    plain = world.submit(PROMPT, greedy)
    allowed = world.submit(PROMPT, Sampling(2, allowed_token_ids=(3, 9, 200)))
    world.run()
    first = world.outputs[plain]
    assert set(world.outputs[allowed]) <= {3, 9, 200}
    bad = (tuple(first[3:5]), (first[0],), tuple(first[6:9]))
    banned = [world.submit(PROMPT, msgspec.structs.replace(greedy, bad_token_ids=bad)) for _ in range(3)]
    again = world.submit(PROMPT, greedy)
    world.run()
    assert world.outputs[again] == first
    for uid in banned:
        tokens = PROMPT + world.outputs[uid]
        assert len(world.outputs[uid]) == 12
        assert not any(tuple(tokens[i : i + len(ids)]) == ids for ids in bad for i in range(len(PROMPT), len(tokens)))
    world.runner.close()


@WAYS
def test_custom_processors_change_their_rows(saved: Saved, graphs: int, depth: int) -> None:
    world = saved.world(graphs=graphs, depth=depth)
    plain = world.submit(PROMPT, Sampling(0, temperature=0.0))
    forced = world.submit(PROMPT, custom(FORCE, token=7))
    biased = world.submit(PROMPT, custom(ADD, token=9, bias=1e4))
    bad = [world.submit(PROMPT, custom(BROKEN, how=how)) for how in ("raise", "shape", "dtype", "nan")]
    world.run()
    assert len(world.outputs[plain]) == 12
    assert (world.outputs[forced], world.outputs[biased]) == ([7] * 12, [9] * 12)
    assert [world.ended[uid].code for uid in bad] == [FinishCode.FAILED] * 4
    assert all("custom_logit_processor" in world.ended[uid].message for uid in bad)
    world.runner.close()


@WAYS
@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_hidden_states_and_embeddings_match_transformers(
    saved: Saved, graphs: int, depth: int, chunk_tokens: int
) -> None:
    world = saved.world(graphs=graphs, depth=depth, chunk_tokens=chunk_tokens)
    embeds = saved.theirs.get_input_embeddings().weight[PROMPT].float().cpu().numpy().tobytes()
    wanted = Sampling(0, temperature=0.0, hidden_states=ALL_STATES)
    by_ids = world.submit(PROMPT, wanted)
    by_embeds = world.submit([0] * len(PROMPT), wanted, embeds=embeds)
    last = world.submit(PROMPT, Sampling(4, hidden_states=LAST_STATES))
    plain = world.submit(PROMPT, Sampling(0, temperature=0.0))
    world.run()
    assert world.outputs[by_ids] == world.outputs[by_embeds] == world.outputs[plain]
    for uid, returns_all in ((by_ids, True), (by_embeds, True), (last, False)):
        output = world.outputs[uid]
        expected = saved.theirs.model(torch.tensor([PROMPT + output], device="cuda")).last_hidden_state[0].cpu()
        extras = world.extras[uid]
        assert [extra.kind for extra in extras if extra.kind != PROMPT_STATES] == [HIDDEN_STATES] * len(output)
        assert returns_all == any(extra.kind == PROMPT_STATES for extra in extras)
        for extra in extras:
            actual = torch.from_numpy(np.frombuffer(extra.data, np.float32).reshape(-1, expected.shape[1]).copy())
            start = extra.index if extra.kind == PROMPT_STATES else len(PROMPT) - 1 + extra.index
            torch.testing.assert_close(actual, expected[start : start + len(actual)], atol=2e-3, rtol=2e-3)
    world.runner.close()
