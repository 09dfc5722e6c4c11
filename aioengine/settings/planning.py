"""``aioengine.plan``: estimates memory and capacity of an engine without starting it or importing torch.

Of a model on the hub, only the config files are downloaded, and for transformers' code the headers of the weight files.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final, Unpack

from msgspec import Struct
from msgspec.structs import replace

from aioengine import plugins
from aioengine.api import checks
from aioengine.api.args import engine_config
from aioengine.families._config import DecoderConfig, TransformerConfig
from aioengine.families._ranks import part_of
from aioengine.families._tensors import LinearTensors, TableTensors, adaptable_layers, plain_tensors
from aioengine.families._vision import VisionConfig
from aioengine.frontend.startup import find_draft, read_adapters
from aioengine.model_files import checkpoint, model_folder
from aioengine.model_files.gguf_quantization import StoredTypes
from aioengine.model_files.model_folder import ModelFacts
from aioengine.model_files.online_quantization import OnlineQuantization
from aioengine.model_files.quantization import read_config, split_config
from aioengine.settings import machine
from aioengine.settings.config import OWN, EngineConfig, ModelConfig, ModelSettings, Settings, padded_rank
from aioengine.settings.machine import DeviceFacts
from aioengine.settings.memory_model import (
    DTYPE_BYTES,
    GPU_FEATURE_BYTES,
    SAMPLED_ROWS,
    PoolDemand,
    format_bytes,
    inbox_bytes,
    kv_cache,
    num_parameters,
    reserved_bytes,
    state_bytes,
    step_elements,
    weights_bytes,
)
from aioengine.settings.resolve import resolve

if TYPE_CHECKING:
    from aioengine.api.signatures import EngineArguments

_CUDA_BYTES: Final = 1 << 30
"""Memory of CUDA, its libraries and the kernels."""
_SIZE: Final = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(|[KMGT]i?B?)\s*", re.IGNORECASE)
_UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_MEMORY: Final = 1 << 50
_SMI: Final = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S: Final = 10.0


class Plan(Struct, frozen=True, kw_only=True):
    """Memory and capacity of an engine. ``print(plan)`` shows a table. Sizes are in bytes, of one rank.

    Attributes:
        implementation: "aioengine" or "transformers": whose code computes the model. transformers may still refuse it
            at the start.
        reason: why this implementation is chosen; and why an engine would refuse the weights of a local folder, if so.
        attention_backend: an engine uses another one if the kernels of this one do not work on the machine.
        weights_bytes: weights in ``dtype``, including a vision tower and a draft model. Exact, except that a few small
            tensors (routers, some norms) stay in fp32. On a CPU in fp32, 16-bit linear weights take half of it after
            loading. With transformers' code: of the tensors in the files. On a CPU,
            the head may read a copy of a tied embedding table, which is not counted: in fp32 (a copy in 16 bits if the
            table has 16 bits), and in bf16 if the CPU has bf16 instructions but no AMX.
        kv_bytes_per_token: KV cache per token, including a draft model. Exact, except with transformers' code, which is
            read by the usual names of sizes and as if no layer had a window. With sliding windows: the average of a
            request of the context length, because old pages are freed.
        state_bytes_per_request: recurrent states of a request. Their snapshots make the pool smaller.
        activations_bytes: estimate for the largest step, with CUDA graphs, adapter slots, cached image features and
            the inboxes of ranks.
        tp_size: the number of ranks. ``num_parameters`` is the number of parameters of all of them.
        dp_size: the number of replicas. The KV pool, its tokens and ``max_requests`` are of one replica.
        device_memory: all memory of the GPU, or the free memory of the machine for a CPU, divided by the ranks of all
            replicas.
        max_total_tokens: size of the KV pool in tokens of requests of the context length; 0: the model does not fit.
        longest_context: tokens of the longest request that fits; 0: the weights alone do not fit.
        max_requests: requests of ``context_length`` tokens that run at a time.
    """

    model_path: str
    model_type: str
    architecture: str
    task: str
    implementation: str
    reason: str
    num_parameters: int
    device: str
    dtype: str
    attention_backend: str
    kv_cache_dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_request: int
    activations_bytes: int
    device_memory: int
    kv_pool_bytes: int
    max_total_tokens: int
    context_length: int
    longest_context: int
    max_requests: int
    tp_size: int = 1
    dp_size: int = 1

    @property
    def cuda_bytes(self) -> int:
        """Estimated memory of CUDA, its libraries and the kernels."""
        return _CUDA_BYTES if self.device == "cuda" else 0

    @property
    def rest_bytes(self) -> int:
        """The rest of ``device_memory``: recurrent states with their snapshots, and memory that stays free."""
        taken = self.weights_bytes + self.activations_bytes + self.cuda_bytes + self.kv_pool_bytes
        return max(self.device_memory - taken, 0)

    @property
    def fits(self) -> bool:
        """Whether at least one request of the context length fits."""
        return self.max_requests > 0

    def __str__(self) -> str:
        """Return a table with one fact per line."""
        kind = f"{self.architecture}, model_type {self.model_type}, task {self.task}"
        whose = "free" if self.device == "cpu" else "in all"
        state = self.state_bytes_per_request
        rest = f"{format_bytes(self.rest_bytes)} {'for states and snapshots of them, and ' if state else ''}left free"
        pool = f"{format_bytes(self.kv_pool_bytes)}: max_total_tokens {self.max_total_tokens:,}"
        served = f"{self.max_requests:,} of this length at a time"
        if not self.fits:
            pool = "too small for one request of the context length"
            served = "none; use a larger device" + (", or a dtype of fewer bits" if self.dtype == "float32" else "")
            if self.longest_context:
                served = f"none; context_length={self.longest_context} is the most that fits"
        rows = {
            "model_path": self.model_path,
            "": f"{kind}, {_counted(self.num_parameters)} parameters",
            "implementation": f"{self.implementation}: {self.reason}",
            "device": f"{self.device}, dtype {self.dtype}, attention_backend {self.attention_backend}"
            + (f", {self.tp_size} ranks; sizes are of one rank" if self.tp_size > 1 else "")
            + (f", {self.dp_size} replicas; tokens and requests are of one" if self.dp_size > 1 else ""),
            "device_memory": f"{format_bytes(self.device_memory)} {whose}",
            "weights": format_bytes(self.weights_bytes),
            "activations": f"about {format_bytes(self.activations_bytes)}"
            + (f", and {format_bytes(self.cuda_bytes)} of CUDA itself" if self.cuda_bytes else ""),
            "KV cache": f"{format_bytes(self.kv_bytes_per_token)} a token in {self.kv_cache_dtype}"
            + (f", {format_bytes(state)} a request" if state else ""),
            "KV pool": pool,
            "rest": rest,
            "context_length": f"{self.context_length:,} tokens",
            "requests": served,
        }
        return "\n".join(f"{name:<16}{words}" for name, words in rows.items())


def plan(
    model_path: str | PurePath | None = None,
    *,
    device_memory: int | str | None = None,
    **arguments: Unpack[EngineArguments],
) -> Plan:
    """Estimate memory and capacity of an engine from the config of the model.

    The memory that a vision tower uses while it computes an image is not included.

    Args:
        model_path: a folder, a GGUF file, or a hub id (only config files are downloaded); None: the demo model.
        device_memory: to plan for another machine: the size of its GPU, or with ``device="cpu"`` its free memory, in
            bytes or as "80GiB". None: this machine.
        arguments: see the constructors.

    Raises:
        TypeError, ValueError: as the constructors, or if the size of this machine's GPU cannot be read.
    """
    memory = None if device_memory is None else read_size(device_memory)
    return plan_of(engine_config(model_path, arguments), memory)


def plan_of(config: EngineConfig, device_memory: int | None = None) -> Plan:
    """See ``plan``. May block until the config files are downloaded."""
    facts = model_folder.find_facts(replace(config.model, tokenizer_path=None), configs_only=True)
    device = machine.device_facts()
    num_gpus = config.device.base_gpu_id + config.supervision.num_replicas * config.device.tp_size
    if device_memory is not None and config.device.name != "cpu":
        device = replace(device, num_gpus=num_gpus, has_triton=True)
    elif config.device.name == "cuda" and not device.num_gpus:
        raise ValueError("device='cuda': this machine shows no NVIDIA GPU; give device_memory, such as '80GiB'")
    reason = _reason(facts, config.model)
    config = replace(config, model=replace(config.model, path=facts.path, tokenizer=False, chat_template=None))
    draft_facts = find_draft(config, configs_only=True)
    settings = resolve(config, facts, device, read_adapters(config), draft_facts)
    is_on_cpu = settings.runner.device == "cpu"
    num_ranks = config.device.tp_size
    if device_memory is None:
        device_memory = machine.free_host_memory() if is_on_cpu else _gpu_memory(device)
    if is_on_cpu:
        device_memory //= settings.runner.num_runners
    whole = model_folder.family_config(config.model)
    family = part_of(whole, num_ranks)
    itemsize = DTYPE_BYTES[settings.model.dtype]
    count, num_weights_bytes = _weights(family, facts, settings.model, itemsize, is_on_cpu=is_on_cpu)
    if num_ranks > 1:
        count = num_parameters(whole)
    # all ranks have the logits of the whole vocabulary
    activations = _activations(replace(family, vocab_size=whole.vocab_size), settings, itemsize)
    layers = facts.linear_layers
    if num_ranks > 1 and isinstance(family, DecoderConfig):
        layers = adaptable_layers(family)
    activations += _adapter_elements(settings, layers) * itemsize
    draft = None
    if settings.runner.draft is not None and draft_facts is not None and config.draft_model is not None:
        own = settings.runner.draft.model
        draft_family = model_folder.family_config(replace(config.draft_model, path=draft_facts.path))
        num_weights_bytes += _weights(draft_family, draft_facts, own, itemsize, is_on_cpu=is_on_cpu)[1]
        draft = kv_cache(draft_family, own.context_length)
    share = settings.memory.mem_fraction_static if settings.memory.num_pages is None else 1.0
    if is_on_cpu:
        num_bytes = int((device_memory - num_weights_bytes) * share)
    else:
        max_rows = settings.scheduler.max_step_tokens
        activations += inbox_bytes(num_ranks, itemsize, max_rows=max_rows, num_columns=family.hidden_size)
        num_bytes = int(device_memory * share) - _CUDA_BYTES - num_weights_bytes - activations
    length = settings.model.context_length
    states = state_bytes(family, itemsize)
    demand = PoolDemand.of(settings, kv_cache(family, length), state_bytes=states, draft=draft)
    pool = demand.fit(num_bytes)
    num_pages = pool.num_pages if pool.left > 0 else 0
    if demand.num_tokens is None and num_pages < demand.pages_in(length):
        num_pages = 0
    tokens, page_size = demand.tokens_in(num_pages), demand.groups.page_size
    padded = -(-length // page_size) * page_size
    longest = length
    if demand.page_bytes:
        longest = min(demand.tokens_in(pool.left // demand.page_bytes), length)
    return Plan(
        model_path=facts.path,
        model_type=facts.model_type,
        architecture=facts.architecture,
        task=facts.task,
        implementation=facts.implementation,
        reason=reason,
        num_parameters=count,
        device=settings.runner.device,
        dtype=settings.model.dtype,
        attention_backend=settings.runner.attention_backend,
        kv_cache_dtype=settings.memory.kv_dtype or settings.model.dtype,
        weights_bytes=num_weights_bytes,
        kv_bytes_per_token=demand.pages_in(padded) * demand.page_bytes // padded,
        state_bytes_per_request=states,
        activations_bytes=activations,
        device_memory=device_memory,
        kv_pool_bytes=(num_pages + 1) * demand.page_bytes if num_pages else 0,  # one more page is for padding
        max_total_tokens=tokens,
        context_length=length,
        longest_context=longest,
        max_requests=min(tokens // padded, pool.num_rows),
        tp_size=num_ranks,
        dp_size=config.supervision.num_replicas,
    )


def _reason(facts: ModelFacts, wanted: ModelConfig) -> str:
    """Return why this implementation is chosen, and why an engine would refuse the weights of a local folder."""
    is_known = facts.model_type in plugins.names("families")
    reason = f"there is {'a' if is_known else 'no'} file for model_type {checks.shown(facts.model_type)}"
    if facts.implementation != OWN:
        asked = wanted.implementation
        reason = (reason if asked == "auto" else f"model_impl={asked!r} asks for it") + "; it may refuse when it starts"
    if wanted.load_format == "dummy" or model_folder.needs_download(wanted.path):
        return reason
    missing = checkpoint.missing_weights(Path(facts.path))
    return f"{reason}; but an engine would refuse to start: {missing}" if missing else reason


def _weights(
    family: TransformerConfig, facts: ModelFacts, model: ModelSettings, itemsize: int, *, is_on_cpu: bool
) -> tuple[int, int]:
    """Return number and bytes of the parameters. For transformers' code, count the elements in the weight files.

    Raises ValueError if there are no such files.
    """
    if facts.implementation == OWN:
        raw = read_config(Path(facts.path)) or {}
        _, quantization = split_config(raw)
        if is_on_cpu and isinstance(family, DecoderConfig) and family.experts and family.experts.stored == "mxfp4":
            family = replace(family, experts=replace(family.experts, stored="interleaved"))  # dequantized when loaded
        tensors: LinearTensors = plain_tensors
        tables: TableTensors | None = None
        if quantization is not None:
            tensors = partial(quantization.tensors_in_memory, is_on_cpu=is_on_cpu)
        elif model.load_format == "gguf":
            stored = StoredTypes.of(Path(facts.path), is_on_cpu=is_on_cpu)
            tensors = partial(stored.tensors_in_memory, is_on_cpu=is_on_cpu)
            tables = partial(stored.table_in_memory, is_on_cpu=is_on_cpu)
        elif (online := OnlineQuantization.of(model)) is not None:
            tensors, tables = partial(online.tensors_in_memory, is_on_cpu=is_on_cpu), online.table_in_memory
        tower = facts.weights.num_parameters
        return num_parameters(family) + tower, weights_bytes(family, itemsize, tensors, tables) + tower * itemsize
    if not facts.weights.num_parameters:
        missing = checkpoint.missing_weights(Path(facts.path))
        raise ValueError(f"the size of a model in transformers' code is read from its weight files: {missing}")
    return facts.weights.num_parameters, facts.weights.num_parameters * itemsize


def _activations(family: TransformerConfig, settings: Settings, itemsize: int) -> int:
    """Estimate the memory of the largest step, with its logits, CUDA graphs and cached image features."""
    max_running, vocab_size = settings.scheduler.max_running, family.vocab_size
    step = settings.scheduler.max_step_tokens * step_elements(family) * itemsize
    if settings.runner.device == "cpu":
        return step + vocab_size * 4
    if family.task == "generate":
        step += vocab_size * (max(max_running, SAMPLED_ROWS) * itemsize + SAMPLED_ROWS * 4)
    reserved = reserved_bytes(step, max_running=max_running, vocab_size=vocab_size)
    return reserved + (GPU_FEATURE_BYTES if isinstance(family, VisionConfig) else 0)


def _adapter_elements(settings: Settings, layers: Mapping[str, tuple[int, int]]) -> int:
    """Return the elements of all adapter slots. ``layers``: (outputs, inputs) of the layers that may change."""
    lora = settings.runner.lora
    if lora is None:
        return 0
    sizes = [
        sum(shape) for name, shape in layers.items() if not lora.modules or name.rpartition(".")[2] in lora.modules
    ]
    return lora.num_slots * padded_rank(lora.max_rank) * sum(sizes)


def _gpu_memory(device: DeviceFacts) -> int:
    """Return the memory of the first GPU that is visible to this process.

    Raises ValueError if nvidia-smi does not report it.
    """
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
        rows = [[field.strip() for field in row] for row in csv.reader(done.stdout.splitlines())]
        sizes = {name: int(row[2]) << 20 for row in rows for name in row[:2]}
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        gpus = checks.counted(device.num_gpus, "GPU")
        remedy = "give device_memory, such as '80GiB'"
        raise ValueError(f"nvidia-smi does not report the memory of {gpus}: {error}; {remedy}") from error
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    memory = sizes.get(visible) or next(iter(sizes.values()), None)
    if memory is None:
        raise ValueError("nvidia-smi lists no GPU; give device_memory, such as '80GiB'")
    return memory


def read_size(value: object) -> int:
    """Convert a number of bytes, or a text such as "80GiB" or "24 GB". Raises TypeError or ValueError otherwise."""
    allowed = f"bytes from 1 to {_MAX_MEMORY}, or a text such as '80GiB' or '24GB'"
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise checks.wrong_value("device_memory", allowed, value)
        unit = match[2].lower()
        value = int(float(match[1]) * (1024 if "i" in unit else 1000) ** _UNITS[unit[:1]])
    if isinstance(value, bool) or not isinstance(value, int):
        raise checks.wrong_type("device_memory", allowed, value)
    if not 1 <= value <= _MAX_MEMORY:
        raise checks.wrong_value("device_memory", allowed, value)
    return value


def _counted(number: int) -> str:
    """Return "8.03 billion" or "4.3 million"."""
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
