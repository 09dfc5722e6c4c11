"""Models that run with the code of transformers: results of all kinds of steps, and refused models."""

from __future__ import annotations

import functools
import json
import logging
import sys
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from msgspec.structs import replace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    XLMRobertaConfig,
)

from aioengine.families._config import Task, as_embedder
from aioengine.families._fallback_config import read_fallback_config
from aioengine.kernels.heads import write_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.models._base import ModelInputs
from aioengine.models._fallback import TransformersFolder
from aioengine.protocol.messages import Sampling
from aioengine.runner import weights
from aioengine.runner.device_memory import NoAttention
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import Stepper, options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from aioengine.models._base import Model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, PreTrainedConfig] = {
    "windows and soft caps": Gemma2Config(**SIZES, head_dim=16, sliding_window=8),
    "sinks": GptOssConfig(
        **SIZES, head_dim=16, sliding_window=8, layer_types=KINDS, num_local_experts=4, num_experts_per_tok=2
    ),
    "experts": MixtralConfig(**SIZES, num_local_experts=4),
    "partial rotary": PhiConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "parallel blocks, tied": CohereConfig(**SIZES, tie_word_embeddings=True),
    "smaller values": DeepseekV2Config(**DEEPSEEK),
    "experts of DeepSeek-V3": DeepseekV3Config(**DEEPSEEK, n_group=2, topk_group=1),
    "plain": LlamaConfig(**SIZES),
}


