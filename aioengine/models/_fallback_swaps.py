"""Replaces modules of transformers with our layers where these compute the same.

Names of modules are not trusted. A trial run records the modules that are called with a single tensor, and which of
them get the same tensor (``RecordedCalls``). Then a copy of each module with small random weights is compared with our
layer. Linear layers that read the same tensor become one matmul. Weights are loaded into our layers only.

Shape letters: T tokens of a step, N tokens of a call, D input size, O output size, V vocabulary size, X experts, H
query heads, K KV heads, E head size.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, get_args

import torch
from torch import nn
from torch.nn import functional

from aioengine.families._block_config import Activation
from aioengine.kernels import linear as matmuls
from aioengine.kernels.activation import activate_and_mul, reference_and_mul
from aioengine.kernels.rotate_qk import reference as rotated
from aioengine.kernels.rotate_qk import rotate_qk, takes
from aioengine.layers.layer import Layer
from aioengine.layers.linear import Linear
from aioengine.layers.norm import RMSNorm
from aioengine.models._fallback_attention import NUM_TRIED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from aioengine.kernels.linear import Matmul
    from aioengine.layers.adapters import Grouping
    from aioengine.layers.placement import Placement
    from aioengine.models._fallback_attention import PackedStep

_ROTATION: Final = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in transformers' modules."""
_SCALES: Final = torch.tensor([1e-3, 0.1, 1.0, 10.0, 1000.0])[None, :, None]
"""Scales of the input rows of a comparison. Small rows reveal an epsilon, large rows reveal clamping."""
_CLOSE: Final = 1e-5
"""Relative tolerance in fp32."""
_FEW: Final = 0.01
"""Fraction of 16-bit values that may differ in the last bit."""
_GATED_SIZE, _INNER_SIZE = 8, 16


