"""Names of other engines: our names for the same things, or why these names are refused or ignored.

The other names of sampling parameters are fields of ``params.SamplingParams``, where type checkers see them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aioengine.api import checks

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

Missing = dict[str, tuple[tuple[object, ...], str]]
"""Argument of a missing feature -> (the values beside None that switch it off, the feature)."""

_VALUES: Final[dict[str, object]] = {"0": 0, "1": 1, "False": False, "[]": [], "{}": {}, "''": "", "'{}'": "{}"}
"""Values in the tables below that are not plain words."""


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Invert a table: from meaning -> names (separated by spaces) to name -> meaning."""
    return {name: meaning for meaning, names in groups.items() for name in names.split()}


def _missing(features: Mapping[str, str]) -> Missing:
    """Read a table: feature -> arguments, each with the values that switch it off, such as ``name=0|auto``."""
    missing: Missing = {}
    for argument, feature in _by_name(features).items():
        name, _, values = argument.partition("=")
        missing[name] = tuple(_VALUES.get(value, value) for value in values.split("|") if value), feature
    return missing


ALIASES: Final[dict[str, str]] = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "block_size": "page_size",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "enforce_eager": "disable_cuda_graph",
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "watchdog_timeout": "stall_timeout",
    "seed": "random_seed",
}
"""Other names of the constructor's arguments."""

MISSING_ARGUMENTS: Final = _missing(
    {
        "pipeline parallelism": "pp_size=1 pipeline_parallel_size=1",
        "data parallelism inside a model": "enable_dp_attention=False",
        "expert parallelism": "ep_size=1 enable_expert_parallel=False",
        "one model on several machines (for copies of it, use executor='ray' and dp_size)": "nnodes=1 node_rank=0",
        "trees of drafts": "speculative_eagle_topk=1",
        "drafts from a list of frequent tokens": "speculative_token_map",
        "speculation in this form (use speculative_algorithm and speculative_draft_model_path)": "speculative_config "
        "num_speculative_tokens speculative_model",
        "releasing memory by this name (use enable_memory_saver)": "enable_sleep_mode=False",
        "audio and video": "enable_multimodal=False",
        "a KV cache in several tiers": "enable_hierarchical_cache=False enable_lmcache=False kv_transfer_config",
        "torch.compile": "enable_torch_compile=False compilation_config",
        "sessions": "enable_streaming_session=False",
        "cutting prompts that are too long": "allow_auto_truncate=False",
        "weights in host memory": "cpu_offload_gb=0",
        "default sampling parameters of the engine": "preferred_sampling_params={} override_generation_config={}",
        "changes to the model's config.json": "json_model_override_args='{}'|{} hf_overrides={} rope_scaling "
        "rope_theta",
        "slow tokenizers": "tokenizer_mode=auto",
        "separate prefill and decode engines": "disaggregation_mode=null encoder_only=False language_only=False "
        "enable_pdmux=False",
        "versions of the weights": "weight_version=default",
        "other loaders of weights": "model_loader_extra_config='{}'|{} custom_weight_loader=[]",
        "a head of another type than the weights": "enable_fp32_lm_head=False",
        "parsers of reasoning": "reasoning_parser",
        "parsers of tool calls": "tool_call_parser",
        "routed experts": "enable_return_routed_experts=False",
        "scores of several items in one prompt": "enable_mis=False",
        "logits that equal a trainer's": "rl_on_policy_target",
    }
)

MISSING_OPTIONS: Final = _missing(
    {
        "images in rerank, score and beam_search": "image_data=[]",
        "audio and video": "audio_data=[] video_data=[] mm_hashes=[] mm_content_hashes=[]",
        "grammars that begin after the reasoning": "require_reasoning=False",
        "routed experts": "return_routed_experts=False routed_experts_start_len=0",
        "routing by session (session_params continues earlier requests)": "session_id",
        "parts of the prefix cache": "extra_key=''",
        "data parallelism by this name (use routed_dp_rank)": "data_parallel_rank=0",
        "separate prefill and decode engines": "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank "
        "kv_hints",
    }
)
"""Arguments of calls, in the same form."""

MISSING_PARAMETERS: Final = _missing({"watermarking": "watermark=''|{}"})
"""Sampling parameters, in the same form."""

