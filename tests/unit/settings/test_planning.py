"""Plans of an engine that are computed from the config only."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import aioengine
from aioengine import Plan
from aioengine.cli import main
from aioengine.model_files import model_folder
from aioengine.model_files.model_folder import DEMO_MODEL
from aioengine.settings import machine, planning
from tests.kit.source import ROOT

GIB = 1 << 30
PARTS = ("weights", "activations", "KV pool", "rest")
"""The rows of a plan's table with parts of the memory."""
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def folder(path: Path, **changes: object) -> Path:
    (path / "config.json").write_text(json.dumps(LARGE | changes))
    return path


def test_plan_of_weights_that_are_quantized_while_loading(tmp_path: Path) -> None:
    """The head of this model has int8 with "int8" and "int4". Its embeddings and norms keep 16 bits."""
    layers, table, norms = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336), 128256 * 4096, 65 * 4096
    outputs = 32 * (2 * (4096 + 1024) + 2 * 14336 + 4096)

    def bytes_of(method: str, **arguments: int) -> int:
        return aioengine.plan(folder(tmp_path), device_memory="80GiB", quantization=method, **arguments).weights_bytes

    assert bytes_of("fp8") == layers + 4 * outputs + 2 * (2 * table + norms)
    assert bytes_of("int8") == layers + 4 * outputs + table + 4 * 128256 + 2 * (table + norms)
    assert bytes_of("int4") == layers // 2 + 4 * layers // 128 + table + 4 * 128256 + 2 * (table + norms)
    assert bytes_of("int4", quantization_group_size=32) - bytes_of("int4") == 4 * layers // 32 - 4 * layers // 128
    tied = folder(tmp_path, tie_word_embeddings=True)
    assert aioengine.plan(tied, device_memory="80GiB", quantization="int8").weights_bytes == (
        layers + 4 * outputs + table + 4 * 128256 + 2 * norms
    )


def test_plan_of_a_large_model_on_another_machine(tmp_path: Path) -> None:
    plan = aioengine.plan(folder(tmp_path), device_memory="80GiB")
    assert (plan.model_type, plan.architecture, plan.implementation) == ("llama", "LlamaForCausalLM", "aioengine")
    assert (plan.device, plan.dtype, plan.device_memory) == ("cuda", "bfloat16", 80 * GIB)
    assert plan.num_parameters == 8_030_261_248
    assert plan.weights_bytes == 2 * plan.num_parameters
    assert plan.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert plan.fits
    assert plan.max_requests == plan.max_total_tokens // 8192
    assert plan.kv_pool_bytes == (plan.max_total_tokens + 16) * plan.kv_bytes_per_token
    assert plan.cuda_bytes == GIB
    assert plan.rest_bytes == pytest.approx((1 - 0.88) * 80 * GIB, rel=0.01)
    parts = (plan.weights_bytes, plan.activations_bytes, plan.cuda_bytes, plan.kv_pool_bytes, plan.rest_bytes)
    assert sum(parts) == plan.device_memory
    table = str(plan)
    for words in ("8.03 billion parameters", "15.0 GiB", "128.0 KiB a token", "80.0 GiB in all", "8,192 tokens"):
        assert words in table
    rows = dict(row.split("  ", 1) for row in table.splitlines())
    assert "load_format='dummy'" in rows.pop("implementation")
    assert max(map(len, rows.values())) < 100
    sizes = [float(size) for name in PARTS for size in re.findall(r"([\d.]+) GiB", rows[name])]
    assert len(sizes) == 5
    assert sum(sizes) == pytest.approx(80, abs=0.25)  # all sizes are rounded to 0.1 GiB


