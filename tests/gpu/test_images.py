"""Image models on a GPU return the tokens of transformers in fp32, with graphs, with overlap, and in bf16."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from aioengine import Engine, models
from aioengine.models._base import ModelOptions, VisionModel
from aioengine.runner import weights
from aioengine.runner.device_memory import image_memory
from aioengine.runner.weight_reading import read_arrays
from tests.compute.models.test_image_answers import Served, check_session, made
from tests.compute.models.test_images import TEXTS, Saved, check, reference_states, run, vector
from tests.compute.runner_world import World, make_settings
from tests.kit.vision_models import GREEDY, MODELS, Pictures, prompt_of, save_vision_model


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return Saved(folder, save_vision_model(request.param, folder), Pictures(request.param, folder))


def gpu_world(
    saved: Saved, *, dtype: str, graphs: int, depth: int = 1, chunk_tokens: int = 512, backend: str = "triton"
) -> World:
    settings = make_settings(saved.folder, dtype=dtype, depth=depth, page_size=16, chunk_tokens=chunk_tokens)
    settings = saved.fitted(settings)
    runner = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend=backend, cuda_graph_max_rows=graphs
    )
    return World(msgspec.structs.replace(settings, runner=runner))


@pytest.mark.parametrize(("graphs", "chunk_tokens"), [(0, 512), (16, 7)])
def test_tokens_in_fp32_equal_transformers(saved: Saved, graphs: int, chunk_tokens: int) -> None:
    prompts = saved.prompts()
    world = gpu_world(saved, dtype="float32", graphs=graphs, chunk_tokens=chunk_tokens)
    outputs = run(world, prompts, max_new_tokens=24)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(saved, prompt, output, 24)
    world.runner.close()


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_graphs_and_overlap_change_little_in_bf16(model_type: str, tmp_path: Path) -> None:
    """With random weights, greedy tokens may differ after a rounding error. Most answers have the same first tokens."""
    saved = Saved(tmp_path, save_vision_model(model_type, tmp_path, head_size=128), Pictures(model_type, tmp_path))
    prompts = saved.prompts() * 2
    results: list[list[list[int]]] = []
    for graphs, depth, chunk_tokens in ((0, 0, 512), (16, 1, 512), (16, 1, 24)):
        world = gpu_world(
            saved, dtype="bfloat16", graphs=graphs, depth=depth, backend="flashinfer", chunk_tokens=chunk_tokens
        )
        results.append(run(world, prompts, max_new_tokens=4))
        world.runner.close()
    for others in results[1:]:
        same = [ours[i] == theirs[i] for ours, theirs in zip(results[0], others, strict=True) for i in range(4)]
        assert sum(same) >= 0.7 * len(same)


def test_features_in_bf16_are_near_fp32(saved: Saved) -> None:
    picture = saved.pictures.draw(8, 12)
    config = saved.theirs.config.to_dict() | {"architectures": [type(saved.theirs).__name__]}
    features = []
    for dtype in (torch.float32, torch.bfloat16):
        model = models.build(config, ModelOptions(dtype=dtype, device=torch.device("cuda"), max_positions=256))
        weights.load(model, saved.folder, load_format="auto", seed=0, report=lambda *_: None)
        assert isinstance(model, VisionModel)
        features.append(model.encode_image(picture.arrays).float())
        peak, feature_bytes = image_memory(model, torch.device("cuda"), 64)
        assert peak >= feature_bytes > 0
    error = (features[1] - features[0]).norm() / features[0].norm()
    assert error < 0.1


def test_second_question_reuses_cached_pages(saved: Saved) -> None:
    world = gpu_world(saved, dtype="float32", graphs=16)
    picture = saved.pictures.draw(8, 12)
    for uid, text in enumerate((TEXTS[1], TEXTS[3])):
        prompt = prompt_of(TEXTS[0], picture, text)
        check(saved, prompt, run(world, [prompt])[0])
        assert (world.num_cached[uid] > 0) is bool(uid)
    assert GREEDY.is_greedy
    world.runner.close()


def test_vectors_equal_transformers(saved: Saved) -> None:
    prompt = prompt_of(TEXTS[0], saved.pictures.draw(8, 12), TEXTS[1])
    world = gpu_world(saved, dtype="float32", graphs=0, chunk_tokens=64)
    np.testing.assert_allclose(vector(world, prompt), reference_states(saved, prompt)[-1].cpu().numpy(), atol=2e-3)
    world.runner.close()


def test_sessions_answer_about_the_pictures_of_earlier_turns(tmp_path: Path) -> None:
    theirs = made(tmp_path, "qwen2_vl")
    with Engine(tmp_path, device="cuda", dtype="float32", context_length=256) as llm:
        check_session(Served(llm, tmp_path, theirs, "qwen2_vl"))


def test_dummy_weights_have_finite_features(tmp_path: Path) -> None:
    theirs = save_vision_model("qwen2_5_vl", tmp_path)
    config = theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    model = models.build(config, ModelOptions(dtype=torch.bfloat16, device=torch.device("cuda"), max_positions=256))
    weights.load(model, tmp_path, load_format="dummy", seed=0, report=lambda *_: None)
    assert isinstance(model, VisionModel)
    assert model.encode_image(Pictures("qwen2_5_vl", tmp_path).draw(16, 16).arrays).isfinite().all()


def test_a_large_picture_is_read_into_pinned_memory(tmp_path: Path) -> None:
    """Several threads read parts of it."""
    draw = np.random.default_rng(0)
    arrays = {
        "picture": draw.integers(0, 256, (1200, 1100, 3), dtype=np.uint8),
        "table": draw.random((3, 256), dtype=np.float32),
        "rows_first": np.array([True]),
    }
    save_file(arrays, str(tmp_path / "image"))
    for _ in range(3):
        result = read_arrays(str(tmp_path / "image"), is_pinned=True)
        for name, array in arrays.items():
            assert result[name].is_pinned()
            assert np.array_equal(result[name].cuda(non_blocking=True).cpu().numpy(), array)