IGNORED: Final = frozenset(
    """
    api_key constrained_json_disable_any_whitespace constrained_json_whitespace_pattern crash_dump_folder
    cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_max_bs_prefill custom_sigquit_handler
    decode_log_interval delete_ckpt_after_loading disable_chunked_prefix_cache disable_cuda_graph_padding
    disable_custom_all_reduce disable_fast_image_processor disable_log_stats disable_outlines_disk_cache
    disable_tokenizer_batch_decode dist_init_addr dist_timeout enable_cache_report enable_custom_logit_processor
    enable_metrics enable_mixed_chunk enable_nccl_nvls enable_p2p_check enable_profile_cuda_graph
    enable_return_hidden_states enable_symm_mem enable_tokenizer_batch_encode enable_trace enable_two_batch_overlap
    fastapi_root_path file_storage_path fp8_gemm_runner_backend gpu_id_step grammar_backend grpc_mode hicache_ratio
    hicache_size hicache_write_policy host incremental_streaming_output kv_events_config limit_mm_data_per_request
    log_level_http log_requests log_requests_level lora_backend lora_eviction_policy
    max_lora_chunk_size max_prefill_tokens mm_attention_backend mm_process_config moe_a2a_backend moe_dense_tp_size
    moe_runner_backend nccl_port num_continuous_decode_steps numa_node port pp_max_micro_batch_size
    prefill_max_requests radix_eviction_policy sampling_backend schedule_conservativeness
    served_model_name show_time_cost skip_server_warmup sleep_on_idle soft_watchdog_timeout
    speculative_accept_threshold_acc speculative_accept_threshold_single stream_output swa_full_tokens_ratio
    tokenizer_worker_num torch_compile_max_bs warmups weight_loader_disable_mmap
    """.split()  # noqa: SIM905  # a hundred quoted names would hide the list
)
"""Arguments of other constructors that have no effect here."""

FLAGS: Final = _by_name(
    {
        "--max-new-tokens --output-tokens": "--max-tokens --max-output-tokens --max-completion-tokens --max-length "
        "--n-predict -n --output-len",
        "--model": "-m --model-name",
        "--temperature": "--temp",
        "--repetition-penalty": "--repeat-penalty",
        "--system": "--system-prompt",
        "--stop": "--stop-sequence --stop-words",
        "--n": "--num-samples --best-of",
        "--context-length": "--ctx-size",
        "--concurrency": "--max-concurrency",
        "--prompt-tokens": "--random-input-len --input-len",
        "--log-level": "--verbose",
    }
)
"""Flags of other programs -> the flags here; the first one that the command has is suggested."""

OUR_WAY: Final = _by_name(
    {
        "Engine is the engine for synchronous code, AsyncEngine the one for asyncio": "LLM LLMEngine AsyncLLM "
        "AsyncLLMEngine",
        "use engine.tokenizer": "get_tokenizer",
        "use return_logprob=True of a call, with top_logprobs_num or logprob_start_len": "logprobs prompt_logprobs "
        "top_logprobs",
        "for structured output, use json_schema, regex, choice or ebnf in sampling_params": "response_format "
        "guided_decoding guided_json guided_regex guided_choice guided_grammar structured_outputs",
        "for images, use image_data of generate, or parts of the messages of chat": "multi_modal_data images",
        "its name here is max_images_per_prompt": "limit_mm_per_prompt",
        "use the method engine.beam_search": "beam_width use_beam_search",
        "its name here is max_loras_per_batch, an argument of the engine": "max_loras",
        'use sampling_defaults="model" or "engine"': "generation_config",
        "the prefix cache is on, unless the engine has disable_radix_cache=True": "enable_prefix_caching",
        "prompts are computed in chunks, unless the engine has chunked_prefill_size=-1": "enable_chunked_prefill",
        "its name here is context_length, in the constructor and in engine.get_model_info()": "max_model_len",
        "its name here is mem_fraction_static, an argument of the engine": "gpu_memory_utilization",
    }
)
"""Name -> the hint of its error. The constructor accepts ``ALIASES``, so their hints are for other places only."""


def by_own_names(
    kind: str, given: Mapping[str, object], aliases: Mapping[str, str], known: Container[str], missing: Missing
) -> tuple[dict[str, object], list[str]]:
    """Return the values of ``known`` names by these names, and the other names. ``aliases``: other name -> name.

    Raises:
        ValueError: a name is given twice, or a value of a ``missing`` name does not switch its feature off.
    """
    values: dict[str, object] = {}
    others: list[str] = []
    for key, value in given.items():
        name = aliases.get(key, key)
        if name in values:
            spellings = " and ".join(repr(key) for key in given if aliases.get(key, key) == name)
            raise ValueError(f"{kind} {name!r} is given twice, as {spellings}")
        if name in known:
            values[name] = value
        elif key in missing:
            checks.off(key, value, *missing[key])
        else:
            others.append(key)
    return values, others


def our_way(name: str) -> str:
    """Return "; " and the hint for this name, or an empty string."""
    return f"; {OUR_WAY[name]}" if name in OUR_WAY else ""


def no_attribute(owner: str, name: str, *, instead: str = "") -> AttributeError:
    """Return the error of ``__getattr__``. ``instead``: the hint for a name that no other engine has."""
    return AttributeError(f"{owner} has no attribute {name!r}{our_way(name) or instead}", name=name)