def test_int8_pool_has_nearly_twice_the_tokens(tmp_path: Path) -> None:
    def plans(**changes: object) -> tuple[Plan, Plan]:
        path, options = folder(tmp_path, **changes), {"device": "cpu", "device_memory": "40GiB", "dtype": "bfloat16"}
        plain, small = (aioengine.plan(path, kv_cache_dtype=dtype, **options) for dtype in ("auto", "int8"))
        return plain, small

    plain, small = plans()
    assert (plain.kv_cache_dtype, small.kv_cache_dtype) == ("bfloat16", "int8")
    assert small.kv_bytes_per_token == 2 * 32 * 8 * (128 + 2)
    assert small.max_total_tokens >= 1.9 * plain.max_total_tokens > 8192
    assert "65.0 KiB a token in int8" in str(small)
    plain, small = plans(num_attention_heads=64)  # heads of size 64
    assert small.max_total_tokens >= 1.9 * plain.max_total_tokens


def test_fp8_pool_has_twice_the_tokens(tmp_path: Path) -> None:
    path = folder(tmp_path)
    plain, small = (aioengine.plan(path, device_memory="40GiB", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert small.kv_cache_dtype == "fp8_e4m3"
    assert 2 * small.kv_bytes_per_token == plain.kv_bytes_per_token
    assert small.max_total_tokens // 32 == plain.max_total_tokens // 16


def test_gpu_computes_float32_checkpoints_in_16_bits(tmp_path: Path) -> None:
    plan = aioengine.plan(folder(tmp_path, dtype=None), device_memory="80GiB")
    assert (plan.dtype, plan.weights_bytes) == ("bfloat16", 2 * plan.num_parameters)
    kept = aioengine.plan(tmp_path, device_memory="80GiB", dtype="float32")
    assert (kept.dtype, kept.weights_bytes) == ("float32", 4 * plan.num_parameters)


def test_plan_has_the_reason_why_weights_would_be_refused(tmp_path: Path) -> None:
    (folder(tmp_path) / "pytorch_model.bin").touch()
    plan = aioengine.plan(tmp_path, device_memory="80GiB")
    assert plan.fits
    refused = "there is a file for model_type 'llama'; but an engine would refuse to start: .*pytorch_model.bin, which"
    for words in (plan.reason, str(plan)):
        assert re.search(refused, words)
    for planned in (aioengine.plan(tmp_path, device_memory="80GiB", load_format="dummy"), aioengine.plan(device="cpu")):
        assert "refuse" not in str(planned)


def test_rest_includes_recurrent_states(tmp_path: Path) -> None:
    lfm2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": False}
    changes = {**lfm2, "layer_types": ["conv", "full_attention"] * 16}
    plan = aioengine.plan(folder(tmp_path, **changes), device="cpu", device_memory="80GiB", max_total_tokens=8192)
    assert plan.cuda_bytes == 0
    taken = plan.weights_bytes + plan.activations_bytes + plan.kv_pool_bytes
    assert plan.rest_bytes == plan.device_memory - taken > plan.state_bytes_per_request * 64
    assert "for states and snapshots of them, and left free" in str(plan)


def test_windows_save_memory_of_long_requests(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
    whole = aioengine.plan(folder(tmp_path, **mistral, sliding_window=None), device_memory="40GiB")
    plan = aioengine.plan(folder(tmp_path, **mistral, sliding_window=4096), device_memory="40GiB")
    assert plan.kv_bytes_per_token == (4096 + 32) * whole.kv_bytes_per_token // 32768
    assert plan.max_requests == plan.max_total_tokens // 32768 > 7 * whole.max_requests
    assert "16.1 KiB a token" in str(plan)


def test_attention_backend_can_compute_the_model(tmp_path: Path) -> None:
    latent = {
        "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "num_key_value_heads": 32, "q_lora_rank": None,
    }  # fmt: skip
    gemma = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0}
    for changes, of_cpu, of_gpu in ((latent, "torch", "triton"), (gemma, "torch", "flashinfer")):
        path = folder(tmp_path, **changes)
        assert aioengine.plan(path, device="cpu", device_memory="80GiB").attention_backend == of_cpu
        assert aioengine.plan(path, device_memory="80GiB").attention_backend == of_gpu


def test_plan_for_a_device_that_is_too_small(tmp_path: Path) -> None:
    plan = aioengine.plan(folder(tmp_path, max_position_embeddings=131072), device_memory=24 * 10**9)
    assert (plan.fits, plan.max_requests, plan.kv_pool_bytes, plan.max_total_tokens) == (False, 0, 0, 0)
    assert 0 <= plan.longest_context < 131072
    assert "too small for one request" in str(plan)
    smaller = aioengine.plan(tmp_path, device_memory="32GiB", context_length=2048, chunked_prefill_size=512)
    assert smaller.fits
    assert aioengine.plan(tmp_path, device_memory="8GiB").longest_context == 0
    cpu = aioengine.plan(tmp_path, device="cpu", dtype="float32", device_memory="64GiB", max_total_tokens=20000)
    assert (cpu.device, cpu.weights_bytes) == ("cpu", 4 * plan.num_parameters)
    assert (cpu.max_total_tokens, cpu.kv_bytes_per_token) == (20000, 2 * plan.kv_bytes_per_token)
    assert cpu.max_requests == 0  # the requested pool is smaller than one context


def test_plan_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = aioengine.plan(device="cpu")
    assert plan.model_path == str(DEMO_MODEL)
    assert plan.device_memory == pytest.approx(machine.free_host_memory(), rel=0.5)
    assert plan.fits
    facts = machine.device_facts()
    monkeypatch.setattr(machine, "device_facts", lambda: replace(facts, num_gpus=0, has_triton=False))
    with pytest.raises(ValueError, match="no NVIDIA GPU; give device_memory"):
        aioengine.plan(device="cuda")
    monkeypatch.setattr(machine, "device_facts", lambda: replace(facts, num_gpus=1, has_triton=True))
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-a, 1000'\necho '1, GPU-b, 2000'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert aioengine.plan().device_memory == 1000 << 20
    for visible in ("1", "GPU-b", "1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert aioengine.plan().device_memory == 2000 << 20
    smi.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ValueError, match="report the memory of 1 GPU.*give device_memory"):
        aioengine.plan()


def test_embedder_has_no_kv_cache(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 3000, "hidden_size": 64}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes, "max_position_embeddings": 128}))
    plan = aioengine.plan(tmp_path, device_memory="24GiB")
    assert (plan.task, plan.dtype, plan.kv_bytes_per_token, plan.fits) == ("embed", "float16", 0, True)
    assert plan.max_requests == 1024


