"""Connects attention of transformers' modules to the paged KV cache.

A trial run with a few tokens finds out how each layer attends (``PackedStep.layers``). Afterwards the layers call the
attention of the step through transformers' attention interface.

Shape letters: T tokens, N tokens of a call, I inputs, O outputs, H query heads, K KV heads, E
head size, F value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from aioengine.attention._base import AttentionShape, StepAttention
from aioengine.kernels.heads import write_heads
from aioengine.kernels.kv_target import WriteKV
from aioengine.layers.adapters import AdapterRows, Grouping

TRYING: Final = "aioengine_trying"
PAGED: Final = "aioengine"
"""Names of our functions in transformers' interface: for the trial run, and after it."""

NUM_TRIED: Final = 3
"""Tokens of the trial run."""

_STEP: Final = "aioengine_step"
_LAYER: Final = "aioengine_layer"
"""Attributes of transformers' modules with the step and the layer."""

_IRRELEVANT: Final = frozenset((
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "past_key_values", "logits_to_keep", "output_router_logits", "is_causal", "deterministic",
))  # fmt: skip
"""Arguments of attention functions that do not change results here."""


def refuse(model_type: str, why: str) -> NoReturn:
    """Raise ValueError. ``why``: the reason."""
    raise ValueError(f"model_type {model_type!r} cannot run with transformers' code here: {why}")


@dataclass(slots=True)
class PackedStep:
    """The current step. All modules of a model share it.

    Attributes:
        max_positions: tokens of the longest request.
        attention: prepared for the step; None between steps.
        adapters: the rows by adapter; None if no row has an adapter.
        layers: how the layers attend, in the order of their calls. Filled by a trial run.
        last_layer: the run ends with ``StopError`` after this layer; None to run all layers.
    """

    model_type: str
    max_positions: int
    attention: StepAttention | None = None
    adapters: AdapterRows | None = None
    layers: list[FoundLayer] = field(default_factory=list["FoundLayer"])
    last_layer: int | None = None

    def compute_tokens(self, compute: Callable[[Tensor, Grouping | None], Tensor], x: Tensor) -> Tensor:
        """Apply ``compute``, which takes tokens [N, I] and their adapters, to x: [1, T, I] -> [1, T, O]."""
        grouping = None if self.adapters is None else self.adapters.tokens
        return compute(x.reshape(-1, x.shape[-1]), grouping).view(*x.shape[:-1], -1)


