"""Replaces modules of transformers with our layers.

The class and the names of its parts suggest which layer a module is. Each norm and MLP is compared with our layer on
small random weights. Linear layers that read the same tensor in a trial run become one matmul. Weights are loaded into
our layers only.

Shape letters: T tokens of a step, N tokens of a call, I inputs, O outputs, V vocabulary size, H query heads, K
KV heads, E head size.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from aioengine.families._block_config import Activation
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.heads import can_rotate_qk, rotate_qk
from aioengine.layers.adapters import Grouping
from aioengine.layers.embedding import EmbeddingTable
from aioengine.layers.layer import Layer, Placement
from aioengine.layers.linear import Linear
from aioengine.layers.norm import RMSNorm
from aioengine.models._fallback_attention import NUM_TRIED, PackedStep

_GATED: Final = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("w1", "w3", "w2")
"""Names of the linear layers of gated MLPs, in order. A fused layer has the gates first."""
_ROTATION: Final = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in transformers' modules."""
_SCALES: Final = torch.tensor([1e-3, 0.1, 1.0, 10.0, 1000.0])[None, :, None]
"""Scales of the input rows of a comparison. Small rows reveal an epsilon, large rows reveal clamping."""
_CLOSE: Final = 1e-5
"""Relative tolerance in fp32."""
_FEW: Final = 0.01
"""Fraction of 16-bit values that may differ in the last bit."""
_GATED_SIZE, _INNER_SIZE = 8, 16


@contextmanager
def recorded_inputs(model: nn.Module) -> Iterator[dict[nn.Module, list[Tensor | None]]]:
    """Record the input [..., I] of each call of each module; None for a call with other arguments."""
    inputs: defaultdict[nn.Module, list[Tensor | None]] = defaultdict(list)

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        x = args[0] if len(args) == 1 and not kwargs else None
        inputs[module].append(x if isinstance(x, torch.Tensor) else None)

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in model.modules()]
    yield inputs
    for hook in hooks:
        hook.remove()