@pytest.mark.parametrize("value", ["", "80 apples", 0, -5, True, 1.5, "9999999TB", "9" * 5000])
def test_invalid_device_memory_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="device_memory"):
        planning.plan(device_memory=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("1.5 g", 1_500_000_000), ("24 GB", 24 * 10**9), (7, 7), ("7", 7)]
)
def test_device_memory_may_be_a_number_or_text_with_a_unit(text: int | str, size: int) -> None:
    assert planning.read_size(text) == size


def test_plan_refuses_the_same_arguments_as_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_act"):
        aioengine.plan(folder(tmp_path, hidden_act="swiglu"))
    with pytest.raises(ValueError, match="context_length must be at most 8192"):
        aioengine.plan(folder(tmp_path), context_length=9000)
    with pytest.raises(TypeError, match="no_such"):
        aioengine.plan(tmp_path, no_such=1)  # type: ignore[call-arg]


def test_plan_downloads_only_config_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["configs_only"]))
        return str(folder(tmp_path))

    monkeypatch.setattr(model_folder, "download", download)
    plan = aioengine.plan("owner/name", device_memory="80GiB", tokenizer_path="other/words")
    assert asked == [("owner/name", True)]
    assert plan.num_parameters == 8_030_261_248
    assert "refuse" not in plan.reason  # weights on the hub are not read