class FoundLayer(NamedTuple):
    """How a layer attends.

    Attributes:
        value_size: size of a value head, which may be smaller than ``head_size``.
        window: sliding window in tokens, including the token itself; None for no window.
        soft_cap, sinks: see ``AttentionShape``; sinks [H]. None if there is none.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class StopError(Exception):
    """Ends a run after ``PackedStep.last_layer``."""


class _Mask(NamedTuple):
    """Replaces a mask in the trial run. ``allows``: (row, head, query position, key position) -> bool [...]."""

    allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _mask(*_: object, mask_function: Callable[..., Tensor], **__: object) -> _Mask:
    """Return the mask function instead of a mask [...]."""
    return _Mask(mask_function)


def _window(mask: _Mask, step: PackedStep) -> int | None:
    """Return the sliding window of a causal mask in tokens, including the token itself; None without a window."""
    num = step.max_positions
    zero, distances = torch.zeros((), dtype=torch.int64), torch.arange(-1, num)
    windows: set[int] = set()
    for last in (num, num + 1, num + 37):
        query = torch.full((), last)
        allowed = mask.allows(zero, zero, query, query - distances).expand(len(distances))
        if bool(allowed[0]):
            refuse(step.model_type, "its tokens attend to later ones")
        size = int(allowed.sum())
        if not size or not bool(allowed[1 : size + 1].all()):
            refuse(step.model_type, "its tokens attend neither to all earlier ones nor to a window of them")
        windows.add(size)
    if len(windows) > 1:
        refuse(step.model_type, "its tokens attend to chunks of the text")
    (window,) = windows
    return None if window == num else window


def _try(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *masks: object, **arguments: Any
) -> tuple[Tensor, None]:
    """Record how the layer attends. query [1, H, T, E], key [1, K, T, E], value [1, K, T, F] -> zeros [1, T, H, F]."""
    step: PackedStep = getattr(module, _STEP)
    sinks, soft_cap = arguments.pop("s_aux", None), arguments.pop("softcap", None)
    window: int | None = arguments.pop("sliding_window", None)
    scaling: float | None = arguments.pop("scaling", None)
    is_causal = arguments.get("is_causal")
    attention_mask = masks[0] if masks else arguments.pop("attention_mask", None)
    if isinstance(attention_mask, _Mask):
        window = _window(attention_mask, step)
    elif attention_mask is not None:
        refuse(step.model_type, "it gives its attention a bias or mask of its own")
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        refuse(step.model_type, "its tokens attend to later ones")
    unknown = [name for name, value in arguments.items() if value is not None and name not in _IRRELEVANT]
    if unknown:
        refuse(step.model_type, f"its attention takes {', '.join(sorted(unknown))}")
    (rows, num_heads, num_tokens, head_size), num_kv_heads = query.shape, key.shape[1]
    if rows != 1 or key.shape[2] != num_tokens or num_heads % num_kv_heads or key.shape[3] != head_size:
        refuse(step.model_type, f"its attention gets queries {list(query.shape)} for keys {list(key.shape)}")
    if any(layer.module is module for layer in step.layers):
        refuse(step.model_type, "several of its layers are one module, which would need a cache for each")
    step.layers.append(
        FoundLayer(
            module,
            num_heads,
            num_kv_heads,
            head_size,
            value.shape[3],
            scale=head_size**-0.5 if scaling is None else float(scaling),
            window=None if window is None or window >= step.max_positions else window,
            soft_cap=None if soft_cap is None else float(soft_cap),
            sinks=sinks,
        )
    )
    return query.new_zeros(1, num_tokens, num_heads, value.shape[3]), None


class _Layer:
    """Calls the attention of the step for one layer."""

    def __init__(self, step: PackedStep, index: int, layer: FoundLayer, shape: AttentionShape) -> None:
        self._step = step
        self._index = index
        self._padding = shape.head_size - layer.value_size
        self._value_size = layer.value_size
        self._factor = None if layer.scale == shape.scale else layer.scale / shape.scale

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, H, T, E], key [1, K, T, E], value [1, K, T, F] -> [1, T, H, F]."""
        step = self._step
        if step.last_layer is not None and self._index > step.last_layer:
            raise StopError
        assert step.attention is not None, "no step is running"
        q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
        if self._factor is not None:
            q = q * self._factor
        if self._padding:
            v = functional.pad(v, (0, self._padding))
        q, k, v = write_heads(q, k, v, step.attention.target(self._index))
        attended = step.attention.attend(q, k, v, self._index).view(1, *q.shape)
        return attended[..., : self._value_size] if self._padding else attended


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """query [1, H, T, E], key [1, K, T, E], value [1, K, T, F] -> [1, T, H, F]."""
    layer: _Layer = getattr(module, _LAYER)
    return layer(query, key, value), None


class DiagonalAttention:
    """Implements ``StepAttention`` for tokens that attend only to themselves."""

    def target(self, layer: int) -> WriteKV:
        return lambda k, v: None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], v [T, K, F] -> [T, H * F]."""
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).flatten(1)


def register() -> None:
    """Register our functions with transformers. May be called again."""
    AttentionInterface.register(TRYING, _try)
    AttentionMaskInterface.register(TRYING, _mask)
    AttentionInterface.register(PAGED, _attend)


def share_step(model: nn.Module, step: PackedStep) -> None:
    """Store the step in all modules of the model."""
    for module in model.modules():
        setattr(module, _STEP, step)


def use_layers(step: PackedStep, num_layers: int) -> AttentionShape:
    """Connect the layers of the trial run to the attention of steps, and return its shape.

    Raises ValueError if such attention is not implemented.
    """
    layers, model_type = step.layers, step.model_type
    if len(layers) != num_layers:
        refuse(model_type, f"only {len(layers)} of its {num_layers} layers use transformers' attention interface")
    first = layers[0]
    for name, sizes in (
        ("numbers of heads", {layer.num_heads for layer in layers}),
        ("numbers of key and value heads", {layer.num_kv_heads for layer in layers}),
        ("head sizes", {layer.head_size for layer in layers}),
        ("soft caps", {layer.soft_cap for layer in layers}),
    ):
        if len(sizes) > 1:
            refuse(model_type, f"its layers have different {name}: {', '.join(map(str, sizes))}")
    if first.value_size > first.head_size:
        refuse(model_type, f"its values have heads of {first.value_size}, larger than its key heads")
    sinks = tuple(layer.sinks for layer in layers if layer.sinks is not None)
    if sinks and (len(sinks) != num_layers or not all(isinstance(layer_sinks, nn.Parameter) for layer_sinks in sinks)):
        refuse(model_type, "its attention has sinks in some layers only, or computes them")
    windows = tuple(layer.window for layer in layers)
    shape = AttentionShape(
        num_layers=num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        scale=first.scale,
        windows=windows if any(windows) else (),
        soft_cap=first.soft_cap,
        sinks=tuple(layer_sinks.data for layer_sinks in sinks),
    )
    for index, layer in enumerate(layers):
        setattr(layer.module, _LAYER, _Layer(step, index, layer, shape))
    return shape
