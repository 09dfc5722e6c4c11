"""Loading weights from files to a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from aioengine.layers.layer import Slice, Target
from aioengine.model_files.checkpoint import read_headers
from aioengine.runner import weight_reading
from tests.kit.gguf_files import stored, write_gguf


@pytest.mark.parametrize("alone_bytes", [0, 1 << 30])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_every_piece_is_copied_to_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, alone_bytes: int
) -> None:
    monkeypatch.setattr(weight_reading, "SMALL_BYTES", alone_bytes)
    monkeypatch.setattr(weight_reading, "PIECE_BYTES", 1 << 12)
    given = {f"{number}": torch.randn(200 + number, 64).to(stored) for number in range(20)} | {
        "vector": torch.randn(5000).to(stored),
        "part": torch.randn(40, 64).to(stored),
        "columns": torch.randn(100, 48).to(stored),
    }
    save_file(given, tmp_path / "model.safetensors")
    fused = torch.zeros(100, 96, dtype=torch.bfloat16, device="cuda")
    targets = {name: Target(torch.zeros(tensor.shape, device="cuda").bfloat16()) for name, tensor in given.items()}
    targets["part"] = Target(
        torch.zeros(40, 16, device="cuda").bfloat16(), Slice(dim=1, ranges=((4, 12), (20, 28)), total=64)
    )
    targets["columns"] = Target(fused[:, 48:])
    seen: list[int] = []
    weight_reading.read_all(read_headers(tmp_path, ""), targets, lambda done, total: seen.append(done))
    for name, target in targets.items():
        assert torch.equal(target.tensor.cpu(), given[name][target.index].bfloat16()), name
    assert not fused[:, :48].any()
    assert seen == sorted(seen)
    assert seen[-1] == sum(given[name][target.index].nbytes for name, target in targets.items())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_blocks_of_gguf_files_have_the_numbers_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(weight_reading, "PIECE_ELEMENTS", 5000)
    block, values = stored(torch.randn(300, 512), kind)
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 4}
    path = write_gguf(tmp_path / "m.gguf", metadata, {"t.weight": block, "blk.0.attn_q.weight": block})
    targets = {
        "t.weight": Target(torch.zeros(300, 512, device="cuda").bfloat16()),
        "model.layers.0.self_attn.q_proj.weight": Target(torch.zeros(300, 512, device="cuda")),
    }
    entries = [replace(entry, num_heads=entry.num_heads and 150) for entry in read_headers(path, "")]
    weight_reading.read_all(entries, targets, lambda done, total: None)
    plain, turned = (target.tensor.cpu() for target in targets.values())
    assert torch.equal(plain, values.bfloat16())
    assert torch.equal(turned, values.view(150, 1, 2, 512).transpose(1, 2).reshape(300, 512))


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    given = {f"{number}": torch.randn(64, 64).bfloat16() for number in range(4)}
    given["2"][5, 7] = torch.inf
    save_file(given, tmp_path / "model.safetensors")
    targets = {name: Target(torch.zeros(64, 64, device="cuda").bfloat16()) for name in given}
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 2 has numbers that are not finite in bfloat16"):
        weight_reading.read_all(read_headers(tmp_path, ""), targets, lambda done, total: None)