class RecordedCalls:
    """The modules that a trial run calls exactly once, with a single tensor.

    Attributes:
        inputs: module -> its input.
        experts: module with weights [X, O, D] -> whether it maps tokens [T, D] and their routing to [T, D].
    """

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.experts: dict[nn.Module, bool] = {}
        self._excluded: set[nn.Module] = set()
        hooks = [module.register_forward_pre_hook(self._record, with_kwargs=True) for module in model.modules()]
        with_experts = [
            module for module in model.modules() if any(weight.ndim == 3 for weight in module.parameters(recurse=False))
        ]
        hooks += [module.register_forward_hook(self._record_experts, with_kwargs=True) for module in with_experts]
        self._hooks = hooks

    def _record(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Add the module to ``inputs`` at its first call, and remove it at the second."""
        if module in self._excluded:
            return
        known = self.inputs.pop(module, None)
        if known is None and len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            self.inputs[module] = args[0]
        else:
            self._excluded.add(module)

    def _record_experts(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> None:
        """Check that all arguments and the result are tensors with one row per token."""
        shapes = [value.shape for value in (result, *args) if isinstance(value, torch.Tensor)]
        has_rows = not kwargs and len(shapes) == 1 + len(args) and all(shape[:1] == (NUM_TRIED,) for shape in shapes)
        is_routed = has_rows and len(args) > 1 and shapes[0] == shapes[1] and len(shapes[0]) == 2
        self.experts[module] = is_routed and self.experts.get(module, True)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _LinearGroup:
    """Linear layers that read the same tensor, as one matmul. Before ``take_weights`` it uses the modules' weights.

    Attributes:
        prefix: of the layer names.
        is_adaptable: adapters may change the layers.
    """

    def __init__(
        self, prefix: str, modules: dict[str, nn.Linear], step: PackedStep, *, is_gated: bool, is_adaptable: bool
    ) -> None:
        """Group linear modules.

        Args:
            modules: last part of the name -> module.
            is_gated: see ``Linear``.
        """
        self.prefix, self.is_adaptable = prefix, is_adaptable
        self._layer: Linear | None = None
        self._modules = list(modules.values())
        self._step = step
        self._is_gated = is_gated
        self._parts = {name: module.out_features for name, module in modules.items()}
        self._in_features = self._modules[0].in_features
        self._has_bias = self._modules[0].bias is not None
        self._input: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    def take_weights(self, placement: Placement) -> None:
        """Create our layer, and free the weights of the modules."""
        self._modules = []
        self._layer = Linear(self._in_features, self._parts, placement, bias=self._has_bias, is_gated=self._is_gated)

    @property
    def layer(self) -> Linear:
        """Our layer, after ``take_weights``."""
        assert self._layer is not None, "take_weights was not called"
        return self._layer

    def compute(self, rows: Tensor, adapters: Grouping | None) -> Tensor:
        """rows [N, D] -> outputs of all layers [N, O], or [N, O / 2] if they are gated."""
        if self._layer is not None:
            return self._layer(rows, adapters)
        y = torch.cat([module(rows) for module in self._modules], dim=1)
        return activate_and_mul(y, "silu") if self._is_gated else y

    def compute_one(self, x: Tensor, index: int) -> Tensor:
        """x [1, T, D] -> output of one layer [1, T, O]. Outputs of the other layers are kept for their calls."""
        if x is not self._input or index not in self._results:
            y = self._step.compute_outputs(self.compute, x)
            self._input, self._results = x, dict(enumerate(y.split([*self._parts.values()], dim=-1)))
        result = self._results.pop(index)
        if not self._results:
            self._input = None
        return result


class _GroupedLinear(nn.Module):
    """Replaces a linear layer."""

    def __init__(self, group: _LinearGroup, index: int) -> None:
        super().__init__()
        self._group = group
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., O]."""
        return self._group.compute_one(x, self._index)


class _TiedHead(nn.Module):
    """Replaces a head that shares its weight [V, D] with the embedding."""

    def __init__(self, weight: Tensor) -> None:
        """Wrap the weight [V, D]."""
        super().__init__()
        self._weight = weight
        self._matmul: Matmul = partial(matmuls.reference, weight=weight, bias=None)
        self._is_prepared = False

    def finish_loading(self) -> None:
        """Prepare the matmul. A matmul that reads a packed copy is prepared again after each loading."""
        if not self._is_prepared or matmuls.packs(self._weight.dtype, self._weight.device):
            self._matmul, self._is_prepared = matmuls.prepare(self._weight, None), True

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return self._matmul(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _GatedMLP(nn.Module):
    """Replaces an MLP: second(activation(gate(x)) * up(x))."""

    def __init__(self, first: _LinearGroup, second: _LinearGroup, activation: Activation, step: PackedStep) -> None:
        super().__init__()
        self._first, self._second = first, second
        self._activation: Activation = activation
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, D] -> [1, T, D]."""
        return self._step.compute_outputs(self._compute, x)

    def _compute(self, rows: Tensor, adapters: Grouping | None) -> Tensor:
        """[N, D] -> [N, D]."""
        inner = self._first.compute(rows, adapters)
        if self._activation != "silu":
            inner = activate_and_mul(inner, self._activation)
        return self._second.compute(inner, adapters)


class _Norm(nn.Module):
    """Replaces an RMSNorm."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class _Change(NamedTuple):
    """A replaced module: ``parent.name`` was ``original``."""

    parent: nn.Module
    name: str
    original: nn.Module


class Swaps(Layer):
    """Our layers in a transformers model."""

    def __init__(self, model: nn.Module, calls: RecordedCalls, step: PackedStep, placement: Placement) -> None:
        """Replace modules of the model. Our layers use the modules' weights until ``take_weights``.

        ``calls``: recorded in a run of the whole model.
        """
        self._step, self._placement = step, placement
        self._inputs, calls.inputs = calls.inputs, {}
        self._changes: list[_Change] = []
        self._replaced: set[nn.Module] = set()
        self._groups: list[_LinearGroup] = []
        self._norms: dict[str, RMSNorm] = {}
        self._tied: list[_TiedHead] = []
        self._head: nn.Module | None = cast("Any", model).get_output_embeddings()
        self._free = _free_modules(model)
        self._rebound = [layer.module for layer in step.layers if _rotate_by_kernel(layer.module)]
        for module, is_routed in calls.experts.items():
            if is_routed:
                _limit_to_outputs(module, step)
                self._rebound.append(module)
        for name, module in list(model.named_modules()):
            if module not in self._replaced:
                self._swap_parts(f"{name}." if name else "", module)

    def _swap_parts(self, prefix: str, parent: nn.Module) -> None:
        linears: dict[int, dict[str, nn.Linear]] = {}
        for name, child in list(parent.named_children()):
            x = self._inputs.get(child)
            if x is None:
                continue
            if child is self._head and child not in self._free and type(child) is nn.Linear and child.bias is None:
                self._tied.append(_TiedHead(child.weight.data))
                self._put(parent, name, self._tied[-1])
            elif child not in self._free:
                continue
            elif self._can_replace(child, x):
                linears.setdefault(id(x), {})[name] = cast("nn.Linear", child)
            elif (norm := find_norm(child, x, self._placement)) is not None:
                self._norms[f"{prefix}{name}"] = norm
                self._put(parent, name, _Norm(norm))
            elif (mlp := self._gated_mlp(f"{prefix}{name}.", child, x)) is not None:
                self._put(parent, name, mlp)
        for same_input in linears.values():
            has_biases = {module.bias is not None for module in same_input.values()}
            groups = [same_input] if len(has_biases) == 1 else [{name: child} for name, child in same_input.items()]
            for modules in groups:
                group = self._group(prefix, modules)
                for index, name in enumerate(modules):
                    self._put(parent, name, _GroupedLinear(group, index))

    def _can_replace(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether the module is a linear layer whose input x is [1, T, D]: all tokens in order."""
        if type(module) is not nn.Linear or module not in self._free:
            return False
        return module.weight.dtype == self._placement.dtype == x.dtype and x.shape[:-1] == (1, NUM_TRIED)

    def _gated_mlp(self, prefix: str, module: nn.Module, x: Tensor) -> _GatedMLP | None:
        """Return our MLP for a module with input x [1, T, D]; None if the module is no gated MLP."""
        linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        activations = [child for child in module.children() if type(child) is not nn.Linear]
        inputs = {name: self._inputs.get(child) for name, child in linears.items()}
        first = {name: child for name, child in linears.items() if inputs[name] is x}
        second = {name: child for name, child in linears.items() if inputs[name] is not x}
        is_plain = not module._parameters and not any(True for child in activations for _ in child.parameters())
        replaceable = all(y is not None and self._can_replace(linears[name], y) for name, y in inputs.items())
        if not (is_plain and replaceable and len(second) == 1 and 1 <= len(first) <= 2):
            return None
        if len({child.bias is None for child in first.values()}) > 1:
            return None
        gated = find_gated(module, list(first), *second)
        if gated is None:
            return None
        names, activation = gated
        ordered = {name: first[name] for name in names}
        gates = self._group(prefix, ordered, is_gated=activation == "silu")
        return _GatedMLP(gates, self._group(prefix, second), activation, self._step)

    def _group(self, prefix: str, modules: dict[str, nn.Linear], *, is_gated: bool = False) -> _LinearGroup:
        is_head = self._head in modules.values()
        group = _LinearGroup(prefix, modules, self._step, is_gated=is_gated, is_adaptable=not is_head)
        self._groups.append(group)
        return group

    def _put(self, parent: nn.Module, name: str, ours: nn.Module) -> None:
        original = parent.get_submodule(name)
        self._changes.append(_Change(parent, name, original))
        self._replaced.update(original.modules())
        parent._modules[name] = ours

    def undo(self) -> None:
        """Restore the original modules. Only valid before ``take_weights``."""
        for parent, name, original in self._changes:
            parent._modules[name] = original
        for module in self._rebound:
            del module.forward
        self._changes, self._rebound, self._groups, self._tied, self._norms = [], [], [], [], {}

    def take_weights(self) -> None:
        """Allocate the weights of our layers, and free those of the modules."""
        self._inputs, self._free, self._replaced, self._changes = {}, set(), set(), []
        for group in self._groups:
            group.take_weights(self._placement)
        self.parts = (
            *((group.prefix, group.layer) for group in self._groups),
            *((f"{name}.", norm) for name, norm in self._norms.items()),
        )
        if self._placement.device.type == "cuda":
            torch.cuda.empty_cache()

    def linears(self) -> list[tuple[str, Linear]]:
        """Return the layers that adapters may change, each with the prefix of its tensor names."""
        return [(group.prefix, group.layer) for group in self._groups if group.is_adaptable]

    def finish_loading(self) -> None:
        super().finish_loading()
        for head in self._tied:
            head.finish_loading()


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
    """Return whether ``actual`` equals ``expected`` [..., D] except for rounding."""
    if not isinstance(actual, torch.Tensor) or actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if actual.dtype != torch.float32:
        return float((actual != expected).float().mean()) < _FEW
    return bool(((actual - expected).abs() <= _CLOSE * expected.abs().amax(-1, keepdim=True)).all())


def _result(module: Callable[..., object], *inputs: Tensor) -> object:
    """Return the result of a changed copy of a module; None if it fails."""
    try:
        return module(*inputs)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _changed(module: nn.Module, *, parameters: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a shallow copy with other parameters [...] and submodules."""
    changed = copy.copy(module)
    changed._parameters = {name: nn.Parameter(values, requires_grad=False) for name, values in parameters.items()}
    changed._modules = {**module._modules, **modules}
    return changed


def find_norm(module: nn.Module, x: Tensor, placement: Placement) -> RMSNorm | None:
    """Return our norm for a module with input x [..., D]; None if the module computes something else."""
    if list(module._parameters) != ["weight"] or module._modules or module._buffers:
        return None
    weight = cast("Tensor", module.weight)
    if weight.shape != x.shape[-1:]:
        return None
    size, values = len(weight), vars(module).values()
    rows = (_random(1, _SCALES.shape[1], size) * _SCALES).to(x.dtype)
    trial_weight = (1.0 + 0.3 * _random(size)).to(weight.dtype)
    expected = _result(_changed(module, parameters={"weight": trial_weight}, modules={}), rows)
    on_host = replace(placement, device=torch.device("cpu"))
    for epsilon in {value for value in values if type(value) is float and 0.0 < value < _FEW}:
        for scales_in_fp32, offset in ((False, 0.0), (True, 0.0), (True, 1.0)):
            norm = RMSNorm(size, epsilon, on_host, scales_in_fp32=scales_in_fp32, offset=offset)
            norm.tensors()["weight"].tensor.copy_(trial_weight)
            norm.finish_loading()
            if isinstance(expected, torch.Tensor) and _agree(norm(rows[0])[None], expected):
                return RMSNorm(size, epsilon, placement, scales_in_fp32=scales_in_fp32, offset=offset)
    return None


def find_gated(module: nn.Module, first: list[str], second: str) -> tuple[list[str], Activation] | None:
    """Return the gate and up layers of a gated MLP, in this order, and its activation.

    Args:
        first: the linear layers that read the input: one fused layer with gates first, or two in any order.
        second: the output layer.

    Returns:
        None if the module computes something else.
    """
    size = 2 * _INNER_SIZE // len(first)
    x, second_weight = _random(1, 5, _GATED_SIZE) * _SCALES, _random(_GATED_SIZE, _INNER_SIZE)
    weights = dict(zip(first, _random(2 * _INNER_SIZE, _GATED_SIZE).split(size), strict=True))
    parts = {name: _linear(weight) for name, weight in (weights | {second: second_weight}).items()}
    expected = _result(_changed(module, parameters={}, modules=parts), x)
    for names in [first] if len(first) == 1 else [first, first[::-1]]:
        inner = functional.linear(x, torch.cat([weights[name] for name in names]))
        for activation in cast("tuple[Activation, ...]", get_args(Activation)):
            ours = functional.linear(reference_and_mul(inner, activation), second_weight)
            if isinstance(expected, torch.Tensor) and _agree(ours, expected):
                return names, activation
    return None


def _linear(weight: Tensor) -> nn.Linear:
    """Return a linear layer with weight [O, D]."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _limit_to_outputs(experts: nn.Module, step: PackedStep) -> None:
    """Let a module of ``RecordedCalls.experts`` compute only output tokens after the last attention.

    The other tokens get zeros.
    """
    compute = cast("Callable[..., Tensor]", experts.forward)

    def forward(*rows: Tensor) -> Tensor:
        """Tokens [T, D] and their routing [T, ...] -> [T, D]."""
        outputs = step.outputs if step.is_past_attention else None
        if outputs is None or len(outputs) >= len(rows[0]):
            return compute(*rows)
        results = compute(*(tensor.index_select(0, outputs) for tensor in rows))
        return results.new_zeros(rows[0].shape).index_copy_(0, outputs, results)

    experts.forward = forward


def _rotate_by_kernel(module: nn.Module) -> bool:
    """Let an attention module use our rotation kernel if its own function computes the same. Return whether it does.

    Binds a copy of ``forward`` in which the name of the function refers to ours. Other modules are not affected.
    """
    forward = vars(type(module)).get("forward")
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    original = forward.__globals__.get(_ROTATION)
    if not callable(original) or _ROTATION not in forward.__code__.co_names or not _rotates_halves(original):
        return False

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """q [1, H, T, E], k [1, K, T, E], cos and sin [1, T, E] -> q and k."""
        if args or kwargs or not takes(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate_qk(q, k, cos, sin)

    names = {**forward.__globals__, _ROTATION: rotate}
    bound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(bound, module)
    return True


def _rotates_halves(function: Callable[..., object]) -> bool:
    """Return whether the function computes the same as ``rotate_qk``."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = (_random(*shape, dtype=dtype) for shape in ((1, 6, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8)))
        actual = _result(function, q, k, cos, sin + 0.5)
        if not isinstance(actual, tuple) or not all(map(_agree, actual, rotated(q, k, cos, sin + 0.5))):
            return False
    return True
