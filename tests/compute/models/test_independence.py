"""The bits of a token's results do not depend on the batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config

from aioengine import models
from aioengine.attention import _cpu_kernels, fused
from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.attention.fused import CHUNK, FusedAttention
from aioengine.attention.torch import TorchAttention
from aioengine.families._block_config import Activation
from aioengine.kernels.activation import activate, activate_and_mul
from aioengine.kernels.heads import rope
from aioengine.kernels.norms import rms_norm
from tests.compute.stepping import Request, Stepper, make_batch, make_inputs, options, write_and_attend
from tests.kit.decoders import ONE_OF_EACH, config_of

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [896, 256, 80, 24])
def test_elementwise_operations_do_not_depend_on_number_of_rows(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1500, size).to(dtype), torch.randn(1500, 2 * size).to(dtype) * 5
    weight, cos, sin = torch.randn(size).to(dtype), torch.randn(1500, 1, size), torch.randn(1500, 1, size)
    heads, epsilon = torch.randn(1500, 3, size).to(dtype), torch.tensor(1e-6)
    normed, gated, rotated = rms_norm(x, weight, epsilon), activate_and_mul(y, "silu"), rope(heads, cos, sin)
    for start, count in itertools.product((0, 3, 700), (1, 2, 3, 7, 33, 129, 777)):
        rows = slice(start, start + count)
        assert torch.equal(rms_norm(x[rows].clone(), weight, epsilon), normed[rows])
        assert torch.equal(activate_and_mul(y[rows].clone(), "silu"), gated[rows])
        assert torch.equal(rope(heads[rows].clone(), cos[rows], sin[rows]), rotated[rows])


@pytest.mark.parametrize("name", get_args(Activation))
def test_activations_do_not_depend_on_element_index(name: Activation) -> None:
    """torch computes the last elements of a range one by one, with other functions than the others."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite() & (every.abs() < 1e30)]
    for x in (finite, finite[::4].float() * 1.01, torch.randn(1 << 14) * 4):
        whole = activate(x.clone(), name)
        alone = torch.cat([activate(part.clone(), name) for part in x.split(7)])
        assert torch.equal(whole, alone)
        many = x[: 20 * 500].view(20, 500)
        assert torch.equal(activate(many.clone(), name).flatten(), whole[: 20 * 500])
        gated = torch.cat((many, torch.ones_like(many)), dim=1)
        rows = torch.cat([activate_and_mul(row.clone(), name) for row in gated.split(1)])
        assert torch.equal(activate_and_mul(gated.clone(), name), rows)


Backend = FusedAttention | TorchAttention
BACKENDS: tuple[type[Backend], ...] = (FusedAttention, TorchAttention)
ATTENTIONS = ((14, 2, 64, 16), (4, 1, 24, 8), (8, 8, 32, 256), (40, 2, 80, 1), (16, 8, 128, 32))


def run_attention(
    backend: Backend, tokens: tuple[torch.Tensor, ...], rows: list[tuple[int, int]], table: list[int]
) -> torch.Tensor:
    page_size = backend.page_size
    backend.prepare(make_batch(rows, [table] * len(rows), page_size))
    chosen = torch.cat([torch.arange(start, start + count) for start, count in rows])
    q, k, v = (part[chosen] for part in tokens)
    return write_and_attend(backend, q, k, v, 0)


LAYERS = (
    *((sizes, 2, None, False) for sizes in ATTENTIONS),
    (ATTENTIONS[0], 1, None, False),
    (ATTENTIONS[0], 1, 300, True),
    (ATTENTIONS[1], 2, 5, False),
    (ATTENTIONS[2], 2, 600, False),
    (ATTENTIONS[4], 1, None, True),
)


def attention_cases() -> list[ParameterSet]:
    """Return layer, dtype and backend. By default each layer has two of the four cases, in turns."""
    parameters: list[ParameterSet] = []
    for place, layer in enumerate(LAYERS):
        for dtype, backend in itertools.product(DTYPES, BACKENDS):
            is_default = (place + DTYPES.index(dtype) + BACKENDS.index(backend)) % 2 == 0
            parameters.append(pytest.param(*layer, dtype, backend, marks=() if is_default else pytest.mark.slow))
    return parameters