class _Function(nn.Module):
    """Replaces a module by a function of its input [..., I]."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        """function: [..., I] -> [..., O]."""
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self.function(x)


def _on_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``compute``, which takes rows [N, I], to x: [..., I] -> [..., O]."""
    return compute(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _LinearGroup:
    """Linear layers that read the same tensor, as one matmul.

    Attributes:
        prefix: of the layer names.
        layer: our layer. It allocates its weights when they are loaded.
        modules: the modules, whose weights are used until the list is cleared.
    """

    def __init__(
        self,
        prefix: str,
        modules: dict[str, nn.Linear],
        step: PackedStep,
        placement: Placement,
        *,
        is_gated: bool = False,
    ) -> None:
        """Group linear modules.

        Args:
            modules: last part of the name -> module.
            is_gated: see ``Linear``.
        """
        self.prefix = prefix
        self.modules = list(modules.values())
        sizes = {name: module.out_features for name, module in modules.items()}
        first = self.modules[0]
        self.layer = Linear(first.in_features, sizes, placement, bias=first.bias is not None, is_gated=is_gated)
        self._step = step
        self._input: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    def compute(self, rows: Tensor, adapters: Grouping | None) -> Tensor:
        """rows [N, I] -> outputs of all layers [N, O], or [N, O / 2] if they are gated."""
        if not self.modules:
            return self.layer(rows, adapters)
        y = torch.cat([module(rows) for module in self.modules], dim=1)
        return activate_and_mul(y, "silu") if self.layer.spec.is_gated else y

    def compute_one(self, index: int, x: Tensor) -> Tensor:
        """x [1, T, I] -> output of one layer [1, T, O]. Outputs of the other layers are kept for their calls."""
        if x is not self._input or index not in self._results:
            y = self._step.compute_tokens(self.compute, x)
            self._input, self._results = x, dict(enumerate(y.split([*self.layer.sizes.values()], dim=-1)))
        result = self._results.pop(index)
        if not self._results:
            self._input = None
        return result


class Swaps(Layer):
    """Our layers in a transformers model."""

    def __init__(
        self, model: nn.Module, inputs: dict[nn.Module, list[Tensor | None]], step: PackedStep, placement: Placement
    ) -> None:
        """Replace modules of the model. Our layers use the modules' weights until ``take_weights``.

        ``inputs`` [..., I]: recorded in a run of the whole model.
        """
        self._step, self._placement = step, placement
        self._originals: list[tuple[nn.Module, str, nn.Module]] = []
        self._groups: list[_LinearGroup] = []
        self._norms: dict[str, RMSNorm] = {}
        self._head: nn.Module | None = cast("Any", model).get_output_embeddings()
        self._tied: tuple[_Function, EmbeddingTable] | None = None
        self._free = _free_modules(model)
        self._inputs = {module: of_module[0] for module, of_module in inputs.items() if len(of_module) == 1}
        for layer in step.layers:
            _use_rotation_kernel(layer.module)
        self._swap_parts("", model)

    def _swap_parts(self, prefix: str, parent: nn.Module) -> None:
        linears: defaultdict[tuple[int, bool, int], dict[str, nn.Linear]] = defaultdict(dict)
        for name, child in list(parent.named_children()):
            x = self._inputs.get(child)
            if child is self._head and child not in self._free and type(child) is nn.Linear and child.bias is None:
                weight = child.weight.data
                head, table = (
                    _Function(partial(functional.linear, weight=weight)),
                    EmbeddingTable(weight, self._placement),
                )
                self._tied = head, table
                self._put(parent, name, head)
            elif x is None or child not in self._free:
                self._swap_parts(f"{prefix}{name}.", child)
            elif self._can_replace(child):
                linear = cast("nn.Linear", child)
                stored = self._placement.format_of(f"{prefix}{name}")
                linears[id(x), linear.bias is None, id(stored)][name] = linear
            elif (norm := find_norm(child, x, self._placement)) is not None:
                self._norms[f"{prefix}{name}"] = norm
                self._put(parent, name, _Function(partial(_on_rows, norm)))
            elif (mlp := self._gated_mlp(f"{prefix}{name}.", child)) is not None:
                self._put(parent, name, mlp)
            else:
                self._swap_parts(f"{prefix}{name}.", child)
        for modules in linears.values():
            group = self._group(prefix, modules)
            for index, name in enumerate(modules):
                self._put(parent, name, _Function(partial(group.compute_one, index)))

    def _can_replace(self, module: nn.Module) -> bool:
        """Return whether the module is a linear layer whose input is [1, T, I]: all tokens in order."""
        x = self._inputs.get(module)
        if type(module) is not nn.Linear or module not in self._free or x is None:
            return False
        return module.weight.dtype == self._placement.dtype == x.dtype and x.shape[:-1] == (1, NUM_TRIED)

    def _gated_mlp(self, prefix: str, module: nn.Module) -> _Function | None:
        """Return our layer for a gated MLP; None for other modules."""
        linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        names = next((names for names in _GATED if {*names} == linears.keys()), None)
        parameters = [name for name, _ in module.named_parameters() if name.partition(".")[0] not in linears]
        if names is None or parameters or not all(map(self._can_replace, linears.values())):
            return None
        first, second = {name: linears[name] for name in names[:-1]}, {names[-1]: linears[names[-1]]}
        activation = gated_activation(module, names)
        if activation is None or len({linear.bias is None for linear in first.values()}) > 1:
            return None
        gates = self._group(prefix, first, is_gated=activation == "silu")
        compute = partial(_compute_mlp, gates, self._group(prefix, second), activation)
        return _Function(partial(self._step.compute_tokens, compute))

    def _group(self, prefix: str, modules: dict[str, nn.Linear], *, is_gated: bool = False) -> _LinearGroup:
        group = _LinearGroup(prefix, modules, self._step, self._placement, is_gated=is_gated)
        group.layer.is_adaptable = self._head not in modules.values()
        self._groups.append(group)
        return group

    def _put(self, parent: nn.Module, name: str, ours: nn.Module) -> None:
        self._originals.append((parent, name, parent.get_submodule(name)))
        parent._modules[name] = ours

    def undo(self) -> None:
        """Restore the original modules. Only valid before ``take_weights``."""
        for parent, name, original in self._originals:
            parent._modules[name] = original
        self._groups, self._norms, self._tied = [], {}, None

    def take_weights(self) -> None:
        """Free the weights of the replaced modules. Our layers use their own from now on."""
        self._inputs, self._free, self._originals = {}, set(), []
        for group in self._groups:
            group.modules = []
        self.parts = (
            *((group.prefix, group.layer) for group in self._groups),
            *((f"{name}.", norm) for name, norm in self._norms.items()),
        )
        if self._placement.device.type == "cuda":
            torch.cuda.empty_cache()

    def finish_loading(self) -> None:
        super().finish_loading()
        if self._tied is not None:
            head, table = self._tied
            table.open_for_loading()  # its weight may have changed: the module loads it, not the table
            head.function = partial(_on_rows, table.as_head())


def _compute_mlp(
    first: _LinearGroup, second: _LinearGroup, activation: Activation, rows: Tensor, adapters: Grouping | None
) -> Tensor:
    """rows [N, I] -> [N, I]."""
    inner = first.compute(rows, adapters)
    return second.compute(inner if first.layer.spec.is_gated else activate_and_mul(inner, activation), adapters)


def _free_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that occur once in the model and share no weights."""
    parameters = (weight for part in model.modules() for weight in part._parameters.values())
    uses = Counter(id(weight) for weight in parameters if weight is not None)
    parents = Counter(id(child) for part in model.modules() for child in part.children())
    return {
        part
        for part in model.modules()
        if parents[id(part)] == 1 and all(uses[id(weight)] == 1 for weight in part.parameters(recurse=False))
    }


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed values [*shape], equal in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _agree(actual: object, expected: Tensor) -> bool:
    """Return whether ``actual`` equals ``expected`` [..., I] except for rounding."""
    if not isinstance(actual, torch.Tensor) or actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if actual.dtype != torch.float32:
        return float((actual != expected).float().mean()) < _FEW
    return bool(((actual - expected).abs() <= _CLOSE * expected.abs().amax(-1, keepdim=True)).all())


def _result(compute: Callable[..., object], *inputs: Tensor) -> object:
    """Return the result of code of a model with other sizes; None if it fails."""
    try:
        return compute(*inputs)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def find_norm(module: nn.Module, x: Tensor, placement: Placement) -> RMSNorm | None:
    """Return our layer for an RMSNorm with input x [..., I]; None for other modules."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(epsilon, float):
        return None
    if [*module.state_dict()] != ["weight"] or module.get_parameter("weight").shape != x.shape[-1:]:
        return None
    size, weight = x.shape[-1], module.get_parameter("weight")
    rows = (_random(1, _SCALES.shape[1], size) * _SCALES).to(x.dtype)
    trial, trial_weight = copy.copy(module), (1.0 + 0.3 * _random(size)).to(weight.dtype)
    trial._parameters = {"weight": nn.Parameter(trial_weight, requires_grad=False)}
    expected = _result(trial, rows)
    for scales_in_fp32, offset in ((False, 0.0), (True, 0.0), (True, 1.0)):
        on_host = replace(placement, device=torch.device("cpu"))
        norm = RMSNorm(size, epsilon, on_host, scales_in_fp32=scales_in_fp32, offset=offset)
        norm.own_weights()["weight"].tensor.copy_(trial_weight)
        norm.finish_loading()
        if _agree(expected, norm(rows[0])[None]):
            return RMSNorm(size, epsilon, placement, scales_in_fp32=scales_in_fp32, offset=offset)
    return None


def gated_activation(module: nn.Module, names: tuple[str, ...]) -> Activation | None:
    """Return the activation of a gated MLP; None if the module computes something else.

    ``names``: of its linear layers, see ``_GATED``.
    """
    x = _random(1, _SCALES.shape[1], _GATED_SIZE) * _SCALES
    gate_up, down = _random(2 * _INNER_SIZE, _GATED_SIZE), _random(_GATED_SIZE, _INNER_SIZE)
    trial = copy.copy(module)
    trial._modules = {**module._modules}
    for name, weight in zip(names, (*gate_up.chunk(len(names) - 1), down), strict=True):
        trial._modules[name] = _Function(partial(functional.linear, weight=weight))
    expected = _result(trial, x)
    inner = functional.linear(x, gate_up)
    for activation in cast("tuple[Activation, ...]", get_args(Activation)):
        if _agree(expected, functional.linear(activate_and_mul(inner.clone(), activation), down)):
            return activation
    return None


class _Rotation:
    """Replaces the function of transformers that rotates queries and keys. In inference mode it uses our kernel."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """q [1, H, T, E], k [1, K, T, E], cos and sin [1, T, E] -> q and k."""
        if args or kwargs or not torch.is_inference_mode_enabled() or not can_rotate_qk(q, k, cos, sin):
            return self._original(q, k, cos, sin, *args, **kwargs)
        return rotate_qk(q, k, cos, sin)


def _use_rotation_kernel(attention: nn.Module) -> None:
    """Replace the rotation function in the file of an attention module, if it computes the same as our kernel."""
    names = inspect.unwrap(type(attention).forward).__globals__
    original = names.get(_ROTATION)
    if original is not None and not isinstance(original, _Rotation) and _rotates_halves(original):
        names[_ROTATION] = _Rotation(original)


def _rotates_halves(function: Callable[..., object]) -> bool:
    """Return whether the function computes the same as ``rotate_qk``."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = (_random(*shape, dtype=dtype) for shape in ((1, 6, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8)))
        actual = _result(function, q, k, cos, sin + 0.5)
        if not isinstance(actual, tuple) or not all(map(_agree, actual, rotate_qk(q, k, cos, sin + 0.5))):
            return False
    return True
