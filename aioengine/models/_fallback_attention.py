"""Attention of transformers' modules on the paged cache.

One run with a few tokens finds out how each layer attends (``PackedStep.found``); from then on the layers reach the
attention of the step through transformers' attention interface.

T tokens, H query heads, K kv heads, E head size, F size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from aioengine.attention._base import AttentionShape
from aioengine.kernels.write_heads import write_heads

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import StepAttention, WriteKV
    from aioengine.layers.adapters import AdapterRows, Grouping

TRYING: Final = "aioengine_trying"
PAGED: Final = "aioengine"
"""Names of our functions in transformers' interface: for the run that finds out how layers attend, and after it."""

NUM_TRIED: Final = 3
"""Tokens of the run that finds out how layers attend."""

_STEP: Final = "aioengine_step"
_LAYER: Final = "aioengine_layer"
"""Attributes of transformers' modules, through which the functions find the step and the layer."""

_IRRELEVANT: Final = frozenset(
    (
        *("dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
        *("return_dict", "past_key_values", "logits_to_keep", "output_router_logits", "is_causal", "deterministic"),
    )
)
"""Arguments of an attention function that do not change what it computes here."""


def refuse(model_type: str, why: str) -> NoReturn:
    """Raise ValueError."""
    message = f"model_type {model_type!r} cannot run with transformers' code here: {why}"
    raise ValueError(message)


@dataclass(slots=True)
class PackedStep:
    """The step that is computed, which the modules of a model share.

    Attributes:
        attention: prepared; None between steps.
        adapters: the rows of the step by adapter; None: no row has one.
        outputs: [S] int64, the tokens whose hidden states are wanted; None: all.
        is_rewound: whether the last layer has attended: from there on no token needs another one.
        found: how the layers attend, in the order of their calls, while that is found out.
        max_positions: positions that a request can have.
        last_layer: the run ends behind it, with ``StopError``; None: it goes to its end.
    """

    model_type: str
    max_positions: int
    attention: StepAttention | None = None
    adapters: AdapterRows | None = None
    outputs: Tensor | None = None
    is_rewound: bool = False
    found: list[FoundLayer] = field(default_factory=list["FoundLayer"])
    last_layer: int | None = None

    def of_wanted(self, compute: Callable[[Tensor, Grouping | None], Tensor], x: Tensor) -> Tensor:
        """What ``compute`` makes of tokens [N, D] and their adapters, for x [1, T, D] -> [1, T, O].

        Behind the last attention only of the tokens that are wanted; the others get zeros.
        """
        rows, adapters, wanted = x.reshape(-1, x.shape[-1]), self.adapters, self.outputs if self.is_rewound else None
        if wanted is None or len(wanted) >= len(rows):
            y = compute(rows, None if adapters is None else adapters.tokens)
        else:
            found = compute(rows.index_select(0, wanted), None if adapters is None else adapters.outputs)
            y = found.new_zeros(len(rows), found.shape[1]).index_copy_(0, wanted, found)
        return y.view(*x.shape[:-1], -1)


class FoundLayer(NamedTuple):
    """How a layer attends. ``value_size``: of a head of the values, which may be smaller than that of the keys.

    ``window``: positions that a token attends to, itself included; None: all. ``soft_cap`` and ``sinks`` [H]: as in
    ``AttentionShape``; None: there is none.
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
    """Ends a run behind the layers that are wanted."""


class _Mask(NamedTuple):
    """Stands for a mask while it is found out. ``allows``: (row, head, query's position, key's position) -> [...]."""

    allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _mask(*_: object, mask_function: Callable[..., Tensor], **__: object) -> _Mask:
    """Stands in for transformers' masks, which the mask function says for any two positions [...]."""
    return _Mask(mask_function)


def _window(mask: _Mask, step: PackedStep) -> int | None:
    """Positions that a token attends to by this mask, itself included; None: all of its row up to itself."""
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
    """Note how the layer attends. query [1, H, T, E], key [1, K, T, E], value [1, K, T, F] -> [1, T, H, F] zeros."""
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
    others = [name for name, given in arguments.items() if given is not None and name not in _IRRELEVANT]
    if others:
        refuse(step.model_type, f"its attention takes {', '.join(sorted(others))}")
    (rows, num_heads, num_tokens, head_size), num_kv_heads = query.shape, key.shape[1]
    if rows != 1 or key.shape[2] != num_tokens or num_heads % num_kv_heads or key.shape[3] != head_size:
        refuse(step.model_type, f"its attention gets queries {list(query.shape)} for keys {list(key.shape)}")
    if any(found.module is module for found in step.found):
        refuse(step.model_type, "several of its layers are one module, which would need a cache for each")
    step.found.append(
        FoundLayer(
            module,
            *(num_heads, num_kv_heads, head_size, value.shape[3]),
            scale=head_size**-0.5 if scaling is None else float(scaling),
            window=None if window is None or window >= step.max_positions else window,
            soft_cap=None if soft_cap is None else float(soft_cap),
            sinks=sinks,
        )
    )
    return query.new_zeros(1, num_tokens, num_heads, value.shape[3]), None


class _Layer:
    """A layer's way from transformers' interface to the attention of the step."""

    def __init__(self, step: PackedStep, index: int, found: FoundLayer, shape: AttentionShape) -> None:
        self._step = step
        self._index = index
        self._is_last = index == shape.num_layers - 1
        self._missing = shape.head_size - found.value_size
        self._value_size = found.value_size
        self._factor = None if found.scale == shape.scale else found.scale / shape.scale

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, H, T, E], key [1, K, T, E], value [1, K, T, F] -> [1, T, H, F]."""
        step = self._step
        if step.last_layer is not None and self._index > step.last_layer:
            raise StopError
        assert step.attention is not None, "no step is computed"
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        if self._factor is not None:
            q = q * self._factor
        if self._missing:
            v = functional.pad(v, (0, self._missing))
        q, k, v = write_heads(q, k, v, target=step.attention.target(self._index))
        attended = step.attention.attend(q, k, v, self._index).view(1, *q.shape)
        step.is_rewound = self._is_last
        return attended[..., : self._value_size] if self._missing else attended


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """query [1, H, T, E], key [1, K, T, E], value [1, K, T, F] -> [1, T, H, F]."""
    layer: _Layer = getattr(module, _LAYER)
    return layer(query, key, value), None


class DiagonalAttention:
    """Implements ``StepAttention`` for tokens that each attend to itself alone."""

    def target(self, layer: int) -> WriteKV:
        return lambda k, v: None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], v [T, K, F] -> [T, H * F]."""
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).flatten(1)