@pytest.mark.parametrize(("sizes", "num_threads", "window", "has_sinks", "dtype", "backend_class"), attention_cases())
def test_attention_of_a_token_does_not_depend_on_chunks_rows_or_pages(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    num_threads: int,
    window: int | None,
    has_sinks: bool,
    backend_class: type[Backend],
) -> None:
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_size, page_size = sizes
    length = 2 * CHUNK + 77
    shape = AttentionShape(
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        windows=(window,),
        sinks=(torch.randn(num_heads),) if has_sinks else (),
    )
    heads = (num_heads, num_kv_heads, num_kv_heads)
    tokens = tuple(torch.randn(length, number, head_size).to(dtype) for number in heads)
    num_pages = -(-length // page_size)
    pool = torch.zeros(kv_pool_shape(shape, num_pages=2 * num_pages, page_size=page_size), dtype=dtype)
    if backend_class is FusedAttention and not fused.supports(shape, dtype, pool.device):
        with pytest.raises(ValueError, match=f"head size {head_size}"):
            backend_class(shape, pool)
        return
    backend = backend_class(shape, pool)
    whole = run_attention(backend, tokens, [(0, length)], list(range(num_pages)))
    table = (torch.randperm(num_pages) + num_pages).tolist()
    pool[:, :, num_pages:] = 1e33  # huge numbers of an earlier owner of the pages
    start = 0
    for count in (100, 1, 7, 256, 1, 1, 50, 33, length - 449):
        part = run_attention(backend, tokens, [(start, count)], table)
        assert torch.equal(part, whole[start : start + count]), (start, count)
        start += count
    for rows in (
        [(5, 1), (300, 40), (length - 1, 1), (255, 1), (256, 1)],
        [(580, 1)] * 9 + [(3, 5)],
        [(0, 1)],
        [(255, 1)] * 5,
        [(580, 1), (560, 1), (530, 1), (545, 1), (300, 1), (5, 1)],
        [(20, 1)] * 3,
        [(1060, 1), (1030, 1), (1100, 1), (1025, 1), (700, 1), (600, 20)],
    ):
        chosen = torch.cat([torch.arange(start, start + count) for start, count in rows])
        assert torch.equal(run_attention(backend, tokens, rows, table), whole[chosen]), rows


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(None, None, False), (1, None, False), (70, None, True), (530, 3.0, False), (None, 0.5, True)],
)
def test_attention_matches_the_definition(
    dtype: torch.dtype, window: int | None, soft_cap: float | None, has_sinks: bool, backend_class: type[Backend]
) -> None:
    torch.manual_seed(0)
    length = CHUNK + 50
    shape = AttentionShape(
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        scale=0.2,
        windows=(window, window),
        soft_cap=soft_cap,
        sinks=(torch.randn(6) * 3,) * 2 if has_sinks else (),
    )
    if backend_class is FusedAttention and not fused.supports(shape, dtype, torch.device("cpu")):
        return  # without a soft cap, this depends on the CPU and on the number of threads
    assert backend_class is TorchAttention or soft_cap is None
    q, k, v = (torch.randn(length, number, 32).to(dtype) for number in (6, 2, 2))
    pool = torch.zeros(kv_pool_shape(shape, num_pages=64, page_size=16), dtype=dtype)
    result = run_attention(backend_class(shape, pool), (q, k, v), [(0, length)], list(range(40)))
    keys, values = (part.double().repeat_interleave(3, dim=1).transpose(0, 1) for part in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * 0.2
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distances = torch.arange(length).unsqueeze(1) - torch.arange(length)
    hidden = (distances < 0) | (distances >= (window or length))
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if has_sinks:
        total += shape.sinks[0].double().exp().view(-1, 1, 1)
    expected = (weights / total @ values).transpose(0, 1).reshape(length, -1)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [3, 24, 512, 1024])
