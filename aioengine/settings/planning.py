"""What an engine would take and serve, before anything is loaded: ``aioengine.plan``.

Nothing is started, and torch is not imported; of a model on the hub the config files alone are fetched, and of one that
transformers' code would compute the headers of its weights.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from aioengine.api import checks
from aioengine.api.args import engine_config
from aioengine.families._config import DecoderConfig
from aioengine.families._memory import SNAPSHOTS_PER_ROW, num_parameters, page_numbers, state_bytes, step_numbers
from aioengine.families._towers import num_tower_parameters
from aioengine.families._vision import VisionConfig
from aioengine.frontend.startup import read_adapters
from aioengine.model_files import checkpoint, folder_files, model_folder
from aioengine.settings import machine
from aioengine.settings.config import OWN
from aioengine.settings.page_groups import PageGroups
from aioengine.settings.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePath
    from typing import Unpack

    from aioengine.api.signatures import EngineArguments
    from aioengine.families._config import TransformerConfig
    from aioengine.model_files.model_folder import ModelFacts
    from aioengine.settings.config import EngineConfig, ModelConfig, RunnerSettings, Settings
    from aioengine.settings.machine import DeviceFacts

_DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
_GIB: Final = 1 << 30
_CUDA_BYTES: Final = _GIB
"""What CUDA, its libraries and the kernels take."""
_GRAPH_BYTES: Final = 2 * _GIB
"""What the runner keeps free for workspaces and graphs."""
_FEATURE_BYTES: Final = _GIB
"""Of images, which the runner keeps on a GPU."""
_RANKS: Final = 16
"""The ranks for which slots of adapters have room are a multiple of this."""
_SAMPLED_ROWS: Final = 256
"""Rows whose logits are there in fp32 at a time."""
_SIZE: Final = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(|[KMGT]i?B?)\s*", re.IGNORECASE)
_UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_MEMORY: Final = 1 << 50
_SMI: Final = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S: Final = 10.0


class Plan(Struct, frozen=True, kw_only=True):
    """What an engine would take of a device, and serve. ``print(plan)`` shows it as a table. Sizes are bytes.

    Attributes:
        implementation: "aioengine": there is a file for the model's type; or "transformers": its own code would compute
            the model, or refuse it when it starts. reason: why it is this one; and, of a folder on this machine, why an
            engine would refuse its weights, if it would.
        attention_backend: the engine's, unless its kernels do not work on the machine.
        weights_bytes: of the weights in ``dtype``, with those of a vision tower; exactly, but that a few small tensors,
            as routers and some norms, are kept in fp32. With transformers' code, of the tensors in the files.
        kv_bytes_per_token: of keys and values, or of what a model has in their place; exactly, but with transformers'
            code as the names of sizes in config.json tell, as without windows. Where layers have windows, a token's
            part of a request of the context length: these layers keep what the next token sees.
        state_bytes_per_request: of layers that keep a state of each request instead; snapshots of these lessen the
            pool.
        activations_bytes: what the largest step takes beside weights and pool, with CUDA graphs, the slots of adapters
            and the features of images that are kept; estimated.
        device_memory: of the GPU in all, or what is free of the memory of a CPU's machine.
        kv_pool_bytes: of the KV pool. max_total_tokens: its size in tokens of requests of the context length; 0: the
            model does not fit.
        longest_context: the most tokens of one request that have room; 0: the weights alone do not fit.
        max_requests: the most requests of ``context_length`` tokens that run at a time.
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

    @property
    def cuda_bytes(self) -> int:
        """What CUDA itself takes of a GPU, with its libraries and kernels; estimated."""
        return _CUDA_BYTES if self.device == "cuda" else 0

    @property
    def rest_bytes(self) -> int:
        """The rest of ``device_memory``: what stays free, by ``mem_fraction_static`` or because the pool has no use for
        it, and the states of requests with their snapshots.
        """
        taken = self.weights_bytes + self.activations_bytes + self.cuda_bytes + self.kv_pool_bytes
        return max(self.device_memory - taken, 0)

    @property
    def fits(self) -> bool:
        """Whether there is room for at least one request of the context length."""
        return self.max_requests > 0

    def __str__(self) -> str:
        """A table with a line for each fact."""
        kind = f"{self.architecture}, model_type {self.model_type}, task {self.task}"
        whose = "free" if self.device == "cpu" else "in all"
        state = self.state_bytes_per_request
        pool = f"{_shown(self.kv_pool_bytes)}: max_total_tokens {self.max_total_tokens:,}"
        served = f"{self.max_requests:,} of this length at a time"
        if not self.fits:
            pool = "no room for one request of the context length"
            served = "none; take a larger device" + (", or a dtype of fewer bits" if self.dtype == "float32" else "")
            if self.longest_context:
                served = f"none; context_length={self.longest_context} is the most that fits"
        rows = {
            "model_path": self.model_path,
            "": f"{kind}, {_counted(self.num_parameters)} parameters",
            "implementation": f"{self.implementation}: {self.reason}",
            "device": f"{self.device}, dtype {self.dtype}, attention_backend {self.attention_backend}",
            "device_memory": f"{_shown(self.device_memory)} {whose}",
            "weights": _shown(self.weights_bytes),
            "activations": f"about {_shown(self.activations_bytes)}"
            + (f", and {_shown(self.cuda_bytes)} of CUDA itself" if self.cuda_bytes else ""),
            "KV cache": f"{_shown(self.kv_bytes_per_token)} a token"
            + (f", {_shown(state)} a request" if state else ""),
            "KV pool": pool,
            "rest": f"{_shown(self.rest_bytes)}{' for states and snapshots of them, and' if state else ''} left free",
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
    """What an engine of these arguments would take and serve, from the model's config alone.

    What a vision tower takes while it computes an image is not counted.

    Args:
        model_path: a folder, a GGUF file, or a hub id, whose config files alone are fetched; None: the demo model.
        device_memory: of another machine, in bytes or as "80GiB": a GPU of this size, or with ``device="cpu"`` as much
            free memory. None: this machine's.
        arguments: those of the constructors.

    Raises:
        TypeError, ValueError: as the constructors; or the memory of this machine's GPU cannot be found out.
    """
    memory = None if device_memory is None else read_size(device_memory)
    return plan_of(engine_config(model_path, arguments), memory)


def plan_of(config: EngineConfig, device_memory: int | None = None) -> Plan:
    """As ``plan``. May block for as long as fetching the config files takes."""
    facts = model_folder.find_facts(replace(config.model, tokenizer_path=None), configs_only=True)
    device = machine.device_facts()
    if device_memory is not None and config.device.name != "cpu":
        device = replace(device, num_gpus=1, has_triton=True)
    elif config.device.name == "cuda" and not device.num_gpus:
        raise ValueError(
            "device='cuda': this machine shows no NVIDIA GPU; to plan for another machine, give device_memory, such as "
            "'80GiB'"
        )
    reason = _reason(facts, config.model)
    config = replace(config, model=replace(config.model, path=facts.path, tokenizer=False, chat_template=None))
    settings = resolve(config, facts, device, read_adapters(config))
    if device_memory is None:
        device_memory = machine.free_host_memory() if settings.runner.device == "cpu" else _gpu_memory(device)
    family = model_folder.family_config(config.model)
    count = _num_parameters(family, facts)
    itemsize = _DTYPE_BYTES[settings.model.dtype]
    weights_bytes, activations = count * itemsize, _activations(family, settings, itemsize)
    activations += _adapter_numbers(settings, facts.linear_layers) * itemsize
    page_size, length = settings.memory.page_size, settings.model.context_length
    pages = _Pages.of(family, settings, itemsize)
    room = _room(settings, device_memory, weights_bytes=weights_bytes, activations=activations)
    states = state_bytes(family, itemsize)
    max_running, room = _with_states(settings, states, pages, room)
    num_pages = pages.num_fitting(room, settings.memory.num_pages, max_running=max_running)
    tokens, whole = pages.groups.tokens_in(num_pages, length), -(-length // page_size)
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
        attention_backend=_attention_backend(family, settings.runner),
        weights_bytes=weights_bytes,
        kv_bytes_per_token=pages.bytes_in(whole) // (whole * page_size),
        state_bytes_per_request=states,
        activations_bytes=activations,
        device_memory=device_memory,
        kv_pool_bytes=(num_pages + 1) * pages.page_bytes if num_pages else 0,  # and the page for padding
        max_total_tokens=tokens,
        context_length=length,
        longest_context=pages.longest(room),
        max_requests=min(tokens // (whole * page_size), max_running),
    )


def _reason(facts: ModelFacts, wanted: ModelConfig) -> str:
    """Why this implementation computes the model, and why the weights of a local folder would be refused."""
    is_known = facts.model_type in model_folder.supported_model_types()
    reason = f"there is {'a' if is_known else 'no'} file for model_type {checks.shown(facts.model_type)}"
    if facts.implementation != OWN:
        asked = wanted.implementation
        reason = (reason if asked == "auto" else f"model_impl={asked!r} asks for it") + "; it may refuse when it starts"
    if wanted.load_format == "dummy" or model_folder.needs_download(wanted.path):
        return reason
    missing = checkpoint.missing_weights(Path(facts.path))
    return f"{reason}; but an engine would refuse to start: {missing}" if missing else reason


def _num_parameters(family: TransformerConfig, facts: ModelFacts) -> int:
    """Of the model; where transformers' code computes it, those in its files. Raises ValueError: there are none."""
    if facts.implementation == OWN:
        return num_parameters(family) + _tower_parameters(family, Path(facts.path))
    if not facts.weights.num_numbers:
        raise ValueError(
            f"transformers' own code would compute this model, if it knows the type {checks.shown(facts.model_type)}, "
            f"and the size of its weights is found in their files: {checkpoint.missing_weights(Path(facts.path))}"
        )
    return facts.weights.num_numbers


def _attention_backend(family: TransformerConfig, settings: RunnerSettings) -> str:
    """The one that the runner takes, as far as the config tells: two have no latent attention, or no soft cap."""
    wanted = settings.attention_backend
    attention = family.attention if isinstance(family, DecoderConfig) else None
    is_latent = attention is not None and attention.latent is not None
    if wanted == "flashinfer" and is_latent:
        return settings.fallback_backend or wanted
    if wanted == "fused" and (is_latent or (attention is not None and attention.soft_cap is not None)):
        return "torch"
    return wanted


def _activations(family: TransformerConfig, settings: Settings, itemsize: int) -> int:
    """What a step of the largest size takes, with a margin as the runner's, its logits and its graphs; estimated."""
    limits = settings.scheduler
    rows = max(limits.max_running, _SAMPLED_ROWS)
    step = limits.max_step_tokens * step_numbers(family) * itemsize
    logits = family.vocab_size * (rows * itemsize + _SAMPLED_ROWS * 4) if family.task == "generate" else 0
    if settings.runner.device == "cpu":
        return step + family.vocab_size * 4
    counts = 2 * 4 * limits.max_running * family.vocab_size  # of the tokens of each request, for penalties
    features = _FEATURE_BYTES if isinstance(family, VisionConfig) else 0
    return (step + logits) * 5 // 4 + counts + features + _GRAPH_BYTES


def _room(settings: Settings, device_memory: int, *, weights_bytes: int, activations: int) -> int:
    """Bytes that the KV pool may take, of a size given by the user or of its own."""
    share = settings.memory.mem_fraction_static if settings.memory.num_pages is None else 1.0
    if settings.runner.device == "cpu":
        return int((device_memory - weights_bytes) * share)
    return int(device_memory * share) - _CUDA_BYTES - weights_bytes - activations


class _Pages(NamedTuple):
    """The pages of a model: their groups, the bytes of one, and the longest request."""

    groups: PageGroups
    page_bytes: int
    context_length: int

    @classmethod
    def of(cls, family: TransformerConfig, settings: Settings, itemsize: int) -> _Pages:
        page_size, length = settings.memory.page_size, settings.model.context_length
        numbers, windows = page_numbers(family, length)
        groups = PageGroups(windows=windows, page_size=page_size, min_tokens=settings.scheduler.min_tokens)
        return cls(groups, numbers * itemsize * page_size, length)

    def of_tokens(self, num_pages: int) -> int:
        """The pages for ``num_pages`` pages of tokens."""
        return self.groups.pages_in(num_pages * self.groups.page_size, self.context_length)

    def bytes_in(self, num_pages: int) -> int:
        """Bytes of a pool for ``num_pages`` pages of tokens."""
        return self.of_tokens(num_pages) * self.page_bytes

    def num_fitting(self, room: int, wanted: int | None, *, max_running: int) -> int:
        """Pages of the pool; 0: there is no room for one request, or for as many as are ``wanted``, pages of tokens."""
        if wanted is not None:
            return self.of_tokens(wanted) if self.bytes_in(wanted) <= room else 0
        most = self.groups.pages_in(self.context_length * max_running, self.context_length)
        num_pages = min(room // self.page_bytes, most) if self.page_bytes else most if room > 0 else 0
        return num_pages if num_pages >= self.groups.pages_for(self.context_length) else 0

    def longest(self, room: int) -> int:
        """The most tokens of a request that have room."""
        if not self.page_bytes:
            return self.context_length
        return min(self.groups.tokens_in(max(room, 0) // self.page_bytes, self.context_length), self.context_length)


def _tower_parameters(family: TransformerConfig, folder: Path) -> int:
    if not isinstance(family, VisionConfig):
        return 0
    return num_tower_parameters(folder_files.read_object(folder / "config.json"), family.hidden_size)


def _with_states(settings: Settings, state_bytes: int, pages: _Pages, room: int) -> tuple[int, int]:
    """How many requests run at once, and what is left of ``room``, if the states of each take ``state_bytes``: as the
    runner fits them and their snapshots (``runner.device_memory``).
    """
    max_running, num_pages = settings.scheduler.max_running, settings.memory.num_pages
    if not state_bytes:
        return max_running, room
    most = room // 2 if num_pages is None else room - pages.bytes_in(num_pages)
    max_running = max(min(max_running, most // state_bytes - 1), 0)
    room -= (max_running + 1) * state_bytes
    if settings.scheduler.prefix_cache:
        least = num_pages or -(-settings.model.context_length // settings.memory.page_size)
        num_snapshots = min(room // 4, room - pages.bytes_in(least)) // state_bytes
        room -= max(min(SNAPSHOTS_PER_ROW * max_running, num_snapshots), 0) * state_bytes
    return max_running, room


def _adapter_numbers(settings: Settings, layers: Mapping[str, tuple[int, int]]) -> int:
    """Numbers of all slots for adapters; ``layers``: (outputs, inputs) of the linear layers that these may change."""
    lora = settings.runner.lora
    if lora is None:
        return 0
    sizes = [
        sum(shape) for name, shape in layers.items() if not lora.modules or name.rpartition(".")[2] in lora.modules
    ]
    return lora.num_slots * -(-lora.max_rank // _RANKS) * _RANKS * sum(sizes)


def _gpu_memory(device: DeviceFacts) -> int:
    """Bytes of the first GPU that this process may use.

    Raises:
        ValueError: nvidia-smi does not tell.
    """
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
        rows = [[field.strip() for field in row] for row in csv.reader(done.stdout.splitlines())]
        sizes = {name: int(row[2]) << 20 for row in rows for name in row[:2]}
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        gpus = checks.counted(device.num_gpus, "GPU")
        raise ValueError(
            f"the memory of this machine's {gpus} cannot be found out with nvidia-smi: {error}; give device_memory, "
            "such as '80GiB'"
        ) from error
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    found = sizes.get(visible) or next(iter(sizes.values()), None)
    if found is None:
        raise ValueError("nvidia-smi lists no GPU; give device_memory, such as '80GiB'")
    return found


def read_size(value: object) -> int:
    """Bytes, from a number or a text such as "80GiB" or "24 GB". Raises TypeError or ValueError for anything else."""
    allowed = f"bytes from 1 to {_MAX_MEMORY}, or a text such as '80GiB' or '24GB'"
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None:
            raise checks.wrong_value("device_memory", allowed, value)
        unit = found[2].lower()
        value = int(float(found[1]) * (1024 if "i" in unit else 1000) ** _UNITS[unit[:1]])
    if isinstance(value, bool) or not isinstance(value, int):
        raise checks.wrong_type("device_memory", allowed, value)
    if not 1 <= value <= _MAX_MEMORY:
        raise checks.wrong_value("device_memory", allowed, value)
    return value


def _counted(number: int) -> str:
    """ "8.03 billion" or "4.3 million" """
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _shown(num_bytes: int) -> str:
    """ "1.5 GiB", "300 MiB" or "12 KiB" """
    for unit, size in (("GiB", _GIB), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"
