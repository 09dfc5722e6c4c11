"""Fallback models on a GPU match transformers, with CUDA graphs and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, NemotronConfig, Qwen3Config

from aioengine.families._config import Task
from aioengine.kernels.heads import can_rotate_qk, rotate_qk, write_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.models._base import Model, ModelOptions
from aioengine.models._fallback import TransformersFolder
from aioengine.protocol.messages import Adapter
from aioengine.runner import weights
from aioengine.runner.build import build
from aioengine.runner.warmup import why_it_waits
from aioengine.settings.config import LoraSettings
from tests.compute.models.test_fallback import KINDS
from tests.compute.models.test_fallback import SIZES as FEW
from tests.compute.runner.test_adapters import generate, opened
from tests.compute.runner_world import World, check_greedy
from tests.gpu.test_decoders import check_logits
from tests.gpu.test_kernels import in_torch
from tests.kit.adapter_files import write_adapter
from tests.kit.settings import small_settings

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from aioengine.settings.config import Settings

SIZES: Any = {**FEW, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 64}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gated MLPs": LlamaConfig(**SIZES),
    "norms of heads, tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "MLPs of two layers": NemotronConfig(**SIZES),
    "windows and sinks": GptOssConfig(
        **SIZES, sliding_window=8, layer_types=KINDS, num_local_experts=4, num_experts_per_tok=2
    ),
    "experts": MixtralConfig(**SIZES, num_local_experts=4),
}
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(3 + 6 * i)] for i in range(5)]
NUM_NEW = 8
CUDA = torch.device("cuda")


@pytest.fixture(scope="module", params=CONFIGS)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save(CONFIGS[request.param], tmp_path_factory.mktemp("model"))


def save(config: PreTrainedConfig, folder: Path) -> Any:
    """Save and return a random model with clearly different logits. ``folder`` is its folder."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    model.save_pretrained(folder)
    model.folder = folder
    return model


def load(folder: Path, dtype: torch.dtype) -> Model:
    options = ModelOptions(dtype=dtype, device=CUDA, max_positions=64)
    model = TransformersFolder(folder, Task.GENERATE, trust_remote_code=False, has_weights=True).load(options)
    weights.load(model, folder, load_format="safetensors", seed=0, report=lambda *_: None)
    return model


def test_logits_equal_transformers(theirs: Any) -> None:
    """In bf16, the error against fp32 is at most 1.5 times the error of transformers in bf16."""
    rounded = AutoModelForCausalLM.from_pretrained(theirs.folder, dtype=torch.bfloat16, attn_implementation="eager")
    for dtype in (torch.float32, torch.bfloat16):
        check_logits(load(theirs.folder, dtype), dtype, theirs, rounded, PROMPTS)


def settings_of(folder: Path, graphs: int, *, depth: int = 1, context_length: int = 64) -> Settings:
    return small_settings(
        path=str(folder), dtype="float32", load_format="auto", context_length=context_length, vocab_size=96,
        max_running=8, chunk_tokens=16, depth=depth, device="cuda", attention_backend="triton",
        fallback_backend="torch", cuda_graph_max_rows=graphs, implementation="transformers",
    )  # fmt: skip


@pytest.mark.parametrize("graphs", [0, 4])
def test_greedy_tokens_equal_transformers(theirs: Any, graphs: int) -> None:
    """In fp32 with chunked prompts, each token has the highest logit, except for rounding."""
    world = World(settings_of(theirs.folder, graphs))
    waits = why_it_waits(world.runner._model, CUDA)
    assert ("cuda_graph_sizes" in world.runner.facts) == (graphs > 0 and not waits)
    assert not waits or theirs.config.model_type in ("mixtral", "gpt_oss"), waits
    check_greedy(world, theirs, PROMPTS, num_new=NUM_NEW)


def test_adapters_in_graphs_return_the_tokens_of_a_cpu(tmp_path: Path) -> None:
    save(CONFIGS["gated MLPs"], tmp_path / "model")
    folders = [write_adapter(tmp_path / f"{rank}", tmp_path / "model", rank=rank, seed=rank) for rank in (4, 16)]
    results: list[list[list[int]]] = []
    for device, graphs in (("cpu", 0), ("cuda", 0), ("cuda", 8)):
        settings = settings_of(tmp_path / "model", graphs, depth=0, context_length=320)
        lora = LoraSettings(num_slots=2, max_rank=16, modules=())
        backend = "torch" if device == "cpu" else "triton"
        runner_settings = replace(settings.runner, lora=lora, device=device, attention_backend=backend)
        runner = build(replace(settings, runner=runner_settings), lambda _: None)
        for slot, path in enumerate(folders, 1):
            runner.adapters.place(slot, runner.adapters.read(Adapter(slot, path.name, str(path), ""))).result(timeout=9)
        rows = [opened(uid, uid % 3, prompt) for uid, prompt in enumerate(PROMPTS)]
        results.append(generate(runner, rows, chunk=14))
        runner.close()
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(32, 8, 128), (4, 2, 64), (6, 6, 80), (7, 1, 6)])
def test_kernels_of_heads_in_separate_tensors(num_heads: int, num_kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """[1, H, T, E], views of one tensor."""
    whole = torch.randn(5, (num_heads + 2 * num_kv_heads) * size, device=CUDA).to(dtype)
    sizes = [num_heads * size, num_kv_heads * size, num_kv_heads * size]
    q, k, v = (part.view(1, 5, -1, size).transpose(1, 2) for part in whole.split(sizes, dim=1))
    cos, sin = torch.randn(2, 1, 5, size, device=CUDA).to(dtype)
    assert can_rotate_qk(q, k, cos, sin)
    actual, expected = rotate_qk(q, k, cos, sin), in_torch(rotate_qk, q, k, cos, sin)
    if dtype == torch.bfloat16:
        assert all(map(torch.equal, actual, expected))
    torch.testing.assert_close(actual, expected)
    q, k, v = actual[0][0].transpose(0, 1), actual[1][0].transpose(0, 1), v[0].transpose(0, 1)
    slots = torch.tensor([16, 17, 5, 95, 40], dtype=torch.int32, device=CUDA)
    for moves in (False, True):
        pools, wanted = torch.zeros(2, 2, 6, num_kv_heads, 16, size, dtype=dtype, device=CUDA)
        outs = [torch.empty(5, num_heads + 2 * num_kv_heads, size, dtype=dtype, device=CUDA) for _ in range(2)]
        kept = [out if moves else None for out in outs]
        heads = write_heads(q, k, v, KVTarget(slots, pools[0], pools[1], kept[0]))
        expected_heads = in_torch(write_heads, q, k, v, KVTarget(slots, wanted[0], wanted[1], kept[1]))
        assert torch.equal(pools, wanted)
        assert all(map(torch.equal, heads, expected_heads))
