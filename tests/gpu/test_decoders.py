"""Logits of all families on a GPU match transformers in fp32. In bf16 their error is about that of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from aioengine import models
from aioengine.attention._base import AttentionBackend, kv_pool_shape
from aioengine.models._base import Model, ModelOptions
from aioengine.runner.build import choose_attention
from aioengine.runner.inputs import model_inputs
from tests.compute.runner_world import World, check_greedy
from tests.compute.stepping import make_batch
from tests.gpu.test_model_runner import on_device
from tests.kit.decoders import HEADS_OF_64, ONE_OF_EACH, config_of, random_model
from tests.kit.settings import small_settings

PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(3 + 6 * i)] for i in range(5)]
NUM_NEW = 8

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # the code of GPT-BigCode uses it


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def theirs(request: pytest.FixtureRequest) -> PreTrainedModel:
    return random_model(config_of(ONE_OF_EACH[request.param], **HEADS_OF_64))


def raw_config(model: PreTrainedModel) -> dict[str, object]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def make_attention(model: Model, device: torch.device) -> AttentionBackend:
    """Return Triton attention, or torch attention if Triton does not support the model."""
    shape, dtype = model.attention_shape, model.dtype
    runner = small_settings(attention_backend="triton", fallback_backend="torch", device=str(device)).runner
    choice = choose_attention(runner, shape, dtype, device, kv_dtype=dtype, report=lambda _: None)
    pools = [
        torch.zeros(kv_pool_shape(shape.part(layers), num_pages=32, page_size=16), dtype=dtype, device=device)
        for layers in shape.groups
    ]
    return choice.build(shape, pools)


def check_logits(ours: Model, dtype: torch.dtype, theirs: Any, rounded: Any, prompts: list[list[int]]) -> None:
    """Check logits. In bf16 the error may be 1.5 times that of ``rounded``, which is ``theirs`` in bf16."""
    device = torch.device("cuda")
    attention = make_attention(ours, device)
    our_error, their_error = 0.0, 0.0
    for prompt in prompts:
        attention.prepare(on_device(make_batch([(0, len(prompt))], [list(range(1, 9))], 16), device))
        inputs = model_inputs(ours, torch.tensor(prompt, device=device), torch.arange(len(prompt), device=device))
        result = ours.compute_logits(ours.forward(inputs, attention)).float().cpu()
        exact = theirs(torch.tensor([prompt])).logits[0]
        if dtype == torch.float32:
            torch.testing.assert_close(result, exact, atol=2e-3, rtol=1e-3)
        our_error += float((result - exact).square().sum())
        their_error += float((rounded(torch.tensor([prompt])).logits[0].float() - exact).square().sum())
    if dtype == torch.bfloat16:
        assert our_error**0.5 < 1.5 * their_error**0.5


def test_logits_equal_transformers(theirs: PreTrainedModel) -> None:
    """In bf16 the error against fp32 is at most 1.5 times that of transformers in bf16."""
    device = torch.device("cuda")
    state = theirs.state_dict()
    rounded = type(theirs)(theirs.config).to(torch.bfloat16)
    rounded.load_state_dict(state)
    rounded.eval()
    for dtype in (torch.float32, torch.bfloat16):
        ours = models.build(raw_config(theirs), ModelOptions(dtype=dtype, device=device, max_positions=64))
        for name, target in ours.weights().items():
            target.tensor.copy_(state[name])
        ours.finish_loading()
        check_logits(ours, dtype, theirs, rounded, PROMPTS)


@pytest.mark.parametrize("graphs", [0, 4])
def test_greedy_tokens_equal_transformers(theirs: PreTrainedModel, graphs: int, tmp_path: Path) -> None:
    """In fp32, prompts in chunks: each token has the highest logit, but for rounding."""
    theirs.save_pretrained(tmp_path)
    settings = small_settings(
        path=str(tmp_path), dtype="float32", load_format="auto", context_length=64, vocab_size=96, max_running=8,
        chunk_tokens=16, depth=1, device="cuda", attention_backend="triton",
        fallback_backend="torch", cuda_graph_max_rows=graphs,
    )  # fmt: skip
    check_greedy(World(settings), theirs, PROMPTS, num_new=NUM_NEW)