def register() -> None:
    """Make our functions known to transformers. May be called again."""
    AttentionInterface.register(TRYING, _try)
    AttentionMaskInterface.register(TRYING, _mask)
    AttentionInterface.register(PAGED, _attend)


def share_step(model: nn.Module, step: PackedStep) -> None:
    """Let all modules of the model find the step."""
    for module in model.modules():
        setattr(module, _STEP, step)


def use_layers(step: PackedStep, num_layers: int) -> AttentionShape:
    """The shape of attention as the layers were found, which use it from now on.

    Raises:
        ValueError: attention like this is not implemented; it is named.
    """
    found, refused = step.found, step.model_type
    if len(found) != num_layers:
        refuse(refused, f"{len(found)} of its {num_layers} layers attend by transformers' attention interface, not all")
    first = found[0]
    for what, sizes in (
        ("numbers of heads", {layer.num_heads for layer in found}),
        ("numbers of key and value heads", {layer.num_kv_heads for layer in found}),
        ("head sizes", {layer.head_size for layer in found}),
        ("soft caps", {layer.soft_cap for layer in found}),
    ):
        if len(sizes) > 1:
            refuse(refused, f"its layers have different {what}: {', '.join(map(str, sizes))}")
    if first.value_size > first.head_size:
        refuse(refused, f"its values have heads of {first.value_size}, larger than those of its keys")
    sinks = tuple(layer.sinks for layer in found if layer.sinks is not None)
    if sinks and (len(sinks) != num_layers or not all(isinstance(each, nn.Parameter) for each in sinks)):
        refuse(refused, "its attention has sinks in some layers only, or computes them")
    windows = tuple(layer.window for layer in found)
    shape = AttentionShape(
        num_layers=num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        scale=first.scale,
        windows=windows if any(windows) else (),
        soft_cap=first.soft_cap,
        sinks=tuple(each.data for each in sinks),
    )
    for index, layer in enumerate(found):
        setattr(layer.module, _LAYER, _Layer(step, index, layer, shape))
    return shape
