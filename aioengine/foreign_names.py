"""Hints in errors about names of other engines: what to use here instead."""

from __future__ import annotations

from typing import Final

_ENGINES: Final = "Engine is the engine for synchronous code, AsyncEngine the one for asyncio"
_LOGPROBS: Final = "use return_logprob=True of a call, with top_logprobs_num or logprob_start_len"
_GRAMMARS: Final = "structured output is json_schema, regex, choice or ebnf in sampling_params here"

_IMAGES: Final = "images are image_data of generate, and parts of the messages of chat here"

_BEAMS: Final = "beam search is a method of its own, engine.beam_search"

OUR_WAY: Final[dict[str, str]] = {
    "LLM": _ENGINES,
    "LLMEngine": _ENGINES,
    "AsyncLLM": _ENGINES,
    "AsyncLLMEngine": _ENGINES,
    "get_tokenizer": "use engine.tokenizer",
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "response_format": _GRAMMARS,
    "guided_decoding": _GRAMMARS,
    "guided_json": _GRAMMARS,
    "guided_regex": _GRAMMARS,
    "guided_choice": _GRAMMARS,
    "guided_grammar": _GRAMMARS,
    "structured_outputs": _GRAMMARS,
    "multi_modal_data": _IMAGES,
    "images": _IMAGES,
    "limit_mm_per_prompt": "it is max_images_per_prompt here",
    "beam_width": _BEAMS,
    "use_beam_search": _BEAMS,
    "max_loras": "it is max_loras_per_batch here, an argument of the engine",
    "enable_prefix_caching": "the prefix cache is on, unless the engine is made with disable_radix_cache=True",
    "enable_chunked_prefill": "prompts are computed in chunks, unless the engine is made with chunked_prefill_size=-1",
    "max_model_len": "it is context_length here: an argument of the engine, and a key of engine.get_model_info()",
    "gpu_memory_utilization": "it is mem_fraction_static here, an argument of the engine",
}


def our_way(name: str) -> str:
    """The hint for this name, behind "; ", or an empty string."""
    return f"; {OUR_WAY[name]}" if name in OUR_WAY else ""


def no_attribute(of: str, name: str, *, instead: str = "") -> AttributeError:
    """For ``__getattr__`` of ``of``; ``instead`` is what to use where the name is no other engine's."""
    return AttributeError(f"{of} has no attribute {name!r}{our_way(name) or instead}", name=name)