def test_torch_attention_accepts_any_page_size(page_size: int) -> None:
    torch.manual_seed(0)
    shape = AttentionShape(num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, scale=1.0)
    tokens = tuple(torch.randn(70, num_heads, 8) for num_heads in (2, 1, 1))
    expected, actual = (
        run_attention(
            TorchAttention(shape, torch.zeros(kv_pool_shape(shape, num_pages=100 // size + 2, page_size=size))),
            tokens, [(0, 70)], list(range(-(-70 // size))),
        )
        for size in (16, page_size)
    )  # fmt: skip
    assert torch.equal(actual, expected)


def test_fused_attention_is_refused_if_rows_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, scale=1.0)
    monkeypatch.setattr(_cpu_kernels, "find_limits", lambda *_, **__: None)
    assert not fused.supports(shape, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="not batch-invariant for head size 8"):
        FusedAttention(shape, torch.zeros(kv_pool_shape(shape, num_pages=2, page_size=16)))


def test_kernel_with_another_summation_order_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor, scale: float, **_: bool
    ) -> _cpu_kernels.ChunkResult:
        """Attend to one position after the other, but in two halves if there are about 256 positions."""
        scores = (q.float().unsqueeze(3) * k.float().unsqueeze(2)).sum(-1) * scale + mask
        terms = torch.exp(scores.clamp(max=9.0)).unsqueeze(-1) * v.float().unsqueeze(2)
        halves = terms.chunk(2, dim=3) if 192 < k.shape[2] < 384 else (terms,)
        outputs = torch.stack([half.cumsum(3)[..., -1, :] for half in halves]).sum(0)
        return outputs.to(q.dtype), outputs[..., 0]

    monkeypatch.setattr(_cpu_kernels, "MANY_ROWS", 40)
    monkeypatch.setattr(_cpu_kernels, "TRIED_OFFSETS", (0, 5))
    monkeypatch.setattr(_cpu_kernels, "TRIED_TIMES", (1, 2))
    assert _cpu_kernels._matches(attend, 4, 192, head_size=8, dtype=torch.bfloat16)
    assert not _cpu_kernels._matches(attend, 4, 256, head_size=8, dtype=torch.bfloat16)


@pytest.mark.parametrize("is_full_block", [False, True])
def test_attention_by_products_matches_the_fused_kernel(is_full_block: bool) -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 3, 8, 16), *torch.randn(2, 2, 3, 256, 16)
    hidden = torch.where(torch.rand(1 if is_full_block else 2, 1, 4, 256) < 0.3, _cpu_kernels.MASKED, 0.0)
    by_products = _cpu_kernels.attend_by_products(
        queries, keys, values, mask=hidden, scale=0.3, is_full_block=is_full_block
    )
    expected = _cpu_kernels.attend(queries, keys, values, mask=hidden.repeat(1, 1, 2, 1), scale=0.3)
    torch.testing.assert_close(by_products, expected)


def test_fused_kernel_is_used_if_products_of_two_libraries_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    if _cpu_kernels.find_limits(32, torch.float32, torch.get_num_threads()) is None:
        pytest.skip("no kernel is batch-invariant on this CPU")
    monkeypatch.setattr(_cpu_kernels, "PIECE", 50)
    limits = _cpu_kernels.find_limits.__wrapped__(32, torch.float32, 1)
    assert limits is not None
    assert limits.attend is _cpu_kernels.attend


def random_model(dtype: torch.dtype, head_size: int) -> models.Model:
    """Return an untied Qwen3 with all parts, such as head norms and biases."""
    config = Qwen3Config(
        vocab_size=300, hidden_size=72, intermediate_size=200, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=head_size, attention_bias=True,
    )  # fmt: skip
    return filled(models.build(config.to_dict(), options(dtype, max_positions=800)))


def filled(model: models.Model) -> models.Model:
    """Return the model with random weights."""
    generator = torch.Generator().manual_seed(0)
    for target in model.weights().values():
        target.tensor.copy_(torch.randn(target.shape, generator=generator) * 0.2)
    model.finish_loading()
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_have_same_bits_in_any_batch_and_chunks(dtype: torch.dtype) -> None:
    model = random_model(dtype, 24)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 300, (length,), generator=generator).tolist() for length in (330, 40, 1, 270, 17)]
    alone = [Stepper(model).run(prompt, [len(prompt)]) for prompt in prompts]
    assert torch.equal(Stepper(model, page_size=8).run(prompts[3], [100, 1, 160]), alone[3])
    together = Stepper(model)
    requests = [Request(prompt) for prompt in prompts]
    counts = itertools.cycle((1, 64, 7, 1, 130, 2))
    while waiting := [request for request in requests if request.num_computed < len(request.token_ids)]:
        together.step(
            [(request, min(next(counts), len(request.token_ids) - request.num_computed)) for request in waiting]
        )
    for request, expected in zip(requests, alone, strict=True):
        assert torch.equal(torch.stack(request.logits), expected)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((model_type, torch.float32) for model_type in ONE_OF_EACH),
        *((model_type, torch.bfloat16) for model_type in ("cohere2", "gemma3_text", "gpt2", "olmo2", "phi")),
    ],
)
def test_all_families_give_same_bits_in_any_batch(model_type: str, dtype: torch.dtype) -> None:
    model = filled(models.build(config_of(ONE_OF_EACH[model_type]).to_dict(), options(dtype, max_positions=64)))
    prompts = [torch.randint(0, model.vocab_size, (length,)).tolist() for length in (50, 1, 33)]
    alone = [Stepper(model).run(prompt, [len(prompt)]) for prompt in prompts]
    assert torch.equal(Stepper(model, page_size=4).run(prompts[0], [20, 1, 27]), alone[0])
    together, requests = Stepper(model), [Request(prompt) for prompt in prompts]
    together.step([(requests[0], 17), (requests[1], 1)])
    together.step([(requests[0], 32), (requests[2], 30)])
    together.step([(requests[0], 1), (requests[2], 3)])
    for request, expected in zip(requests, alone, strict=True):
        assert torch.equal(torch.stack(request.logits), expected)
    rows = [(0, 40), (0, 7)]
    inputs = make_inputs(model, rows, torch.randint(0, model.vocab_size, (47,)))
    together.attention.prepare(make_batch(rows, [list(range(20)), list(range(20, 30))], 16))
    whole = model.forward(replace(inputs, outputs=None), together.attention)
    assert inputs.outputs is not None
    assert torch.equal(model.forward(inputs, together.attention), whole[inputs.outputs])


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_of_output_tokens_match(dtype: torch.dtype) -> None:
    model = random_model(dtype, 24)
    stepper = Stepper(model)
    rows = [(0, 40), (0, 7), (0, 1)]
    inputs = make_inputs(model, rows)
    stepper.attention.prepare(make_batch(rows, [[1, 2, 3], [4], [5]], 16))
    whole = model.forward(replace(inputs, outputs=None), stepper.attention)
    assert inputs.outputs is not None
    assert inputs.outputs.tolist() == [39, 46, 47]
    assert torch.equal(model.forward(inputs, stepper.attention), whole[inputs.outputs])


def test_prefix_of_another_request_gives_same_bits() -> None:
    model = random_model(torch.bfloat16, 16)
    token_ids = torch.randint(0, 300, (100,)).tolist()
    expected = Stepper(model).run(token_ids, [100])
    stepper = Stepper(model, page_size=16)
    first = Request([*token_ids[:64], 5, 6, 7])
    stepper.step([(first, 50)])
    stepper.step([(first, 17)])
    second = Request(token_ids, pages=first.pages[:4], num_computed=64)
    stepper.step([(second, 30)])
    stepper.step([(second, 6)])
    assert torch.equal(torch.stack(second.logits), expected[64:])


def test_tied_head_gives_same_bits_in_any_batch() -> None:
    config = Qwen2Config(
        vocab_size=515, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = models.build(config.to_dict(), options())
    for target in model.weights().values():
        target.tensor.copy_(torch.randn(target.shape) * 0.2)
    model.finish_loading()
    hidden = torch.randn(20, 64)
    logits = model.compute_logits(hidden)
    for row in range(20):
        assert torch.equal(model.compute_logits(hidden[row : row + 1])[0], logits[row])
