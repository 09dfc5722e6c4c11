"""Constructor arguments: names, aliases, ranges, missing features, and arguments without effect."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from aioengine import AsyncEngine, Engine, EngineArguments
from aioengine.api.args import ARGUMENTS, engine_config
from aioengine.api.foreign_names import ALIASES
from aioengine.settings.config import EngineConfig

DOCUMENTED = """
    model_path tokenizer_path device dtype context_length trust_remote_code model_impl load_format random_seed
    quantization quantization_group_size kv_cache_dtype
    max_running_requests max_queued_requests max_queued_tokens max_total_tokens mem_fraction_static page_size
    chunked_prefill_size schedule_policy disable_radix_cache disable_overlap_schedule tp_size dp_size executor
    load_balance_method base_gpu_id disable_cuda_graph
    tenant_weights max_queued_bytes max_logprob_bytes slow_reader slow_reader_timeout
    cuda_graph_max_bs attention_backend stream_interval skip_tokenizer_init max_restarts restart_window stall_timeout
    startup_timeout revision download_dir log_level progress chat_template enable_deterministic_inference is_embedding
    allow_request_templates sampling_defaults enable_lora lora_paths max_loras_per_batch max_lora_rank
    lora_target_modules max_loaded_loras
    logits_processors logprobs_mode max_hidden_state_bytes allowed_local_media_path allow_private_urls max_image_bytes
    max_image_pixels max_images_per_prompt media_timeout
    speculative_algorithm speculative_num_draft_tokens speculative_num_steps speculative_draft_model_path
    speculative_draft_model_revision speculative_draft_model_quantization enable_weights_cpu_backup
    enable_memory_saver
