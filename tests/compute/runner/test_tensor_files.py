"""Read tensors of small files: all dtypes, and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aioengine.model_files.checkpoint import entries_of_file
from aioengine.runner.weight_reading import read_arrays, read_tensor

ARRAYS = {
    "pixel_values": torch.randn(3, 5, 7),
    "half": torch.randn(4).bfloat16(),
    "image_grid_thw": torch.tensor([[1, 4, 6]]),
    "mask": torch.tensor([True, False, True]),
    "eighth": torch.randn(3).to(torch.float8_e4m3fn),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "none": torch.empty(0, 3),
}


def test_read_arrays_equal_the_saved_arrays(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "image", metadata={"made": "by a test"})
    result = read_arrays(str(tmp_path / "image"), is_pinned=False)
    assert result.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert result[name].dtype == array.dtype
        assert torch.equal(result[name], array)


@pytest.mark.parametrize("kept", [10, 1 << 20, (5 << 20) - 1])
def test_file_that_was_truncated_after_its_header_was_read_is_refused(tmp_path: Path, kept: int) -> None:
    save_file({"picture": torch.zeros(5 << 20, dtype=torch.uint8)}, tmp_path / "image")
    [entry] = entries_of_file(tmp_path / "image")
    with (tmp_path / "image").open("rb+") as file:
        file.truncate(entry.begin + kept)
        with pytest.raises(ValueError, match="was changed while it was read"):
            read_tensor(file, entry)


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_truncated_files_are_refused(tmp_path: Path, kept: int) -> None:
    save_file(ARRAYS, tmp_path / "image")
    (tmp_path / "image").write_bytes((tmp_path / "image").read_bytes()[:kept])
    with pytest.raises(ValueError, match="cannot read .*image"):
        read_arrays(str(tmp_path / "image"), is_pinned=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 100, "a header of"),
        (b"{}", "cannot read"),
        ((50).to_bytes(8, "little") + b'{"a":{"dtype":"F8","shape":[1],"data_offsets":[0,1]}}'[:50], "cannot read"),
        ((53).to_bytes(8, "little") + b'{"a":{"dtype":"XX","shape":[1],"data_offsets":[0,1]}}\0', "of type XX"),
        ((53).to_bytes(8, "little") + b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,1]}}', "shape"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "image").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_arrays(str(tmp_path / "image"), is_pinned=False)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read .*gone: there is no such file"):
        read_arrays(str(tmp_path / "gone"), is_pinned=False)
