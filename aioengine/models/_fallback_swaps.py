"""Our layers in the place of those of transformers' modules, where they compute the same.

What a module computes is found out, not read from its name: a run with a few tokens notes which modules get one tensor
alone, and which of them get the same one (``NotedCalls``); a copy of a module with small random weights is then
compared with our layer. Linear layers that read one tensor become one matmul. Weights are loaded into our layers, which
replace the modules: nothing is kept twice.

T tokens, D input size, O output size, I inner size, H query heads, K kv heads, E head size.
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
from aioengine.layers.linear import Linear
from aioengine.layers.norm import RMSNorm
from aioengine.models._fallback_attention import NUM_TRIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from aioengine.kernels.linear import Matmul
    from aioengine.layers.adapters import Grouping
    from aioengine.layers.placement import Placement
    from aioengine.models._fallback_attention import PackedStep

_ROTATION: Final = "apply_rotary_pos_emb"
"""The function that modules of transformers rotate queries and keys with."""
_SCALES: Final = torch.tensor([1e-3, 0.1, 1.0, 10.0, 1000.0])[None, :, None]
"""Of the rows that are tried: small ones show an epsilon, large ones show limits."""
_CLOSE: Final = 1e-5
_FEW: Final = 0.01
"""The share of 16-bit numbers that may differ in their last bit."""
_GATED_SIZE, _INNER_SIZE = 8, 16


class NotedCalls:
    """The modules that a run calls once, and with one tensor alone.

    Attributes:
        experts: modules with matrices [X, O, D], and whether they make of tokens [T, D] and their routing [T, D].
    """

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.experts: dict[nn.Module, bool] = {}
        self._others: set[nn.Module] = set()
        hooks = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in model.modules()]
        with_experts = [
            module for module in model.modules() if any(each.ndim == 3 for each in module.parameters(recurse=False))
        ]
        hooks += [module.register_forward_hook(self._note_experts, with_kwargs=True) for module in with_experts]
        self._hooks = hooks

    def _note(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """The first call puts the module among ``inputs``, any other takes it out."""
        if module in self._others:
            return
        known = self.inputs.pop(module, None)
        if known is None and len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            self.inputs[module] = args[0]
        else:
            self._others.add(module)

    def _note_experts(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> None:
        """All calls must give a row of each tensor to each token, and nothing else."""
        shapes = [each.shape for each in (result, *args) if isinstance(each, torch.Tensor)]
        has_rows = not kwargs and len(shapes) == 1 + len(args) and all(each[:1] == (NUM_TRIED,) for each in shapes)
        is_routed = has_rows and len(args) > 1 and shapes[0] == shapes[1] and len(shapes[0]) == 2
        self.experts[module] = is_routed and self.experts.get(module, True)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _LinearGroup:
    """Linear layers that read one tensor, as one matmul. Until ``take`` it computes with their own weights.

    Attributes:
        prefix: of the names of the layers.
        is_adaptable: adapters may change them.
    """

    def __init__(
        self, prefix: str, modules: dict[str, nn.Linear], step: PackedStep, *, is_gated: bool, is_adaptable: bool
    ) -> None:
        """``modules``: by the last part of their names. ``is_gated``: as in ``Linear``."""
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

    def take(self, placement: Placement) -> None:
        """Make our layer, and let go of the modules and their memory."""
        self._modules = []
        self._layer = Linear(self._in_features, self._parts, placement, bias=self._has_bias, is_gated=self._is_gated)

    @property
    def taken(self) -> Linear:
        """Our layer, behind ``take``."""
        assert self._layer is not None, "the layers have their own weights"
        return self._layer

    def of_rows(self, rows: Tensor, adapters: Grouping | None) -> Tensor:
        """rows [N, D] -> [N, O] of all layers; [N, O / 2] if they are gated."""
        if self._layer is not None:
            return self._layer(rows, adapters)
        y = torch.cat([module(rows) for module in self._modules], dim=1)
        return activate_and_mul(y, "silu") if self._is_gated else y

    def of_one(self, x: Tensor, index: int) -> Tensor:
        """x [1, T, D] -> [1, T, O] of one layer; the results of the others are kept until they are asked for."""
        if x is not self._input or index not in self._results:
            y = self._step.of_wanted(self.of_rows, x)
            self._input, self._results = x, dict(enumerate(y.split([*self._parts.values()], dim=-1)))
        result = self._results.pop(index)
        if not self._results:
            self._input = None
        return result


class _GroupedLinear(nn.Module):
    """Takes the place of a linear layer."""

    def __init__(self, group: _LinearGroup, index: int) -> None:
        super().__init__()
        self._group = group
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., O]."""
        return self._group.of_one(x, self._index)


