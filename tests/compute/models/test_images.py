"""Images in prompts, in runner and scheduler: logits and tokens match transformers, and features are reused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace as replace_struct
from safetensors.torch import save_file
from transformers import PreTrainedModel

from aioengine import models
from aioengine.constraints.grammars import Grammars
from aioengine.families._config import new_name
from aioengine.models._base import ModelOptions
from aioengine.models._image_decoder import ImageDecoder, looked_up
from aioengine.models._qwen_tower import cut
from aioengine.protocol.columns import HIDDEN_STATES, POOLED_VECTOR, PROMPT_STATES
from aioengine.protocol.messages import ALL_STATES, FinishCode, Limits, RequestKind, Sampling, Submit, TextRules
from aioengine.protocol.packed_logprobs import PROMPT_LOGPROBS, LogprobRules
from aioengine.settings.config import Settings
from tests.compute.runner_world import World, make_settings
from tests.kit.grammar_walks import FOLDER, grammar_of
from tests.kit.tiny_sizes import VOCAB_SIZE
from tests.kit.vision_models import (
    GREEDY,
    MODELS,
    Pictures,
    Prompt,
    clear_tokens,
    prompt_of,
    save_vision_model,
    their_logits,
)

TEXTS = [[(11 * i * i + 5 * i + k) % 280 for i in range(length)] for k, length in enumerate((9, 5, 23, 14))]


class Saved(NamedTuple):
    folder: Path
    theirs: PreTrainedModel
    pictures: Pictures

    def world(self, *, chunk_tokens: int = 512, num_pages: int = 256, depth: int = 0) -> World:
        settings = make_settings(self.folder, chunk_tokens=chunk_tokens, num_pages=num_pages, depth=depth)
        return World(self.fitted(settings))

    def fitted(self, settings: Settings) -> Settings:
        """Return the settings with the token count of an image, if the model needs it."""
        tokens = 16 if self.theirs.config.model_type == "gemma3" else 0
        return replace_struct(settings, scheduler=replace_struct(settings.scheduler, whole_image_tokens=tokens))

    def prompts(self) -> list[Prompt]:
        """Prompts with several images of several sizes, text before, between and after them, and only text."""
        one, two, three = self.pictures.draw(4, 6), self.pictures.draw(8, 4), self.pictures.draw(2, 2)
        return [
            prompt_of(TEXTS[0], one, TEXTS[1], two, TEXTS[2]),
            prompt_of(TEXTS[2]),
            prompt_of(two, TEXTS[3], three, [7], one, TEXTS[0]),
            prompt_of(TEXTS[1], three),
        ]


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return Saved(folder, save_vision_model(request.param, folder), Pictures(request.param, folder))


@pytest.fixture
def llava(tmp_path: Path) -> Saved:
    return Saved(tmp_path, save_vision_model("llava", tmp_path), Pictures("llava", tmp_path))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """The number of calls of the tower, by the shape of its pixels."""
    counts: Counter[tuple[int, ...]] = Counter()
    encode = ImageDecoder.encode_image

    def counted(self: ImageDecoder, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        counts[tuple(arrays["pixel_values"].shape)] += 1
        return encode(self, arrays)

    monkeypatch.setattr(ImageDecoder, "encode_image", counted)
    return counts


def run(world: World, prompts: list[Prompt], *, max_new_tokens: int = 8) -> list[list[int]]:
    uids = [
        world.submit(prompt.token_ids, GREEDY, media=prompt.media, max_new_tokens=max_new_tokens) for prompt in prompts
    ]
    world.run()
    return [world.outputs[uid] for uid in uids]


def check(saved: Saved, prompt: Prompt, output: list[int], num_tokens: int = 8) -> None:
    assert len(output) == num_tokens
    assert output == clear_tokens(their_logits(saved.theirs, prompt, output), output)


@pytest.mark.parametrize(("chunk_tokens", "depth"), [(512, 0), (7, 1)])
def test_tokens_match_transformers(saved: Saved, chunk_tokens: int, depth: int) -> None:
    prompts = saved.prompts()
    outputs = run(saved.world(chunk_tokens=chunk_tokens, depth=depth), prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(saved, prompt, output)


def test_images_by_value_return_the_same_tokens(llava: Saved) -> None:
    prompts = llava.prompts()
    by_value: list[Prompt] = []
    for prompt in prompts:
        media = [replace_struct(image, path="", data=Path(image.path).read_bytes()) for image in prompt.media]
        by_value.append(replace(prompt, media=media))
    assert run(llava.world(), by_value) == run(llava.world(), prompts)


def test_bytes_and_values_give_same_features(saved: Saved) -> None:
    model = saved.world().runner._model
    assert isinstance(model, ImageDecoder)
    numbers = model.largest_image(24)
    if "picture" in numbers:
        assert model.encode_image(numbers).isfinite().all()
        numbers = {"pixels": torch.zeros(3, 32, 32), "image_grid_thw": numbers["image_grid_thw"]}
    shape = numbers.pop("pixels").shape
    numbers.pop("table", None)
    bytes_ = {**numbers, "pixels": torch.randint(0, 256, shape, dtype=torch.uint8), "table": torch.randn(3, 256)}
    values = looked_up(bytes_["pixels"], bytes_["table"])
    if "image_grid_thw" in numbers:
        values = cut(values, size=4, merge=2, frames=2)
    assert torch.equal(model.encode_image(bytes_), model.encode_image({**numbers, "pixel_values": values}))


def test_prompt_logits_match_transformers(saved: Saved) -> None:
    prompt = saved.prompts()[0]
    world = saved.world(chunk_tokens=16)
    hidden: list[torch.Tensor] = []
    forward = world.runner._model.forward
    world.runner._model.forward = lambda inputs, attention: (
        hidden.append(  # type: ignore[method-assign]
            forward(replace(inputs, outputs=None), attention)
        )
        or hidden[-1].index_select(0, inputs.outputs if inputs.outputs is not None else torch.arange(len(hidden[-1])))
    )
    world.submit(prompt.token_ids, GREEDY, media=prompt.media, max_new_tokens=1)
    world.run()
    logits = world.runner._model.compute_logits(torch.cat(hidden))
    torch.testing.assert_close(logits, their_logits(saved.theirs, prompt), atol=1e-3, rtol=1e-4)


def test_second_question_reuses_image_features(llava: Saved, encoded: Counter[tuple[int, ...]]) -> None:
    picture, other = llava.pictures.draw(), llava.pictures.draw()
    world = llava.world()
    first, second = prompt_of(TEXTS[0], picture, TEXTS[1]), prompt_of(TEXTS[0], picture, TEXTS[3])
    different = prompt_of(TEXTS[0], other, TEXTS[1])
    for uid, prompt in enumerate((first, second, different, first)):
        [output] = run(world, [prompt])
        check(llava, prompt, output)
        assert world.num_cached[uid] == (0, 24, 8, 28)[uid]  # in whole pages of 4
    assert encoded.total() == 2
    assert world.core.scheduler.cache.clear()
    check(llava, first, run(world, [first])[0])
    assert encoded.total() == 2, "the features are kept beside the prefix cache"


def test_features_beyond_the_limit_are_recomputed(llava: Saved, encoded: Counter[tuple[int, ...]]) -> None:
    world = llava.world(chunk_tokens=8)
    images = world.runner._table.images
    assert images is not None
    images._max_bytes = 0
    prompt = prompt_of(TEXTS[0], llava.pictures.draw(), TEXTS[1])
    check(llava, prompt, run(world, [prompt])[0])
    assert encoded.total() == 3, "a run for each of the chunks with a part of the image"
    assert not images._cache


def test_preempted_requests_give_same_tokens(llava: Saved, encoded: Counter[tuple[int, ...]]) -> None:
    pictures = [llava.pictures.draw() for _ in range(5)]
    prompts = [prompt_of(TEXTS[i % 4], pictures[i], TEXTS[(i + 1) % 4]) for i in range(5)]
    expected = run(llava.world(), prompts, max_new_tokens=40)
    encoded.clear()
    world = llava.world(num_pages=56, chunk_tokens=24)
    assert run(world, prompts, max_new_tokens=40) == expected
    assert world.num_preemptions > 0
    assert encoded.total() == 5
    for prompt, output in zip(prompts, expected, strict=True):
        check(llava, prompt, output, 40)


def test_unreadable_image_fails_only_its_request(llava: Saved) -> None:
    good, gone, wrong, short = (llava.pictures.draw() for _ in range(4))
    fine = prompt_of(TEXTS[0], good, TEXTS[1])
    gone.path.unlink()
    misshapen = replace(wrong, path=Path(__file__))
    fewer = replace(short, token_ids=short.token_ids[:-1])
    world = llava.world(chunk_tokens=16)
    bad = [prompt_of(TEXTS[1], image, TEXTS[2]) for image in (gone, misshapen, fewer)]
    outputs = run(world, [bad[0], fine, *bad[1:]])
    check(llava, fine, outputs[1])
    assert [bool(output) for output in outputs] == [False, True, False, False]
    assert {uid: end.code for uid, end in world.ended.items() if uid != 1} == dict.fromkeys(
        (0, 2, 3), FinishCode.FAILED
    )
    assert "cannot read" in world.ended[0].message
    assert "16 features for 15 placeholders" in world.ended[3].message


def test_nonfinite_features_fail_only_their_request(llava: Saved) -> None:
    prompt = prompt_of(TEXTS[0], llava.pictures.draw(), TEXTS[1])
    broken = llava.pictures.draw()
    arrays = {"pixel_values": broken.arrays["pixel_values"] * float("nan")}
    save_file(arrays, broken.path)
    world = llava.world(chunk_tokens=16)
    outputs = run(world, [prompt_of(TEXTS[0], replace(broken, arrays=arrays), TEXTS[1]), prompt])
    assert not outputs[0]
    assert "non-finite" in world.ended[0].message
    check(llava, prompt, outputs[1])


def test_token_budget_limits_images_per_step(llava: Saved, encoded: Counter[tuple[int, ...]]) -> None:
    world = llava.world(chunk_tokens=24)  # an image has 16 features
    prompts = [prompt_of(TEXTS[1], llava.pictures.draw(), TEXTS[1]) for _ in range(4)]
    decoding = world.submit(TEXTS[0], GREEDY, max_new_tokens=30)
    world.step()
    uids = [
        world.submit(image_prompt.token_ids, GREEDY, media=image_prompt.media, max_new_tokens=4)
        for image_prompt in prompts
    ]
    while world.core.has_work:
        before = encoded.total(), len(world.outputs[decoding])
        world.step()
        assert encoded.total() - before[0] <= 1
        assert len(world.outputs[decoding]) == min(before[1] + 1, 30)
    for prompt, uid in zip(prompts, uids, strict=True):
        check(llava, prompt, world.outputs[uid], 4)


def test_logprobs_and_scores_with_images_match(llava: Saved) -> None:
    prompt = prompt_of(TEXTS[0], llava.pictures.draw(), TEXTS[1])
    expected = their_logits(llava.theirs, prompt).log_softmax(-1)
    for max_new_tokens in (0, 1):
        world = llava.world(chunk_tokens=16)
        rules = LogprobRules(start=0)
        uid = world.submit(prompt.token_ids, GREEDY, media=prompt.media, max_new_tokens=max_new_tokens, logprobs=rules)
        world.run()
        data = next(extra.data for extra in world.extras[uid] if extra.kind == PROMPT_LOGPROBS)
        actual = np.frombuffer(data, np.float32).reshape(len(prompt.token_ids), -1)[1:, 0]
        wanted = expected[:-1].gather(1, torch.tensor(prompt.token_ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(actual, wanted.numpy(), atol=1e-3)


def test_text_rows_have_same_bits_next_to_image_rows(llava: Saved) -> None:
    text = prompt_of(TEXTS[2])
    rules = LogprobRules(num_top=3)
    worlds = [llava.world(chunk_tokens=16) for _ in range(2)]
    uids = [world.submit(text.token_ids, GREEDY, logprobs=rules) for world in worlds]
    for prompt in llava.prompts():
        worlds[1].submit(prompt.token_ids, GREEDY, media=prompt.media)
    for world in worlds:
        world.run()
    assert worlds[0].extras[uids[0]] == worlds[1].extras[uids[1]]


LAYOUTS: list[tuple[str, dict[str, str]]] = [
    (
        "llava",
        {
            "model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "vision_tower.": "vision_tower.vision_model.",
        },
    ),
    (
        "llava",
        {
            "model.": "model.language_model.",
            "vision_tower.": "model.vision_tower.vision_model.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
    ("qwen2_vl", {}),
    ("qwen2_5_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
    ("qwen3_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
    (
        "smolvlm",
        {"model.": "model.text_model.", "vision_model.": "model.vision_model.", "connector.": "model.connector."},
    ),
]


@pytest.mark.parametrize(("model_type", "prefixes"), LAYOUTS)
def test_tensor_names_of_older_and_newer_files_load(model_type: str, prefixes: dict[str, str]) -> None:
    """``prefixes``: our prefix -> prefix in the file."""
    config = MODELS[model_type]().config.to_dict()
    model = models.build(config, ModelOptions(dtype=torch.float32, device=torch.device("meta"), max_positions=256))
    names = list(model.weights())
    for name in names:
        ours = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        assert new_name(prefixes.get(ours, "") + name.removeprefix(ours), model.renamed) == name
    assert {ours for ours in prefixes if not any(name.startswith(ours) for name in names)} == set()


def reference_states(saved: Saved, prompt: Prompt) -> torch.Tensor:
    """Return the states [X, D] of transformers after the last norm."""
    results: list[torch.Tensor] = []
    head = saved.theirs.get_output_embeddings()
    assert head is not None
    handle = head.register_forward_pre_hook(lambda _, given: results.append(given[0]))
    their_logits(saved.theirs, prompt)
    handle.remove()
    return results[0][0]


def test_hidden_states_with_images_match(llava: Saved) -> None:
    prompt = prompt_of(TEXTS[0], llava.pictures.draw(), TEXTS[1])
    world = llava.world(chunk_tokens=16)
    sampling = replace_struct(GREEDY, hidden_states=ALL_STATES)
    uid = world.submit(prompt.token_ids, sampling, media=prompt.media, max_new_tokens=1)
    world.run()
    extras = sorted(
        world.extras[uid], key=lambda extra: extra.kind == HIDDEN_STATES
    )  # the state of the last position comes last
    data = b"".join(extra.data for extra in extras if extra.kind in (PROMPT_STATES, HIDDEN_STATES))
    result = np.frombuffer(data, np.float32).reshape(-1, 64)[: len(prompt.token_ids)]
    np.testing.assert_allclose(result, reference_states(llava, prompt).numpy(), atol=1e-3)


def test_embeddings_with_images_match(llava: Saved) -> None:
    prompt = prompt_of(TEXTS[0], llava.pictures.draw(), TEXTS[1])
    settings = make_settings(llava.folder, chunk_tokens=16)
    world = World(replace_struct(settings, model=replace_struct(settings.model, task="embed")))
    np.testing.assert_allclose(vector(world, prompt), reference_states(llava, prompt)[-1].numpy(), atol=1e-3)


def vector(world: World, prompt: Prompt) -> npt.NDArray[np.float32]:
    """Return the pooled vector of a prompt."""
    submit = Submit(0, prompt.token_ids, Sampling(0), Limits(0), TextRules(), kind=RequestKind.POOL, media=prompt.media)
    world.core.requests.submit(submit)
    world.outputs[0], world.extras[0] = [], []
    world.run()
    [vector_of_row] = [
        np.frombuffer(extra.data, np.float32) for extra in world.extras[0] if extra.kind == POOLED_VECTOR
    ]
    return vector_of_row


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_forced_tokens_have_correct_positions(model_type: str, tmp_path: Path) -> None:
    saved = Saved(tmp_path, save_vision_model(model_type, tmp_path), Pictures(model_type, tmp_path))
    prompt = prompt_of(TEXTS[1], saved.pictures.draw(8, 12), TEXTS[0])
    grammar = grammar_of(regex="(aabbccdd|ddccbbaa)([a-d]eeeeff){3}[a-d]{4}!")
    results: list[list[int]] = []
    for min_forced, depth, chunk_tokens in ((1_000_000, 0, 64), (2, 0, 64), (2, 1, 7)):
        world = saved.world(depth=depth, chunk_tokens=chunk_tokens)
        world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
        world.runner._constrained.min_forced = min_forced
        sampling = Sampling(3, temperature=0.0, grammar=grammar)
        uid = world.submit(prompt.token_ids, sampling, media=prompt.media, max_new_tokens=60)
        world.run()
        results.append(world.outputs[uid])
    assert len(results[0]) > 30
    assert results[1:] == results[:1] * 2
