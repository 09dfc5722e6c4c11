"""Stateful operations match transformers, do not depend on chunks, and match the Triton kernels in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from aioengine.kernels.causal_conv import causal_conv
from aioengine.kernels.gated_delta import gated_delta
from aioengine.kernels.norms import gated_rms_norm
from aioengine.kernels.state_space import state_space
from aioengine.kernels.state_types import DeltaGates, SpaceWeights, StateRows
from tests.compute.interpreted import run_interpreted

NUM_TOKENS, NUM_HEADS, NUM_KEY_HEADS, KEY_SIZE, VALUE_SIZE, WIDTH = 70, 4, 2, 8, 12, 4
NUM_KEYS = NUM_KEY_HEADS * KEY_SIZE
NUM_CHANNELS = 2 * NUM_KEYS + NUM_HEADS * VALUE_SIZE
CHUNKS = ([NUM_TOKENS], [1] * NUM_TOKENS, [3, 7, 60], [64, 5, 1], [7] * 10)


class Layer:
    """Random inputs and weights, and a pool of three states with leftovers of earlier requests, some of them NaN."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(NUM_TOKENS, NUM_CHANNELS + 2 * NUM_HEADS + 5).to(dtype)
        self.weight = torch.randn(NUM_CHANNELS, WIDTH).to(dtype)
        self.log_rate, self.bias = torch.randn(2, NUM_HEADS)
        self.inputs = torch.randn(3, WIDTH - 1, NUM_CHANNELS).to(dtype)
        self.matrices = torch.full((3, NUM_HEADS, KEY_SIZE, VALUE_SIZE), torch.nan)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, DeltaGates]:
        """Split x [T, ...] into the inputs of the convolution [T, C] and the gates."""
        inputs, scores, steps, _ = x.split([NUM_CHANNELS, NUM_HEADS, NUM_HEADS, 5], dim=1)
        return inputs, DeltaGates(steps=steps, scores=scores, log_rate=self.log_rate, bias=self.bias)

    def run(self, chunks: list[int], *, slot: int = 1) -> list[torch.Tensor]:
        """Return channels [T, C], outputs [T, H, V], and the final states."""
        inputs, matrices = self.inputs.clone(), self.matrices.clone()
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for count in chunks:
            rows = StateRows(torch.tensor([slot]), torch.tensor([start]), torch.tensor([count]))
            x, gates = self.parts(self.x[start : start + count])
            channels = causal_conv(x, self.weight, inputs, rows)
            parts.append((channels, gated_delta(channels, gates, matrices, rows)))
            start += count
        return [*(torch.cat(part) for part in zip(*parts, strict=True)), inputs[slot], matrices[slot]]