""".split()

WRONG_TYPES = {int: [True, "1", 1.5], float: [True, "1", []], bool: [0, "yes"], str: [5, b"x"]}


def test_every_documented_argument_works_and_no_other() -> None:
    assert set(ARGUMENTS) == set(DOCUMENTED)
    assert set(ALIASES.values()) <= set(ARGUMENTS)
    assert not set(ALIASES) & set(ARGUMENTS)


def test_without_arguments_all_fields_have_their_defaults() -> None:
    assert engine_config(None, {}) == EngineConfig()
    assert engine_config(None, dict.fromkeys(ARGUMENTS)) == EngineConfig()


def test_arguments_reach_their_sections() -> None:
    config = engine_config(
        None,
        {
            "model_path": Path("folder"),
            "dtype": "half",
            "device": "cpu",
            "page_size": 8,
            "disable_radix_cache": True,
            "disable_overlap_schedule": True,
            "max_queued_requests": 5,
            "stall_timeout": 2,
            "schedule_policy": "lpm",
            "chunked_prefill_size": -1,
            "random_seed": 7,
            "progress": False,
        },
    )
    assert (config.model.path, config.model.dtype, config.device.name) == ("folder", "float16", "cpu")
    assert (config.memory.page_size, config.memory.prefix_cache) == (8, False)
    assert (config.scheduler.overlap, config.scheduler.policy, config.scheduler.chunk_tokens) == (
        False,
        "longest_prefix",
        -1,
    )
    assert (config.queue.max_requests, config.supervision.stall_timeout_s) == (5, 2.0)
    assert (config.random_seed, config.progress) == (7, False)


def test_each_argument_changes_one_field() -> None:
    values = {int: 5, float: 0.5, bool: True}
    words: dict[str, str | int] = {
        "quantization": "int4",
        "quantization_group_size": 64,
        "device": "cpu",
        "load_balance_method": "round_robin",
        "executor": "ray",
        "dtype": "float32",
        "load_format": "dummy",
        "model_impl": "transformers",
        "attention_backend": "torch",
        "schedule_policy": "priority",
        "tenant_weights": "gold=3,free=0.5",
        "logits_processors": "a.b:C",
        "slow_reader": "pause",
        "log_level": "info",
        "logprobs_mode": "processed",
        "sampling_defaults": "engine",
        "allowed_local_media_path": "/",
        "kv_cache_dtype": "int8",
        "speculative_algorithm": "NGRAM",
        "speculative_draft_model_quantization": "int4",
    }
    seen: set[EngineConfig | str] = set()
    for name, argument in ARGUMENTS.items():
        value = 5.5 if name == "stall_timeout" else words.get(name, values.get(argument.read, "text"))
        seen.add(repr(engine_config(None, {name: value})))
    assert len(seen | {repr(EngineConfig())}) == len(ARGUMENTS) + 1


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_type_is_a_type_error_that_names_the_argument(name: str) -> None:
    for value in WRONG_TYPES[ARGUMENTS[name].read]:
        with pytest.raises(TypeError, match=name):
            engine_config(None, {name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("page_size", 0, "from 1 to 1024"),
        ("context_length", -1, "at least 1"),
        ("max_total_tokens", 10**30, "from 1 to 2147483647"),
        ("mem_fraction_static", 1.5, "up to 1"),
        ("mem_fraction_static", math.nan, "up to 1"),
        ("chunked_prefill_size", 0, "-1"),
        ("device", "cpuu", "did you mean 'cpu'"),
        ("dtype", "int3", "'bfloat16'"),
        ("log_level", "loud", "'warning'"),
        ("stall_timeout", math.inf, "2 to 86400"),
        ("stall_timeout", 1.9, "2 to 86400"),
        ("model_path", "\ud800", "surrogate"),
        ("allowed_local_media_path", "", "a folder that exists"),
        ("allowed_local_media_path", "/nowhere/at all", "a folder that exists"),
        ("logits_processors entries", ["a"], "package.module:Class"),
        ("logits_processors entries", "a:B,c.:D", "package.module:Class"),
        ("logits_processors entries", ["a:b c"], "package.module:Class"),
        ("tenant_weights", "gold", "tenant=number"),
        ("speculative_algorithm", "LOOKUP", "'NGRAM', 'STANDALONE', 'EAGLE', 'EAGLE3', 'MTP', 'NEXTN'"),
        ("speculative_num_draft_tokens", 1, "2"),
        ("speculative_num_draft_tokens", 17, "16"),
        ("speculative_num_steps", 0, "1"),
        ("tenant_weights", "=3", "tenant=number"),
        ("tenant_weights", "gold=3,free=-1", "tenant=number"),
    ],
)
def test_a_value_outside_the_range_is_a_value_error(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{allowed}"):
        engine_config(None, {name.partition(" ")[0]: value})


def test_logits_processors_are_names_of_classes() -> None:
    for given in (["a:B", "c.d:E"], ("a:B", "c.d:E"), "a:B,c.d:E"):
        assert engine_config(None, {"logits_processors": given}).device.logits_processors == ("a:B", "c.d:E")
    with pytest.raises(ValueError, match="logits_processors has '__main__:A': other processes cannot import __main__"):
        engine_config(None, {"logits_processors": ["__main__:A"]})
    with pytest.raises(TypeError, match=r"logits_processors entries must be a string, got 5"):
        engine_config(None, {"logits_processors": [5]})
    with pytest.warns(UserWarning, match="no effect in aioengine: enable_custom_logit_processor"):
        engine_config(None, {"enable_custom_logit_processor": True})


def test_weights_of_tenants_are_a_dict_or_text() -> None:
    for given in ({"a=b": 3, "free": 0.5}, "a=b=3,free=0.5"):
        assert engine_config(None, {"tenant_weights": given}).scheduler.tenant_weights == {"a=b": 3.0, "free": 0.5}
    for wrong in ({"a": 0}, {"a": "x"}, {"a": True}, {3: 1}):
        with pytest.raises((ValueError, TypeError), match="tenant_weights"):
            engine_config(None, {"tenant_weights": wrong})


def test_unknown_arguments_are_type_errors_with_a_suggestion() -> None:
    with pytest.raises(
        TypeError, match=r"unknown argument 'max_runing_requests' \(did you mean 'max_running_requests'"
    ):
        engine_config(None, {"max_runing_requests": 5})
    with pytest.raises(TypeError, match="unknown argument 'zzz'$"):
        engine_config(None, {"zzz": 5})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temperature", "it is a sampling parameter of each call, as sampling_params={'temperature': ...}"),
        ("max_tokens", "it is a sampling parameter of each call, as sampling_params={'max_tokens': ...}"),
        ("enable_thinking", "it is an argument of each call"),
        ("stream", "it is an argument of each call"),
    ],
)
def test_arguments_of_calls_are_refused_with_the_right_call(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"unknown argument {name!r}; {hint}")):
        engine_config(None, {name: 1})


def test_wrong_value_is_refused_by_the_name_that_the_user_wrote() -> None:
    message = r"mem_fraction_static \(given as gpu_memory_utilization\) must be a number above 0 and up to 1, got 1.5"
    with pytest.raises(ValueError, match=message):
        engine_config(None, {"gpu_memory_utilization": 1.5})


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_error_of_two_positional_arguments_names_no_internal_class(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\) takes from 1 to 2 positional arguments but 3 were given"):
        kind("a", "b")


def test_unknown_arguments_are_never_answered_with_one_that_has_no_effect() -> None:
    """``enable_metrics`` has no effect, and ``language_only`` belongs to a missing feature."""
    for name in ("enable_metric", "enable_symm_memory", "language_front"):
        with pytest.raises(TypeError, match=f"unknown argument '{name}'$"):
            engine_config(None, {name: True})


def test_misspelled_arguments_of_missing_features_name_the_feature() -> None:
    message = r"'pp_sizes' \('pp_size' belongs to a feature that is not available yet: pipeline parallelism\)$"
    with pytest.raises(TypeError, match=message):
        engine_config(None, {"pp_sizes": 2})


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_mean_the_same_and_exclude_the_name(alias: str) -> None:
    name = ALIASES[alias]
    number = 5.5 if name == "stall_timeout" else 0.5
    value = {int: 7, float: number, bool: True, str: "x"}[ARGUMENTS[name].read]
    assert engine_config(None, {alias: value}) == engine_config(None, {name: value})
    with pytest.raises(ValueError, match=f"argument '{name}' is given twice"):
        engine_config(None, {name: value, alias: value})


def test_the_model_may_be_set_only_once() -> None:
    assert engine_config("a", {}) == engine_config(None, {"model": "a"})
    with pytest.raises(ValueError, match="model_path is given twice"):
        engine_config("a", {"model_path": "b"})


@pytest.mark.parametrize(
    ("name", "value", "feature"),
    [
        ("pp_size", 2, "pipeline parallelism"),
        ("ep_size", 2, "expert parallelism"),
        ("speculative_model", "draft", "use speculative_algorithm and speculative_draft_model_path"),
        ("speculative_eagle_topk", 4, "trees of drafts"),
        ("enable_sleep_mode", True, "releasing memory"),
        ("override_generation_config", {"top_k": 5}, "default sampling parameters"),
    ],
)
def test_missing_features_are_refused(name: str, value: object, feature: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*{feature}.*not available yet"):
        engine_config(None, {name: value})


def test_missing_features_may_be_disabled() -> None:
    off = {"pp_size": 1, "lora_paths": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine_config(None, off) == EngineConfig()


DEFAULTS_ELSEWHERE: dict[str, object] = {
    "tp_size": 1, "pp_size": 1, "data_parallel_size": 1, "load_balance_method": "auto", "enable_dp_attention": False,
    "weight_version": "default", "model_loader_extra_config": "{}", "custom_weight_loader": [],
    "enable_weights_cpu_backup": False, "enable_return_routed_experts": False, "speculative_token_map": None,
    "encoder_only": False, "enable_fp32_lm_head": False, "rl_on_policy_target": None, "tool_call_parser": None,
}  # fmt: skip


def test_the_defaults_of_the_reference_engine_are_accepted() -> None:
    assert engine_config(None, DEFAULTS_ELSEWHERE) == EngineConfig()
    tuning = {"lora_backend": "csgmv", "disable_cuda_graph_padding": False, "numa_node": None, "hicache_ratio": 2.0}
    with pytest.warns(
        UserWarning, match="no effect in aioengine: disable_cuda_graph_padding, hicache_ratio, lora_backend"
    ):
        assert engine_config(None, tuning) == EngineConfig()


def test_arguments_without_effect_cause_one_warning_with_their_names() -> None:
    with pytest.warns(UserWarning, match="no effect in aioengine: host, log_requests, port") as caught:
        assert engine_config(None, {"port": 30000, "host": "::", "log_requests": True}) == EngineConfig()
    assert len(caught) == 1


class TestTypes:
    """Type checkers, editors and ``help`` see the arguments of the table."""

    def test_typed_names_are_the_accepted_arguments(self) -> None:
        assert set(get_type_hints(EngineArguments)) == (set(ARGUMENTS) | set(ALIASES)) - {"model_path"}
        own = [name for name in get_type_hints(EngineArguments) if name not in ALIASES]
        assert own == [name for name in ARGUMENTS if name != "model_path"]

    @pytest.mark.parametrize("name", [name for name in (*ARGUMENTS, *ALIASES) if name != "model_path"])
    def test_the_type_of_every_argument_allows_the_values_it_accepts(self, name: str) -> None:
        allowed = get_args(get_type_hints(EngineArguments)[name])
        assert {ARGUMENTS[ALIASES.get(name, name)].read, NoneType} <= set(allowed)

    @pytest.mark.parametrize("make", [Engine, AsyncEngine])
    def test_the_signature_has_every_argument_with_its_default(self, make: type) -> None:
        parameters = inspect.signature(make).parameters
        assert {name: entry.default for name, entry in parameters.items()} == {
            name: argument.default for name, argument in ARGUMENTS.items()
        }

    @pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "model_path"])
    def test_every_argument_is_described_with_its_default(self, name: str) -> None:
        lines = " ".join((EngineArguments.__doc__ or "").split())
        assert f" {name}: {ARGUMENTS[name].description}" in lines
        assert Engine.__init__.__doc__ == AsyncEngine.__init__.__doc__ == EngineArguments.__doc__

    def test_passing_the_defaults_changes_nothing(self) -> None:
        given = {name: argument.default for name, argument in ARGUMENTS.items()}
        assert engine_config(None, given) == EngineConfig()
        assert all(argument.unset for argument in ARGUMENTS.values() if argument.default is None)


def test_dtype_may_be_a_dtype_of_torch() -> None:
    class dtype:  # the name of the class in torch
        def __init__(self, word: str) -> None:
            self.word = word

        def __str__(self) -> str:
            return f"torch.{self.word}"

    for word in ("float32", "bfloat16", "float16"):
        for value in (dtype(word), f"torch.{word}"):
            assert engine_config(None, {"dtype": value}).model.dtype == word
    with pytest.raises(ValueError, match=r"dtype must be one of 'auto'.*, got 'int8'"):
        engine_config(None, {"dtype": dtype("int8")})
    with pytest.raises(TypeError, match="dtype must be one of 'auto'"):
        engine_config(None, {"dtype": 32})


@pytest.mark.parametrize(
    ("given", "adapters"),
    [
        (["/a/math", "/b/code/"], [("/a/math", "/a/math", "math", False), ("/b/code/", "/b/code/", "code", False)]),
        (["math=/a/b"], [("math", "/a/b", "", False)]),
        ([Path("/a/math")], [("/a/math", "/a/math", "math", False)]),
        ([Path("/a/r=8/b")], [("/a/r=8/b", "/a/r=8/b", "b", False)]),
        ({"math": "/a/b", "x=y": Path("/c")}, [("math", "/a/b", "", False), ("x=y", "/c", "", False)]),
        ([{"lora_name": "m", "lora_path": "/a", "pinned": True}], [("m", "/a", "", True)]),
        ("math=/a/b,/c/code", [("math", "/a/b", "", False), ("/c/code", "/c/code", "code", False)]),
        ([], []),
    ],
)
def test_lora_paths_may_have_several_forms(given: object, adapters: list[tuple[str, str, str, bool]]) -> None:
    parsed = engine_config(None, {"lora_paths": given}).lora.adapters
    assert [(adapter.name, adapter.path, adapter.alias, adapter.is_pinned) for adapter in parsed] == adapters


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (["m=/a", "m=/b"], ValueError, "two adapters named 'm'"),
        ([{"lora_name": "m"}], ValueError, r"lora_paths\[0\] must be a dict with lora_name, lora_path"),
        ([{"lora_name": "m", "lora_path": "/a", "pin": True}], ValueError, "a dict with lora_name"),
        ([{"lora_name": "", "lora_path": "/a"}], ValueError, "lora_name is empty"),
        ([{"lora_name": "m", "lora_path": 3}], TypeError, "lora_path must be a string"),
        ([5], TypeError, r"lora_paths\[0\]"),
        ({"m": None}, TypeError, "lora_path"),
        (["a\0b"], ValueError, "null character"),
    ],
)
def test_wrong_adapters_are_refused_by_name(given: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        engine_config(None, {"lora_paths": given})


def test_modules_of_adapters_are_names_or_all() -> None:
    for given, modules in (
        ("all", ()),
        (["all"], ()),
        ("q_proj,v_proj", ("q_proj", "v_proj")),
        (["q_proj"], ("q_proj",)),
    ):
        assert engine_config(None, {"lora_target_modules": given}).lora.modules == modules
    with pytest.raises(ValueError, match="lora_target_modules"):
        engine_config(None, {"lora_target_modules": []})
