"""Settings are resolved from config and facts: no None, no "auto", and no inconsistent values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from aioengine.api.args import engine_config
from aioengine.model_files.adapter_folder import AdapterFolder, read_folder
from aioengine.model_files.model_folder import ModelFacts, StoredWeights
from aioengine.settings.config import LoraSettings, RankSettings, Settings
from aioengine.settings.machine import DeviceFacts
from aioengine.settings.resolve import resolve
from tests.kit.fake_adapters import write_adapter

MODEL = ModelFacts(
    path="/model",
    architecture="LlamaForCausalLM",
    model_type="llama",
    context_length=1000,
    vocab_size=300,
    hidden_size=64,
    num_layers=2,
    dtype="bfloat16",
    tokenizer_path="/words",
)
MACHINE = DeviceFacts(num_threads=3, cpu_bfloat16=True, num_gpus=0, drawn_seed=99)


def settings(model: ModelFacts = MODEL, machine: DeviceFacts = MACHINE, **arguments: object) -> Settings:
    return resolve(engine_config(None, arguments), model, machine)


def test_defaults_on_a_cpu() -> None:
    resolved = settings()
    assert (resolved.model.path, resolved.model.dtype, resolved.model.load_format) == (
        "/model",
        "bfloat16",
        "safetensors",
    )
    assert (resolved.model.context_length, resolved.scheduler.context_length, resolved.model.vocab_size) == (
        1000,
        1000,
        300,
    )
    assert (resolved.memory.page_size, resolved.memory.num_pages) == (16, None)
    assert (resolved.scheduler.policy, resolved.scheduler.prefix_cache, resolved.scheduler.depth) == ("fcfs", True, 0)
    assert 256 <= resolved.scheduler.chunk_tokens <= 512
    assert (resolved.runner.device, resolved.runner.attention_backend, resolved.runner.num_threads) == (
        "cpu",
        "fused",
        1,
    )
    assert (resolved.text.tokenizer_path, resolved.random_seed, resolved.log_level) == ("/words", 99, "error")


def test_tiny_models_use_one_thread() -> None:
    tiny = replace(MODEL, hidden_size=256, num_layers=6, vocab_size=4096)
    small = replace(MODEL, hidden_size=896, num_layers=24, vocab_size=151_936)
    assert settings(tiny).runner.num_threads == 1
    assert settings(small).runner.num_threads == 3
    assert settings(replace(tiny, vocab_size=151_936)).runner.num_threads == 3


def test_resolved_settings_have_no_auto_and_survive_encoding() -> None:
    encoded = msgspec.json.encode(settings())
    assert b'"auto"' not in encoded
    assert msgspec.json.decode(encoded, type=Settings) == settings()


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "has_bfloat16", "expected"),
    [
        ("auto", "bfloat16", True, "bfloat16"),
        ("auto", "float16", True, "bfloat16"),
        ("auto", "bfloat16", False, "float32"),
        ("auto", "float32", True, "float32"),
        ("bfloat16", "float32", False, "bfloat16"),
        ("float32", "bfloat16", True, "float32"),
    ],
)
def test_auto_dtype_is_the_dtype_of_the_weights_if_supported(
    wanted: str, checkpoint: str, has_bfloat16: bool, expected: str
) -> None:
    actual = settings(replace(MODEL, dtype=checkpoint), replace(MACHINE, cpu_bfloat16=has_bfloat16), dtype=wanted)
    assert actual.model.dtype == expected


@pytest.mark.parametrize(
    ("is_encoder", "checkpoint", "wanted", "expected"),
    [
        (True, "float32", "auto", "float16"),
        (False, "float32", "auto", "bfloat16"),
        (True, "bfloat16", "auto", "bfloat16"),
        (False, "float16", "auto", "float16"),
        (True, "float32", "float32", "float32"),
        (False, "float32", "float16", "float16"),
    ],
)
def test_auto_dtype_on_a_gpu_has_16_bits(is_encoder: bool, checkpoint: str, wanted: str, expected: str) -> None:
    model = replace(MODEL, is_encoder=is_encoder, is_causal=not is_encoder, dtype=checkpoint)
    actual = settings(model, replace(MACHINE, num_gpus=1, has_triton=True), dtype=wanted)
    assert (actual.model.dtype, actual.model.checkpoint_dtype) == (expected, checkpoint)


def test_sizes_affect_the_defaults_of_other_sizes() -> None:
    assert settings(max_total_tokens=100, page_size=16).memory.num_pages == 6
    assert settings(context_length=10).scheduler.context_length == 10
    assert settings(chunked_prefill_size=-1).scheduler.chunk_tokens == 1000
    small = settings(chunked_prefill_size=8).scheduler
    assert (small.chunk_tokens, small.max_running) == (8, 8)
    both = settings(chunked_prefill_size=8, max_running_requests=20).scheduler
    assert (both.chunk_tokens, both.max_running) == (20, 20)
    assert settings(random_seed=0).random_seed == 0
    assert settings(skip_tokenizer_init=True).text.tokenizer_path is None
    assert settings(disable_radix_cache=True).scheduler.prefix_cache is False
    assert settings(mem_fraction_static=0.9).memory.mem_fraction_static == 0.9


def test_speculation_sets_the_number_of_drafts() -> None:
    assert settings().scheduler.max_drafts == 0
    given: list[tuple[dict[str, object], int]] = [
        ({}, 7),
        ({"speculative_num_draft_tokens": 5}, 4),
        ({"speculative_num_steps": 4}, 4),
        ({"speculative_num_steps": 4, "speculative_num_draft_tokens": 5}, 4),
    ]
    for arguments, max_drafts in given:
        assert settings(speculative_algorithm="ngram", **arguments).scheduler.max_drafts == max_drafts
        if arguments:
            with pytest.raises(ValueError, match="has an effect only with speculative_algorithm"):
                settings(**arguments)
    with pytest.raises(ValueError, match=r"speculative_num_draft_tokens=4 must be speculative_num_steps \+ 1 = 5"):
        settings(speculative_algorithm="NGRAM", speculative_num_steps=4, speculative_num_draft_tokens=4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"keeps_states": True}, "cannot be taken back"), ({"task": "embed"}, "does not generate")],
)
def test_models_that_cannot_be_drafted_for_are_refused_by_name(changes: dict[str, object], why: str) -> None:
    model = replace(MODEL, model_type="some_type", **changes)
    with pytest.raises(ValueError, match=rf"speculative_algorithm='NGRAM' does not work .*some_type.*{why}"):
        settings(model, speculative_algorithm="NGRAM")
    assert settings(model).scheduler.max_drafts == 0


def with_draft(draft: ModelFacts, model: ModelFacts = MODEL, **arguments: object) -> Settings:
    """Resolve the settings of an engine with this draft model."""
    path: dict[str, object] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small"}
    return resolve(engine_config(None, {**path, **arguments}), model, MACHINE, (), draft)


def test_a_draft_model_has_its_own_settings() -> None:
    assert settings().runner.draft is None
    draft = replace(MODEL, path="small", is_latent=True, context_length=MODEL.context_length // 2)
    draft_settings = with_draft(draft, speculative_draft_model_quantization="int8").runner.draft
    assert draft_settings is not None
    assert (draft_settings.model.path, draft_settings.model.context_length) == ("small", MODEL.context_length // 2)
    assert (draft_settings.model.quantization, draft_settings.attention_backend) == ("int8", "torch")


@pytest.mark.parametrize(
    ("model", "draft", "max_length"),
    [
        ({}, {}, 1000),
        ({}, {"short_length": 300}, 300),
        ({"windows": (200, 200)}, {}, 200),
        ({"windows": (200, None)}, {}, 1000),
        ({"windows": (5000, 5000)}, {}, 1000),
    ],
)
def test_a_draft_model_proposes_up_to_its_length(model: dict[str, Any], draft: dict[str, Any], max_length: int) -> None:
    draft_settings = with_draft(replace(MODEL, **draft), replace(MODEL, **model)).runner.draft
    assert draft_settings is not None
    assert draft_settings.model.context_length == max_length


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_algorithm": "STANDALONE"}, "needs speculative_draft_model_path"),
        ({"speculative_draft_model_quantization": "int8"}, "only with speculative_draft_model_path"),
        ({"speculative_draft_model_revision": "main"}, "only with speculative_draft_model_path"),
    ],
)
def test_speculation_without_its_draft_model_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**arguments)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"speculative_algorithm": None}, "has an effect only with speculative_algorithm='STANDALONE'"),
        ({"keeps_states": True}, {}, "cannot be a draft model.*cannot be taken back"),
        ({"task": "embed"}, {}, "cannot be a draft model.*does not generate text"),
        ({}, {"speculative_draft_model_quantization": "fp8"}, "^speculative_draft_model_quantization='fp8'"),
    ],
)
def test_draft_models_that_cannot_propose_are_refused(
    changes: dict[str, Any], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_draft(replace(MODEL, **changes), **arguments)


def test_defaults_on_a_gpu() -> None:
    machine = replace(MACHINE, num_gpus=1, has_triton=True)
    resolved = settings(machine=machine)
    assert (resolved.runner.device, resolved.runner.attention_backend, resolved.scheduler.depth) == (
        "cuda",
        "flashinfer",
        1,
    )
    assert (resolved.scheduler.chunk_tokens, resolved.scheduler.max_running) == (8192, 1024)
    assert resolved.scheduler.decode_cost > 1
    assert (resolved.runner.cuda_graph_max_rows, resolved.memory.mem_fraction_static) == (1024, 0.88)
    assert settings(MODEL, machine, disable_overlap_schedule=True).scheduler.depth == 0
    assert settings(MODEL, machine, disable_cuda_graph=True).runner.cuda_graph_max_rows == 0
    assert settings(MODEL, machine, cuda_graph_max_bs=64).runner.cuda_graph_max_rows == 64
    assert settings(MODEL, machine, max_running_requests=5).runner.cuda_graph_max_rows == 5
    assert settings(MODEL, machine, device="cpu").runner.device == "cpu"
    assert settings(MODEL, machine, dtype="half").model.dtype == "float16"


def test_smaller_embedders_have_larger_steps_on_a_gpu() -> None:
    machine = replace(MACHINE, num_gpus=1, has_triton=True)
    base = replace(MODEL, task="embed", is_causal=False, vocab_size=30_522, hidden_size=768, num_layers=12)
    large, largest = replace(base, hidden_size=1024, num_layers=24), replace(base, hidden_size=4096, num_layers=36)
    results = [settings(model, machine).scheduler.chunk_tokens for model in (MODEL, base, large, largest)]
    assert results == [8192, 31_744, 10_240, 8192]
    assert settings(base, machine, chunked_prefill_size=64).scheduler.chunk_tokens == 64
    assert settings(base, machine, device="cpu").scheduler.chunk_tokens == 512


def test_attention_backend_fits_the_model() -> None:
    machine = replace(MACHINE, num_gpus=1, has_triton=True)

    def backends(model: ModelFacts = MODEL, **arguments: object) -> tuple[str, str]:
        runner = settings(model, machine, **arguments).runner
        return runner.attention_backend, runner.fallback_backend

    assert backends() == ("flashinfer", "triton")
    assert backends(attention_backend="flashinfer") == ("flashinfer", "")
    assert backends(attention_backend="torch") == ("torch", "")
    assert backends(dtype="float32") == ("triton", "triton")
    latent, soft_cap = replace(MODEL, is_latent=True), replace(MODEL, has_soft_cap=True)
    assert backends(latent) == ("triton", "triton")
    assert backends(soft_cap) == ("flashinfer", "triton")
    for model in (latent, soft_cap):
        assert settings(model).runner.attention_backend == "torch"
        assert settings(model, attention_backend="fused").runner.attention_backend == "torch"
    with pytest.raises(ValueError, match="'flashinfer' has no latent attention.*allowed: 'triton', 'torch', 'auto'"):
        backends(latent, attention_backend="flashinfer")
    assert settings(startup_timeout=100).runner.compile_timeout_s == pytest.approx(90)


def test_deterministic_inference_chooses_batch_invariance() -> None:
    machine = replace(MACHINE, num_gpus=1, has_triton=True)
    on = {"enable_deterministic_inference": True}
    assert settings(MODEL, machine).runner.batch_invariant is False
    runner = settings(MODEL, machine, **on).runner
    assert (runner.batch_invariant, runner.attention_backend) == (True, "triton")
    assert settings(MODEL, machine, attention_backend="triton", **on).runner.attention_backend == "triton"
    for backend in ("flashinfer", "torch"):
        with pytest.raises(ValueError, match=f"attention_backend='{backend}'.*allowed: 'auto', 'triton'"):
            settings(MODEL, machine, attention_backend=backend, **on)
    assert settings(MODEL, **on).runner.attention_backend == "fused"  # a CPU
    assert settings(MODEL, attention_backend="torch", **on).runner.attention_backend == "torch"


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_gpu_backends_are_refused_on_a_cpu(backend: str) -> None:
    with pytest.raises(ValueError, match=f"attention_backend='{backend}' needs an NVIDIA GPU"):
        settings(attention_backend=backend)


def test_cpu_backend_is_refused_on_a_gpu() -> None:
    assert settings(attention_backend="fused").runner.attention_backend == "fused"
    with pytest.raises(ValueError, match="attention_backend='fused' is for the CPU"):
        settings(machine=replace(MACHINE, num_gpus=1, has_triton=True), attention_backend="fused")


def test_quantization_while_loading() -> None:
    model = settings(quantization="int4").model
    assert (model.quantization, model.quantization_group_size) == ("int4", 128)
    assert settings(quantization="int4", quantization_group_size=32).model.quantization_group_size == 32
    gpu = replace(MACHINE, num_gpus=1, has_triton=True)
    assert settings(machine=gpu, quantization="fp8").model.quantization == "fp8"
    stored = replace(MODEL, is_quantized=True)
    assert settings(stored, quantization="fp8").model.quantization == ""
    assert settings(quantization="gguf").model.quantization == ""
    with pytest.raises(ValueError, match=r"quantization='fp8' does not work on a CPU; allowed there: int8, int4"):
        settings(quantization="fp8")
    for method in ("int8", None):
        with pytest.raises(ValueError, match="quantization_group_size=64 has an effect only with quantization='int4'"):
            settings(quantization=method, quantization_group_size=64)


def test_kv_cache_dtype_fits_the_device_and_the_model() -> None:
    gpu = replace(MACHINE, num_gpus=1, has_triton=True)
    assert settings(kv_cache_dtype="int8").memory.kv_dtype == "int8"
    assert settings(kv_cache_dtype="auto").memory.kv_dtype is None
    assert settings(kv_cache_dtype="bfloat16").memory.kv_dtype is None
    assert settings(kv_cache_dtype="bfloat16", dtype="float32").memory.kv_dtype == "bfloat16"
    with pytest.raises(ValueError, match="'fp8_e4m3' does not work on a CPU; allowed there: bfloat16, int8"):
        settings(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="'int8' does not work on a GPU; allowed there: bfloat16, fp8_e4m3"):
        settings(machine=gpu, kv_cache_dtype="int8")
    fp8 = settings(machine=gpu, kv_cache_dtype="fp8")
    assert (fp8.memory.kv_dtype, fp8.runner.attention_backend) == ("fp8_e4m3", "flashinfer")
    with pytest.raises(ValueError, match="'fp8_e4m3' does not work on a GPU with latent attention.*allowed: 'auto'"):
        settings(replace(MODEL, is_latent=True), gpu, kv_cache_dtype="fp8_e4m3")
    assert settings(replace(MODEL, is_latent=True), kv_cache_dtype="int8").memory.kv_dtype == "int8"
    with pytest.raises(ValueError, match="kv_cache_dtype='int8': this model has no KV cache; allowed: 'auto'"):
        settings(replace(MODEL, is_causal=False), kv_cache_dtype="int8")


def test_a_gpu_without_triton_is_not_used() -> None:
    assert settings(machine=replace(MACHINE, num_gpus=1)).runner.device == "cpu"


def test_inconsistent_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="context_length must be at most 1000.*got 1001"):
        settings(context_length=1001)
    with pytest.raises(ValueError, match="max_total_tokens must be at least one page"):
        settings(max_total_tokens=8, page_size=16)
    with pytest.raises(ValueError, match="device='cuda' is not available"):
        settings(device="cuda")
    with pytest.raises(ValueError, match="attention_backend='flashinfer' needs an NVIDIA GPU"):
        settings(attention_backend="flashinfer")
    with pytest.raises(ValueError, match="dtype='float16' is not available on a CPU"):
        settings(dtype="half")
    with pytest.raises(ValueError, match="no tokenizer.*skip_tokenizer_init"):
        settings(replace(MODEL, tokenizer_path=None))
    with pytest.raises(ValueError, match="'elsewhere' has no tokenizer;"):
        settings(replace(MODEL, tokenizer_path=None), tokenizer_path="elsewhere")
    with pytest.raises(ValueError, match="no weights here"):
        settings(replace(MODEL, weights=StoredWeights(missing="no weights here")))
    with pytest.raises(ValueError, match="load_format='gguf', but '/model' is no GGUF file"):
        settings(load_format="gguf")
    assert (
        settings(replace(MODEL, weights=StoredWeights(missing="x")), load_format="dummy").model.load_format == "dummy"
    )


@pytest.mark.parametrize(
    ("page_size", "arguments", "message"),
    [
        (3, {}, "power of two from 1 to 512 with attention_backend='fused', got 3; attention_backend='torch'"),
        (1024, {}, "power of two from 1 to 512"),
    ],
)
def test_page_sizes_that_fused_does_not_support_are_refused(
    page_size: int, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(page_size=page_size, **arguments)


def test_other_backends_support_all_page_sizes() -> None:
    gpu = replace(MACHINE, num_gpus=1, has_triton=True)
    assert settings(machine=gpu, page_size=3).memory.page_size == 3
    assert settings(machine=gpu, page_size=1024, attention_backend="triton").memory.page_size == 1024
    assert [settings(page_size=2**power).memory.page_size for power in range(10)] == [2**power for power in range(10)]
    for machine in (gpu, MACHINE):
        assert settings(machine=machine, page_size=1000, attention_backend="torch").memory.page_size == 1000


LAYERS = {
    f"model.layers.{layer}.self_attn.{name}": (8, 8) for layer in range(2) for name in ("q_proj", "k_proj", "v_proj")
}
ADAPTED = replace(MODEL, linear_layers=LAYERS)


def lora_of(folders: list[AdapterFolder], **arguments: object) -> LoraSettings | None:
    return resolve(engine_config(None, arguments), ADAPTED, MACHINE, folders).runner.lora


def test_ranks_and_modules_come_from_adapters_in_lora_paths(tmp_path: Path) -> None:
    layers = {name: shape for name, shape in LAYERS.items() if "q_proj" in name}
    folders = [
        read_folder(write_adapter(tmp_path / "a", rank=4, layers=layers)),
        read_folder(write_adapter(tmp_path / "b", rank=2, layers=LAYERS)),
    ]
    paths = [str(folder.path) for folder in folders]
    assert lora_of(folders, lora_paths=paths) == LoraSettings(
        num_slots=8, max_rank=4, modules=("k_proj", "q_proj", "v_proj")
    )
    assert lora_of(folders[:1], lora_paths=paths[:1], max_lora_rank=16, lora_target_modules="all") == LoraSettings(
        num_slots=8, max_rank=16
    )


def test_ranks_and_modules_are_required_without_lora_paths() -> None:
    assert lora_of([]) is lora_of([], enable_lora=False) is lora_of([], max_lora_rank=8) is None
    bounds = {"max_lora_rank": 8, "lora_target_modules": ["qkv_proj"], "max_loras_per_batch": 2, "max_loaded_loras": 3}
    assert lora_of([], enable_lora=True, **bounds) == LoraSettings(
        num_slots=2, max_rank=8, modules=("q_proj", "k_proj", "v_proj"), max_loaded=3
    )
    with pytest.raises(ValueError, match=r"max_lora_rank.*lora_target_modules"):
        lora_of([], enable_lora=True, max_lora_rank=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"enable_lora": False, "lora_paths": ["a=/a"]}, "lora_paths is set, but enable_lora=False"),
        ({"max_loaded_loras": 3, "max_loras_per_batch": 4}, "at least max_loras_per_batch=4, got 3"),
        (
            {"lora_target_modules": ["q_proj", "x_proj"]},
            "'x_proj', which this model does not have; it has k_proj, q_proj",
        ),
        (
            {"lora_paths": [{"lora_name": "a", "lora_path": "/a", "pinned": True}], "max_loras_per_batch": 1},
            "1 pinned adapter; max_loras_per_batch=1 must be larger",
        ),
    ],
)
def test_inconsistent_adapter_limits_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lora_of([], **{"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": "all", **arguments})


def test_adapters_are_refused_for_bidirectional_models() -> None:
    with pytest.raises(ValueError, match="attend in both directions"):
        settings(replace(MODEL, is_causal=False), enable_lora=True, max_lora_rank=8, lora_target_modules="all")


DIVISIBLE = replace(MODEL, rank_counts=(1, 2, 4), rank_sizes="it has 4 attention heads")
GPUS = replace(MACHINE, num_gpus=2, has_triton=True)


def test_ranks_share_the_cores_of_a_cpu() -> None:
    large = replace(DIVISIBLE, hidden_size=896, num_layers=24)
    assert settings(large).runner.ranks is None
    for num_ranks, num_threads in ((2, 1), (4, 1)):
        runner = settings(large, tp_size=num_ranks).runner
        assert (runner.ranks, runner.num_threads) == (RankSettings(size=num_ranks), num_threads)


def test_replicas_share_the_cores_of_a_cpu() -> None:
    large, machine = replace(DIVISIBLE, hidden_size=896, num_layers=24), replace(MACHINE, num_threads=12)
    for num_ranks, num_replicas in ((1, 3), (2, 2)):
        runner = settings(large, machine, device="cpu", tp_size=num_ranks, dp_size=num_replicas).runner
        assert runner.num_threads == 12 // runner.num_runners == 12 // (num_ranks * num_replicas)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ({"tp_size": 3}, {}, "tp_size=3 does not work for this model: it has 4 attention heads; allowed: 1, 2, 4"),
        ({"tp_size": 4, "device": "cuda"}, {}, "tp_size=4, dp_size=1 and base_gpu_id=0 need 4 GPUs, and .* has 2"),
        (
            {"tp_size": 2, "dp_size": 2},
            {},
            "tp_size=2, dp_size=2 and base_gpu_id=0 need 4 GPUs, and this machine has 2",
        ),
        ({"base_gpu_id": 2}, {}, "tp_size=1, dp_size=1 and base_gpu_id=2 need 3 GPUs, and this machine has 2"),
        (
            {"tp_size": 2, "speculative_algorithm": "EAGLE", "speculative_draft_model_path": "head"},
            {},
            "tp_size=2 does not work with speculative_algorithm='EAGLE' yet; allowed: 'NGRAM', 'STANDALONE'",
        ),
    ],
)
def test_ranks_that_do_not_work_are_refused(
    arguments: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(replace(DIVISIBLE, **changes), GPUS, **arguments)  # pyright: ignore[reportArgumentType]


def test_two_ranks_use_two_gpus() -> None:
    runner = settings(DIVISIBLE, GPUS, tp_size=2).runner
    assert (runner.device, runner.ranks, runner.cuda_graph_max_rows) == ("cuda", RankSettings(size=2), 1024)