def test_outputs_and_states_match_transformers() -> None:
    layer = Layer()
    channels, outputs, inputs, matrices = layer.run([NUM_TOKENS])
    x, gates = layer.parts(layer.x)
    expected = causal_conv1d_fn(x.T.unsqueeze(0), layer.weight, activation="silu")[0].T
    torch.testing.assert_close(channels, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(inputs, x[-WIDTH + 1 :])
    q, k, v = channels.unsqueeze(0).split([NUM_KEYS, NUM_KEYS, NUM_HEADS * VALUE_SIZE], dim=-1)
    expected, state = torch_chunk_gated_delta_rule(
        q.unflatten(2, (-1, KEY_SIZE)),
        k.unflatten(2, (-1, KEY_SIZE)),
        v.unflatten(2, (-1, VALUE_SIZE)),
        g=-(gates.log_rate.exp() * torch.nn.functional.softplus(gates.steps + gates.bias)).unsqueeze(0),
        beta=gates.scores.sigmoid().unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert state is not None
    torch.testing.assert_close(outputs, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(matrices, state[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_depend_neither_on_chunks_nor_on_other_rows(dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    whole = layer.run([NUM_TOKENS])
    assert all(part.isfinite().all() for part in whole)
    for chunks in CHUNKS:
        assert all(map(torch.equal, layer.run(chunks, slot=2), whole)), chunks
    inputs, matrices = layer.inputs.clone(), layer.matrices.clone()
    x, gates = layer.parts(torch.cat((layer.x[:9], layer.x)))
    rows = StateRows(torch.tensor([2, 0]), torch.tensor([0, 0]), torch.tensor([9, 9 + NUM_TOKENS]))
    channels = causal_conv(x, layer.weight, inputs, rows)
    outputs = gated_delta(channels, gates, matrices, rows)
    assert all(map(torch.equal, (channels[9:], outputs[9:], inputs[0], matrices[0]), whole))
    assert torch.equal(outputs[:9], whole[1][:9])


def test_gated_norm_matches_transformers() -> None:
    torch.manual_seed(0)
    heads, gates, weight = torch.randn(5, 4, 12), torch.randn(5, 60), torch.randn(12)
    theirs = Qwen3NextRMSNormGated(12)
    theirs.weight.copy_(weight)
    result = gated_rms_norm(heads, gates[:, 7:55], weight, torch.tensor(1e-6))
    expected = theirs(heads.flatten(0, 1), gates[:, 7:55].reshape(20, 12)).view(5, 48)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)


class Space:
    """Like ``Layer``, for Mamba 2: 4 heads in 2 groups."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(NUM_TOKENS, NUM_CHANNELS + NUM_HEADS + 3).to(dtype)
        log_rate, bias, skip = torch.randn(3, NUM_HEADS)
        self.weights = SpaceWeights(log_rate=log_rate, bias=bias, skip=skip, limits=(0.01, math.inf))
        self.matrices = torch.full((3, NUM_HEADS, KEY_SIZE, VALUE_SIZE), torch.nan)

    def run(self, chunks: list[int], slot: int) -> list[torch.Tensor]:
        """Return outputs [T, H, V], and the final state."""
        matrices, start = self.matrices.clone(), 0
        parts: list[torch.Tensor] = []
        for count in chunks:
            rows = StateRows(torch.tensor([slot]), torch.tensor([start]), torch.tensor([count]))
            channels, steps, _ = self.x[start : start + count].split([NUM_CHANNELS, NUM_HEADS, 3], dim=1)
            parts.append(state_space(channels, steps, self.weights, matrices, rows=rows))
            start += count
        return [torch.cat(parts), matrices[slot]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_space_does_not_depend_on_chunks(dtype: torch.dtype) -> None:
    space = Space(dtype)
    whole = space.run([NUM_TOKENS], 1)
    assert all(part.isfinite().all() for part in whole)
    for chunks in CHUNKS:
        assert all(map(torch.equal, space.run(chunks, 2), whole)), chunks


PROGRAM = """
import torch

from aioengine.kernels import causal_conv, gated_delta, norms, state_space
from aioengine.kernels.state_types import StateRows
from aioengine.kernels.triton import causal_conv as conv_kernels, gated_delta as delta_kernels
from aioengine.kernels.triton import state_space as space_kernels
from aioengine.kernels.state_types import DeltaGates
from aioengine.layers.mixer import token_blocks
from aioengine.runner.state_pool import StatePool
from tests.compute.kernels.test_state_kernels import Layer, Space

layer = Layer()
inputs, matrices = torch.randn_like(layer.inputs), torch.randn_like(layer.matrices)
for counts, starts in (([1, 1, 1], [0, 4, 1]), ([2, 67, 1], [0, 3, 1]), ([64, 2, 1], [5, 0, 0]), ([1], [2])):
    x, gates = layer.parts(layer.x[: sum(counts)])
    blocks = None if len(counts) == len(x) else torch.from_numpy(token_blocks(torch.tensor(counts).numpy()))
    rows = StateRows(
        torch.tensor([2, 0, 1][: len(counts)]), torch.tensor(starts), torch.tensor(counts).cumsum(0), blocks
    )
    ours, theirs = inputs.clone(), inputs.clone()
    channels = causal_conv.causal_conv(x, layer.weight, ours, rows)
    result = conv_kernels.causal_conv(x, layer.weight, theirs, rows, bias=None, activates=True)
    torch.testing.assert_close(result, channels)
    assert torch.equal(ours, theirs)
    bias = torch.randn(len(layer.weight))
    ours, theirs = inputs.clone(), inputs.clone()
    expected = causal_conv.causal_conv(x, layer.weight, ours, rows, bias=bias, activates=False)
    result = conv_kernels.causal_conv(x, layer.weight, theirs, rows, bias=bias, activates=False)
    torch.testing.assert_close(result, expected)
    equal_keys = channels.clone()
    equal_keys[:, 16:32] = equal_keys[:1, 16:32]  # their updates depend most on each other
    for in_blocks, channels in ((False, channels), (True, channels), (True, equal_keys)):
        ours, theirs = matrices.clone(), matrices.clone()
        outputs = gated_delta.gated_delta(channels, gates, ours, rows)
        result = delta_kernels.gated_delta(channels, gates, theirs, rows, in_blocks=in_blocks)
        torch.testing.assert_close(result, outputs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)

space = Space()
for counts, starts in (([1, 1, 1], [0, 4, 1]), ([2, 67, 1], [0, 3, 1]), ([64, 2, 1], [5, 0, 0])):
    channels, steps, _ = space.x[: sum(counts)].split([layer.weight.shape[0], 4, 3], dim=1)
    blocks = None if max(counts) == 1 else torch.from_numpy(token_blocks(torch.tensor(counts).numpy()))
    rows = StateRows(torch.tensor([2, 0, 1]), torch.tensor(starts), torch.tensor(counts).cumsum(0), blocks)
    for in_blocks in (False, True):
        ours, theirs = matrices.clone(), matrices.clone()
        channels = channels.contiguous()
        expected = state_space.state_space(channels, steps, space.weights, ours, rows=rows)
        result = space_kernels.state_space(channels, steps, space.weights, theirs, rows=rows, in_blocks=in_blocks)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)

pool = StatePool.__new__(StatePool)
pool.tensors, pool._max_rows = (inputs, matrices), 2
padded = pool.padded(256, 4).rows
x, gates = layer.parts(layer.x)
for counts in ([64, 2], [1, 1], [3, 40]):
    blocks = None if max(counts) == 1 else torch.from_numpy(token_blocks(torch.tensor(counts).numpy()))
    rows = StateRows(torch.tensor([1, 0]), torch.tensor([0, 3]), torch.tensor(counts).cumsum(0), blocks)
    pool.fill(padded, rows)
    ours, theirs = [inputs.clone(), matrices.clone()], [inputs.clone(), matrices.clone()]
    total = sum(counts)
    channels = causal_conv.causal_conv(x[:total], layer.weight, ours[0], rows)
    part = DeltaGates(steps=gates.steps[:total], scores=gates.scores[:total], log_rate=gates.log_rate, bias=gates.bias)
    outputs = gated_delta.gated_delta(channels, part, ours[1], rows)
    result = conv_kernels.causal_conv(x, layer.weight, theirs[0], padded, bias=None, activates=True)
    torch.testing.assert_close(result[:total], channels)
    result = delta_kernels.gated_delta(result, gates, theirs[1], padded, in_blocks=True)
    torch.testing.assert_close(result[:total], outputs, atol=1e-5, rtol=1e-4)
    assert not result[total:].any()
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one[:2], other[:2], atol=1e-5, rtol=1e-4)

heads, gates, weight, epsilon = torch.randn(5, 4, 12), torch.randn(5, 60), torch.randn(12), torch.tensor(1e-6)
arguments = heads, gates[:, 7:55], weight, epsilon
torch.testing.assert_close(delta_kernels.gated_rms_norm(*arguments), norms.gated_rms_norm(*arguments))
"""


@pytest.mark.slow
def test_kernels_match_torch() -> None:
    run_interpreted(PROGRAM)
