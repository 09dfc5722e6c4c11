"""Compile Triton kernels for Hopper without a GPU. The interpreter accepts code that the compiler refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 232_448
"""Shared memory per program on Hopper."""
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compile_for_hopper(
    launcher: Any, _grid: tuple[int, int, int], _key: Hashable, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Replaces ``KernelLauncher.__call__``: compile the specialization without launching it, and return it."""
    kernel = launcher._kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, GluonDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{block}]>"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=HOPPER, options=dict(options))
    assert compiled.metadata.shared <= SHARED_BYTES, f"{kernel.__name__}: {compiled.metadata.shared} bytes"
    if kernel.is_gluon():  # ptxas 12.8 may load spilled registers before it stores them
        assert " STL" not in compiled.asm["sass"], f"{kernel.__name__} spills registers"
    return compiled
