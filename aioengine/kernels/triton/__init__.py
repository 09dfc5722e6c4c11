"""Kernels for NVIDIA GPUs, in Triton. All modules but ``launcher`` import it.

``@kernel()`` marks kernels: a launch runs a grid of programs. ``@triton.jit`` marks functions that kernels call. The
docstring of a file says what its kernels compute, what one program computes, and in which order sums are added. If a
row must have the same bits for any other rows, this order must not depend on them. Sizes of programs were measured on
an H200, unless stated otherwise.

Names in all files:

- row: a row of x and of the result. line: a row of a weight. An output has one line, or a gate and an up.
- columns: indices of inputs, the columns of x and of the weight. SIZE: the number of inputs.
- tile: the rows and outputs of a program, ROWS and OUTPUTS. BLOCK: the inputs that it loads at a time, in attention the
  positions. STAGES: the number of blocks in flight. SPLITS: parts of the inputs, which different programs add.
- vectors: a loaded block of x. part: a loaded block of the weight. total: sums in fp32.
- pointers: addresses. places: offsets. inside, is_...: masks. clamped: indices that are limited to the last valid one,
  so that loads need no mask.
- Parameters in capitals are constants of the compiled code. A parameter that is None is left out of it.
"""