class _TiedHead(nn.Module):
    """Takes the place of a head whose weight [V, D] is that of the embedding."""

    def __init__(self, weight: Tensor) -> None:
        """weight [V, D]."""
        super().__init__()
        self._weight = weight
        self._matmul: Matmul = partial(matmuls.reference, weight=weight, bias=None)
        self._is_prepared = False

    def finish_loading(self) -> None:
        """Prepare the matmul; again after new weights were loaded, if it reads a copy of them."""
        if not self._is_prepared or matmuls.packs(self._weight.dtype, self._weight.device):
            self._matmul, self._is_prepared = matmuls.prepare(self._weight, None), True

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return self._matmul(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _GatedMLP(nn.Module):
    """Takes the place of an MLP: second(activation(gates) * others)."""

    def __init__(self, first: _LinearGroup, second: _LinearGroup, activation: Activation, step: PackedStep) -> None:
        super().__init__()
        self._first, self._second = first, second
        self._activation: Activation = activation
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, D] -> [1, T, D]."""
        return self._step.of_wanted(self._of_rows, x)

    def _of_rows(self, rows: Tensor, adapters: Grouping | None) -> Tensor:
        """[N, D] -> [N, D]."""
        inner = self._first.of_rows(rows, adapters)
        if self._activation != "silu":
            inner = activate_and_mul(inner, self._activation)
        return self._second.of_rows(inner, adapters)


class _Norm(nn.Module):
    """Takes the place of a norm by the root mean square."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class _Change(NamedTuple):
    """``parent`` had ``theirs`` as its part ``name``."""

    parent: nn.Module
    name: str
    theirs: nn.Module


