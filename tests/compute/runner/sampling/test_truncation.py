"""Compare top-k, top-p and min-p with the definition, on rows for all code paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioengine.runner.rows import SAMPLING_RECORD, TOP_K_OFF
from aioengine.runner.sampling.truncation import draw, draw_truncated, kept


@pytest.fixture(autouse=True)
def one_thread(few_threads: None) -> None:
    """Use one thread. On a busy machine, two threads mostly wait for each other."""
    torch.set_num_threads(1)


WIDTHS = (128, 10_240)  # all tokens are candidates; candidates come from blocks


def truncation(num_rows: int, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    rules = np.zeros(num_rows, dtype=SAMPLING_RECORD)
    rules["top_k"], rules["top_p"], rules["min_p"] = top_k, top_p, min_p
    return rules


def naive_kept(p: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the kept set by definition: sort by probability and index, and add up."""
    order = np.argsort(-p, kind="stable")[:top_k]
    whole = p[order].sum(dtype=np.float64) if top_k < len(p) else 1.0
    keep = np.zeros(len(p), dtype=bool)
    before = 0.0
    for i in order:
        if keep.any() and ((top_p < 1.0 and before >= top_p * whole) or p[i] < min_p * float(p.max())):
            break
        keep[i] = True
        before += float(p[i])
    return keep


def rows_of_probabilities(width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(width, generator=generator)
    return {
        "peaked": torch.softmax(noise * 6, -1),
        "normal": torch.softmax(noise * 2, -1),
        "flat": torch.softmax(noise * 0.1, -1),
        "uniform": torch.softmax(noise * 0, -1),
        "ties": torch.softmax((noise * 4).round() / 2, -1),
        "coarse": torch.softmax((noise * 3).bfloat16().float(), -1),
        "one": torch.softmax(noise * 1000, -1),
    }


RULES = [
    (TOP_K_OFF, 0.9, 0.0),
    (TOP_K_OFF, 0.05, 0.0),
    (TOP_K_OFF, 0.999, 0.0),
    (TOP_K_OFF, 1.0, 0.02),
    (TOP_K_OFF, 1.0, 1.0),
    (TOP_K_OFF, 1e-9, 0.0),
    (1, 1.0, 0.0),
    (2, 0.5, 0.0),
    (50, 1.0, 0.0),
    (50, 0.8, 0.1),
    (256, 1.0, 0.0),
    (300, 0.9, 0.0),
    (5000, 0.95, 0.001),
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", rows_of_probabilities(64))
def test_kept_set_is_the_defined_one(width: int, kind: str) -> None:
    p = rows_of_probabilities(width)[kind].numpy()
    for top_k, top_p, min_p in RULES:
        expected = naive_kept(p, top_k=top_k, top_p=top_p, min_p=min_p)
        actual = kept(p, top_k=top_k, top_p=top_p, min_p=min_p)
        # the histogram adds in another order, so that sums may differ in the last bit
        assert abs(int(actual.sum()) - int(expected.sum())) <= (1 if top_p < 1.0 else 0), (top_k, top_p, min_p)
        assert (actual <= expected).all() or (expected <= actual).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", rows_of_probabilities(64))
def test_draw_is_the_inverse_of_the_cumulated_mass_of_the_kept_set(width: int, kind: str) -> None:
    p = rows_of_probabilities(width)[kind]
    uniform = np.array([0.0, 0.1, 0.5, 0.77, 1 - 2**-53])
    for top_k, top_p, min_p in RULES:
        num_rows = len(uniform)
        rules = truncation(num_rows, top_k, top_p, min_p)
        tokens = draw_truncated(p.repeat(num_rows, 1), uniform, rules).tolist()
        keep = kept(p.numpy(), top_k=top_k, top_p=top_p, min_p=min_p)
        mass = np.where(keep, p.numpy(), 0).cumsum(dtype=np.float64)
        for u, token in zip(uniform.tolist(), tokens, strict=True):
            assert keep[token]
            assert p[token] > 0
            before = mass[token] - float(p[token])
            assert before - 1e-12 <= u * mass[-1] <= mass[token] + 1e-12, (top_k, top_p, min_p, u)


@pytest.mark.parametrize("width", WIDTHS)
def test_plain_draw_inverts_the_cumulated_probabilities(width: int) -> None:
    p = torch.stack(list(rows_of_probabilities(width).values()))
    for u in (0.0, 0.3, 0.999, 1 - 2**-53):
        tokens = torch.from_numpy(draw(p, np.full(len(p), u)))
        mass = p.double().cumsum(-1)
        after = mass.gather(-1, tokens[:, None])[:, 0]
        here = p.gather(-1, tokens[:, None])[:, 0].double()
        target = u * mass[:, -1]
        assert (here > 0).all()
        assert (after >= target - 1e-6).all()
        assert (after - here <= target + 1e-6).all()


def test_fast_path_is_taken_for_ordinary_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("the exact path was taken")

    monkeypatch.setattr("aioengine.runner.sampling.truncation.kept", fail)
    p = rows_of_probabilities(10_240)["peaked"][None]
    draw_truncated(p, np.array([0.5]), truncation(1, 40, 0.9, 0.0))