def test_plan_downloads_headers_of_weights_for_transformers_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"model.embed_tokens.weight": (128256, 64), "model.layers.0.self_attn.q_proj.weight": (64, 64)}
    asked: list[tuple[str, str | None]] = []

    def weight_shapes(name: str, *, revision: str | None) -> dict[str, tuple[int, int]]:
        asked.append((name, revision))
        return shapes

    monkeypatch.setattr(model_folder, "download", lambda *_, **__: str(folder(tmp_path, model_type="nemotron")))
    monkeypatch.setattr(model_folder, "weight_shapes", weight_shapes)
    plan = aioengine.plan("owner/name", device_memory="80GiB", revision="main")
    assert asked == [("owner/name", "main")]
    assert (plan.implementation, plan.num_parameters) == ("transformers", 128256 * 64 + 64 * 64)
    with pytest.raises(ValueError, match="is read from its weight files: .*has no weights"):
        aioengine.plan(tmp_path, device_memory="80GiB")


def test_info_command_prints_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder(tmp_path))
    assert main(["info", path, "--device-memory", "80GiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == set(Plan.__struct_fields__)
    assert result["context_length"] == 8192
    assert main(["info", path, "--device-memory", "80GiB", "--context-length", "4096"]) == 0
    assert "4,096 tokens" in capsys.readouterr().out
    assert main(["info", "--device-memory", "80GiB"]) == 2
    assert main(["info", path, "--model", path]) == 2
    assert main(["info", ""]) == 1
    assert "model_path is empty" in capsys.readouterr().err
    assert main(["info", path, "--device-memory", "lots"]) == 2
    assert "device_memory must be" in capsys.readouterr().err
    assert main(["info", str(tmp_path / "none")]) == 1


def test_plan_does_not_import_torch() -> None:
    code = "import sys, aioengine; print(aioengine.plan(device='cpu')); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Qwen3ForCausalLM" in done.stdout


def test_plan_has_the_sizes_of_one_rank(tmp_path: Path) -> None:
    path = folder(tmp_path)
    one_rank, two, sixteen = (
        aioengine.plan(path, device="cuda", device_memory="80GiB", tp_size=num_ranks) for num_ranks in (1, 2, 16)
    )
    norms = 2 * 65 * 4096
    assert two.weights_bytes - norms == (one_rank.weights_bytes - norms) // 2
    assert two.kv_bytes_per_token == one_rank.kv_bytes_per_token // 2
    assert two.activations_bytes < one_rank.activations_bytes
    assert sixteen.kv_bytes_per_token == one_rank.kv_bytes_per_token // 8  # a rank has at least one KV head
    assert (one_rank.tp_size, two.tp_size, two.num_parameters) == (1, 2, one_rank.num_parameters)
    assert two.max_total_tokens > one_rank.max_total_tokens
    assert "2 ranks; sizes are of one rank" in str(two)
    with pytest.raises(ValueError, match="tp_size=3 does not work for this model: it has 32 attention heads, 8 KV"):
        aioengine.plan(path, device="cuda", device_memory="80GiB", tp_size=3)


def test_plan_counts_the_inboxes_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def activations(device: str, num_ranks: int) -> int:
        plan = aioengine.plan(
            folder(tmp_path), device=device, device_memory="80GiB", tp_size=num_ranks, chunked_prefill_size=2048
        )
        return plan.activations_bytes

    cases = [("cuda", 1), ("cuda", 2), ("cuda", 4), ("cpu", 2)]
    with_inboxes = [activations(*case) for case in cases]
    monkeypatch.setattr(planning, "inbox_bytes", lambda *_, **__: 0)
    added = [total - activations(*case) for total, case in zip(with_inboxes, cases, strict=True)]
    assert added == [0, 2 * 2048 * 2 * 4096, 0, 0]


def test_ranks_on_a_cpu_share_its_memory(tmp_path: Path) -> None:
    one_rank, two = (aioengine.plan(folder(tmp_path), device="cpu", device_memory="80GiB", tp_size=n) for n in (1, 2))
    assert two.device_memory == one_rank.device_memory // 2