def save(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Save and return a random model whose logits clearly differ."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif not name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=0.0 if "Gemma" in type(model).__name__ else 1.0, std=0.1)
    model.save_pretrained(folder)
    return model


def load(folder: Path, task: Task = Task.GENERATE, max_positions: int = 64) -> Model:
    transformers_folder = TransformersFolder(folder, task, trust_remote_code=False, has_weights=True)
    model = transformers_folder.load(options(max_positions=max_positions))
    weights.load(model, folder, load_format="safetensors", seed=0, report=lambda *_: None)
    return model


def world(
    folder: Path, implementation: str = "transformers", *, chunk_tokens: int = 512, num_pages: int = 256
) -> World:
    settings = make_settings(folder, chunk_tokens=chunk_tokens, num_pages=num_pages)
    return World(replace(settings, model=replace(settings.model, implementation=implementation)))


@pytest.mark.parametrize("kind", CONFIGS)
@torch.inference_mode()
def test_logits_and_greedy_tokens_match_transformers(kind: str, tmp_path: Path) -> None:
    reference = save(CONFIGS[kind], tmp_path)
    prompt = torch.randint(3, 96, (40,))
    expected = reference(prompt[None], use_cache=False).logits[0]
    stepper = Stepper(load(tmp_path), page_size=4)
    for chunks in ([40], [5, 9, 1]):
        torch.testing.assert_close(stepper.run(prompt.tolist(), chunks), expected, rtol=1e-4, atol=1e-4)
    prompts = [prompt[first : first + size].tolist() for first, size in ((0, 17), (5, 6))]
    num = 26
    answers = [greedy(reference, ids, num) for ids in prompts]
    chunked = world(tmp_path, chunk_tokens=7)
    assert chunked.answers(prompts, max_new_tokens=num) == answers
    assert chunked.answers(prompts, max_new_tokens=num) == answers
    assert any(chunked.num_cached.values())
    short_of_pages = world(tmp_path, num_pages=16)
    assert short_of_pages.answers(prompts, max_new_tokens=num) == answers
    gives_back = "page_windows" in short_of_pages.runner.facts  # then there is memory for both
    assert short_of_pages.num_preemptions > 0 or gives_back


class Attention(NoAttention):
    """Attention that adds a sum over all tokens to each query."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """q [T, H, E] -> [T, H * E]."""
        return (q + v[:, :1].sum(0) + layer).flatten(1).contiguous()


def greedy(model: PreTrainedModel, prompt: list[int], num: int) -> list[int]:
    ids = torch.tensor([prompt])
    result = cast("Any", model).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False)
    return result[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fallback_matches_our_own_families(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    prompts = [[5, 6, 7, 8, 9], [4, 3], list(range(3, 33))]
    sampling = [Sampling(seed, temperature=0.8, top_p=0.9) for seed in range(3)]
    own, fallback = (world(tmp_path, name) for name in ("aioengine", "transformers"))
    assert fallback.answers(prompts) == own.answers(prompts)
    assert fallback.answers(prompts, sampling) == own.answers(prompts, sampling)


@pytest.mark.parametrize(
    ("config", "max_positions", "message"),
    [
        (MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96), 64, "in addition to keys and values"),
        (BertConfig(**SIZES), 64, "attend to later"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            65,
            "=64 works",
        ),
        (
            XLMRobertaConfig(**{**SIZES, "is_decoder": True, "pad_token_id": 1}),
            32,
            "looks up position 0 at another place",
        ),
        (OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=48), 65, "has a table of 64 positions; context_length=64"),
    ],
    ids=["states", "both directions", "positions of the longest text", "other positions", "positions beyond a table"],
)
def test_unsupported_models_are_refused_with_a_reason(
    config: PreTrainedConfig, max_positions: int, message: str, tmp_path: Path
) -> None:
    config.architectures = ["AnyForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"'{config.model_type}'.*{message}"):
        load(tmp_path, max_positions=max_positions)


@pytest.mark.parametrize("part", ["text_config", "llm_config"])
def test_models_of_several_parts_are_refused_and_image_models_named(part: str) -> None:
    raw = {"model_type": "internvl", part: {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}}
    with pytest.raises(ValueError, match=rf"'internvl' .*has a text model in {part}; .*gemma3, .*llava"):
        read_fallback_config(raw)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "XLMWithLMHeadModel", "LlamaForCausalLM"])
def test_architecture_names_of_generating_models(name: str) -> None:
    raw = json.loads(LlamaConfig(**SIZES).to_json_string()) | {"architectures": [name]}
    assert read_fallback_config(raw).task is Task.GENERATE
    assert read_fallback_config(as_embedder(raw)).task is Task.EMBED


@torch.inference_mode()
def test_embedder_states_and_classifier_scores_match_transformers(tmp_path: Path) -> None:
    reference = save(CONFIGS["plain"], tmp_path / "generates")
    ids = torch.randint(3, 96, (9,))
    stepper = Stepper(load(tmp_path / "generates", Task.EMBED))
    torch.testing.assert_close(stepper.run(ids.tolist(), [9]), reference.base_model(ids[None]).last_hidden_state[0])
    config = LlamaConfig(**{**SIZES, "num_labels": 3})
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    classifier.save_pretrained(tmp_path / "classifies")
    stepper = Stepper(load(tmp_path / "classifies", Task.CLASSIFY))
    expected = classifier(ids[None]).logits[0]
    torch.testing.assert_close(stepper.run(ids.tolist(), [4, 5])[-1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["experts", "experts of DeepSeek-V3", "sinks"])
@torch.inference_mode()
def test_checkpoint_with_head_loads_as_embedder(kind: str, tmp_path: Path) -> None:
    """The checkpoint stores experts separately, under other names."""
    reference = save(CONFIGS[kind], tmp_path)
    ids = torch.randint(3, 96, (9,))
    actual = Stepper(load(tmp_path, Task.EMBED)).run(ids.tolist(), [4, 5])
    expected = reference.base_model(ids[None]).last_hidden_state[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_weights_are_bf16_except_where_transformers_keeps_fp32(tmp_path: Path) -> None:
    save(CONFIGS["experts of DeepSeek-V3"], tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    actual = TransformersFolder(tmp_path, Task.GENERATE, trust_remote_code=False, has_weights=True)
    model = actual.load(options(torch.bfloat16, max_positions=64))
    targets = model.weights()
    kept = {name for name, target in targets.items() if target.tensor.dtype == torch.float32}
    assert kept == {name for name, tensor in reference.state_dict().items() if tensor.dtype == torch.float32} != set()


@torch.inference_mode()
def test_shortened_model_computes_one_block(tmp_path: Path) -> None:
    save(CONFIGS["plain"], tmp_path)
    model, seen = load(tmp_path), list[int]()

    class Seen(NoAttention):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
            seen.append(layer)
            return super().attend(q, k, v, layer)

    ids = torch.zeros(5, dtype=torch.int64)
    hidden = model.shortened().forward(ModelInputs(positions=ids, token_ids=ids), Seen(model.attention_shape))
    assert hidden.shape == (5, model.hidden_size)
    assert seen == [0]


def test_heads_are_written_to_pages_and_packed() -> None:
    """q [T, H, E], k and v [T, K, E] of any strides."""
    q, k, v = (torch.randn(heads, 5, 4).transpose(0, 1) for heads in (6, 2, 2))
    slots = torch.tensor([7, 8, 9, 2, 3])
    for heads in (None, torch.zeros(5, 10, 4)):
        keys, values = torch.zeros(2, 3, 2, 4, 4)
        result = write_heads(q, k, v, target=KVTarget(slots, keys, values, heads))
        assert all(torch.equal(*pair) for pair in zip(result, (q, k, v), strict=True))
        assert torch.equal(keys.transpose(1, 2).flatten(0, 1)[slots], k)
        assert torch.equal(values.transpose(1, 2).flatten(0, 1)[slots], v)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_folder_runs_only_with_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    reference = save(CONFIGS["plain"], folder)
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'own_llama'.*trust_remote_code=True runs it"):
        world(folder)
    assert "transformers_modules" not in sys.modules
    settings = make_settings(folder)
    trusting = replace(settings.model, implementation="transformers", trust_remote_code=True)
    answers = World(replace(settings, model=trusting)).answers([[5, 6, 7]])
    assert answers == [greedy(reference, [5, 6, 7], 12)]
    (folder / "own.py").write_text("import no_such_package\n" + CODE)
    with pytest.raises(ValueError, match=r"does not read .*no_such_package"):
        World(replace(settings, model=trusting))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states + 0.2 * states.roll(1, 1), "tokens depend on each other outside attention"),
        (lambda states: states + states.mean(1, keepdim=True), "tokens depend on each other outside attention"),
        (lambda states: states[:, -1:], r"of 3 tokens it gives states \[1, 1, 48\]"),
    ],
)
def test_code_that_mixes_tokens_is_refused(
    change: Callable[[Any], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CONFIGS["plain"], tmp_path)
    forward = LlamaModel.forward

    @functools.wraps(forward)
    def mixing(self: Any, **given: Any) -> Any:
        output = forward(self, **given)
        output.last_hidden_state = change(output.last_hidden_state)
        return output

    monkeypatch.setattr(LlamaModel, "forward", mixing)
    with pytest.raises(ValueError, match=f"'llama' cannot run.*{message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_type"}, "does not read .*no_such_type"),
        ({"num_attention_heads": 5}, "hidden size .* heads"),
        ({"hidden_act": "no_such_act"}, "does not build .*no_such_act"),
        ({"num_hidden_layers": 4}, "missing: model.layers.3.input_layernorm.weight"),
        ({"intermediate_size": 81}, "and the model expects"),
        ({"intermediate_size": 0}, "layers.0.mlp.gate_proj.weight would be empty, .*0"),
    ],
)
def test_configs_that_transformers_refuses_raise_value_error(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save(CONFIGS["plain"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        world(tmp_path)


def test_log_names_the_implementation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(CONFIGS["plain"], tmp_path)
    with caplog.at_level(logging.INFO, "aioengine"):
        world(tmp_path)
    assert [record.message for record in caplog.records if record.name.startswith("aioengine")] == [
        "running model_type 'llama' with the code of transformers"
    ]