class Swaps:
    """Our layers in a model of transformers."""

    def __init__(self, model: nn.Module, noted: NotedCalls, step: PackedStep, placement: Placement) -> None:
        """Put them into the model, with the weights that are there; ``take`` gives them their own.

        ``noted``: of a run of the whole model.
        """
        self._step, self._placement = step, placement
        self._inputs, noted.inputs = noted.inputs, {}
        self._changes: list[_Change] = []
        self._gone: set[nn.Module] = set()
        self._groups: list[_LinearGroup] = []
        self._norms: dict[str, RMSNorm] = {}
        self._tied: list[_TiedHead] = []
        self._head: nn.Module | None = cast("Any", model).get_output_embeddings()
        self._free = _free_modules(model)
        self._rebound = [found.module for found in step.found if _rotate_by_kernel(found.module)]
        for module, is_routed in noted.experts.items():
            if is_routed:
                _compute_wanted(module, step)
                self._rebound.append(module)
        for name, module in list(model.named_modules()):
            if module not in self._gone:
                self._swap_parts(f"{name}." if name else "", module)

    def _swap_parts(self, prefix: str, parent: nn.Module) -> None:
        linears: dict[int, dict[str, nn.Linear]] = {}
        for name, child in list(parent.named_children()):
            given = self._inputs.get(child)
            if given is None:
                continue
            if child is self._head and child not in self._free and type(child) is nn.Linear and child.bias is None:
                self._tied.append(_TiedHead(child.weight.data))
                self._put(parent, name, self._tied[-1])
            elif child not in self._free:
                continue
            elif self._serves(child, given):
                linears.setdefault(id(given), {})[name] = cast("nn.Linear", child)
            elif (norm := find_norm(child, given, self._placement)) is not None:
                self._norms[f"{prefix}{name}"] = norm
                self._put(parent, name, _Norm(norm))
            elif (mlp := self._gated_mlp(f"{prefix}{name}.", child, given)) is not None:
                self._put(parent, name, mlp)
        for found in linears.values():
            has_biases = {module.bias is not None for module in found.values()}
            for modules in [found] if len(has_biases) == 1 else [{name: each} for name, each in found.items()]:
                group = self._group(prefix, modules)
                for index, name in enumerate(modules):
                    self._put(parent, name, _GroupedLinear(group, index))

    def _serves(self, module: nn.Module, given: Tensor) -> bool:
        """Whether it is a linear layer through which all tokens of a step go in their order: [1, T, D]."""
        if type(module) is not nn.Linear or module not in self._free:
            return False
        return module.weight.dtype == self._placement.dtype == given.dtype and given.shape[:-1] == (1, NUM_TRIED)

    def _gated_mlp(self, prefix: str, module: nn.Module, given: Tensor) -> _GatedMLP | None:
        """Our MLP in the place of a module that gets ``given`` [1, T, D]; None: it is no such MLP."""
        linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        others = [child for child in module.children() if type(child) is not nn.Linear]
        inputs = {name: self._inputs.get(child) for name, child in linears.items()}
        first = {name: child for name, child in linears.items() if inputs[name] is given}
        second = {name: child for name, child in linears.items() if inputs[name] is not given}
        is_plain = not module._parameters and not any(True for each in others for _ in each.parameters())
        served = all(each is not None and self._serves(linears[name], each) for name, each in inputs.items())
        if not (is_plain and served and len(second) == 1 and 1 <= len(first) <= 2):
            return None
        if len({child.bias is None for child in first.values()}) > 1:
            return None
        found = find_gated(module, list(first), *second)
        if found is None:
            return None
        names, activation = found
        ordered = {name: first[name] for name in names}
        gates = self._group(prefix, ordered, is_gated=activation == "silu")
        return _GatedMLP(gates, self._group(prefix, second), activation, self._step)

    def _group(self, prefix: str, modules: dict[str, nn.Linear], *, is_gated: bool = False) -> _LinearGroup:
        is_head = self._head in modules.values()
        group = _LinearGroup(prefix, modules, self._step, is_gated=is_gated, is_adaptable=not is_head)
        self._groups.append(group)
        return group

    def _put(self, parent: nn.Module, name: str, ours: nn.Module) -> None:
        theirs = parent.get_submodule(name)
        self._changes.append(_Change(parent, name, theirs))
        self._gone.update(theirs.modules())
        parent._modules[name] = ours

    def undo(self) -> None:
        """Put everything back; only before ``take``."""
        for parent, name, theirs in self._changes:
            parent._modules[name] = theirs
        for module in self._rebound:
            del module.forward
        self._changes, self._rebound, self._groups, self._tied, self._norms = [], [], [], [], {}

    def take(self) -> None:
        """Make the weights of our layers, and let go of theirs."""
        self._inputs, self._free, self._gone, self._changes = {}, set(), set(), []
        for group in self._groups:
            group.take(self._placement)
        if self._placement.device.type == "cuda":
            torch.cuda.empty_cache()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names of transformers, and the tensors [...] of our layers to load."""
        for group in self._groups:
            yield from ((name, target.tensor) for name, target in group.taken.weights(group.prefix).items())
        for name, norm in self._norms.items():
            yield from ((each, target.tensor) for each, target in norm.weights(name).items())

    def linears(self) -> list[tuple[str, Linear]]:
        """Those that adapters may change, each with the prefix of the names of its parts."""
        return [(group.prefix, group.taken) for group in self._groups if group.is_adaptable]

    def finish_loading(self) -> None:
        for group in self._groups:
            group.taken.finish_loading()
        for norm in self._norms.values():
            norm.finish_loading()
        for head in self._tied:
            head.finish_loading()

    def open_for_loading(self) -> None:
        for group in self._groups:
            group.taken.open_for_loading()


def _free_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that stand at one place, with weights of their own."""
    weights = Counter(id(each) for part in model.modules() for each in part._parameters.values() if each is not None)
    places = Counter(id(child) for part in model.modules() for child in part.children())
    return {
        part
        for part in model.modules()
        if places[id(part)] == 1 and all(weights[id(each)] == 1 for each in part.parameters(recurse=False))
    }


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers [*shape], the same ones in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _agree(found: object, expected: Tensor) -> bool:
    """Whether ``found`` is ``expected`` [..., D] but for rounding."""
    if not isinstance(found, torch.Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype != torch.float32:
        return float((found != expected).float().mean()) < _FEW
    return bool(((found - expected).abs() <= _CLOSE * expected.abs().amax(-1, keepdim=True)).all())


def _result(module: Callable[..., object], *inputs: Tensor) -> object:
    """What a changed copy of a module computes; None: it cannot be changed like this."""
    try:
        return module(*inputs)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _changed(module: nn.Module, *, parameters: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy on the CPU with these parameters [...] and parts; all else is shared."""
    changed = copy.copy(module)
    changed._parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in parameters.items()}
    changed._modules = {**module._modules, **modules}
    return changed


def find_norm(module: nn.Module, given: Tensor, placement: Placement) -> RMSNorm | None:
    """Our norm in the place of a module that gets ``given`` [..., D]; None: it computes something else."""
    if list(module._parameters) != ["weight"] or module._modules or module._buffers:
        return None
    weight = cast("Tensor", module.weight)
    if weight.shape != given.shape[-1:]:
        return None
    size, values = len(weight), vars(module).values()
    x = (_random(1, _SCALES.shape[1], size) * _SCALES).to(given.dtype)
    tried = (1.0 + 0.3 * _random(size)).to(weight.dtype)
    expected = _result(_changed(module, parameters={"weight": tried}, modules={}), x)
    on_host = replace(placement, device=torch.device("cpu"))
    for epsilon in {each for each in values if type(each) is float and 0.0 < each < _FEW}:
        for is_wide, offset in ((False, 0.0), (True, 0.0), (True, 1.0)):
            norm = RMSNorm(size, epsilon, on_host, is_wide=is_wide, offset=offset)
            norm.weights("")[".weight"].tensor.copy_(tried)
            norm.finish_loading()
            if isinstance(expected, torch.Tensor) and _agree(norm(x[0])[None], expected):
                return RMSNorm(size, epsilon, placement, is_wide=is_wide, offset=offset)
    return None


def find_gated(module: nn.Module, first: list[str], second: str) -> tuple[list[str], Activation] | None:
    """The layers of a gated MLP that are its gates and what they gate, in this order, and its activation.

    Args:
        first: the linear layers that read its input; where it is one, its first half are the gates.

    Returns:
        None: the module computes something else.
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
    """A layer with weight [O, D]."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _compute_wanted(experts: nn.Module, step: PackedStep) -> None:
    """Let a module of ``NotedCalls.experts`` compute behind the last attention the tokens that are wanted alone; the
    others get zeros.
    """
    compute = cast("Callable[..., Tensor]", experts.forward)

    def forward(*rows: Tensor) -> Tensor:
        """Tokens [T, D] and their routing [T, ...] -> [T, D]."""
        wanted = step.outputs if step.is_rewound else None
        if wanted is None or len(wanted) >= len(rows[0]):
            return compute(*rows)
        found = compute(*(each.index_select(0, wanted) for each in rows))
        return found.new_zeros(rows[0].shape).index_copy_(0, wanted, found)

    experts.forward = forward


def _rotate_by_kernel(module: nn.Module) -> bool:
    """Let an attention module rotate with our kernel where its own function computes the same; returns whether it does.

    Its ``forward`` is bound anew, with our function under the name of its own; no other module sees it.
    """
    forward = vars(type(module)).get("forward")
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    theirs = forward.__globals__.get(_ROTATION)
    if not callable(theirs) or _ROTATION not in forward.__code__.co_names or not _rotates_halves(theirs):
        return False

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        """q [1, H, T, E], k [1, K, T, E], cos and sin [1, T, E] -> q and k."""
        if others or named or not takes(q, k, cos, sin):
            return theirs(q, k, cos, sin, *others, **named)
        return rotate_qk(q, k, cos, sin)

    names = {**forward.__globals__, _ROTATION: rotate}
    bound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(bound, module)
    return True


def _rotates_halves(function: Callable[..., object]) -> bool:
    """Whether it is ``rotate_qk``."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = (_random(*shape, dtype=dtype) for shape in ((1, 6, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8)))
        found = _result(function, q, k, cos, sin + 0.5)
        if not isinstance(found, tuple) or not all(map(_agree, found, rotated(q, k, cos, sin + 0.5))):
            return False
    return True
