"""Files of arrays that the media process writes and the runner reads; their memory may be found before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from aioengine.media.service.array_files import reserve, write_arrays
from aioengine.runner.tensor_files import read_arrays

ARRAYS = {
    "picture": np.arange(7 * 9 * 4, dtype=np.uint8).reshape(7, 9, 4),
    "table": np.linspace(-2.0, 2.0, 30, dtype=np.float32).reshape(3, 10),
    "image_grid_thw": np.array([[1, 4, 6]]),
    "rows_first": np.array([True]),
    "row_starts": np.arange(5, dtype=np.int32),
    "exact": np.array([0.1, 0.2]),
    "half": np.ones((2, 1), np.float16),
    "none": np.empty((0, 3), np.float32),
    "one": np.ones((), np.int8),
}


@pytest.mark.parametrize("reserved", [0, 10, 100_000])
def test_arrays_are_those_that_were_written(reserved: int, tmp_path: Path) -> None:
    path = str(tmp_path / "image")
    if reserved:
        reserve(path, reserved)
    assert write_arrays(path, ARRAYS) == sum(array.nbytes for array in ARRAYS.values())
    found = read_arrays(path, is_pinned=False)
    for each in (load_file(path), {name: tensor.numpy() for name, tensor in found.items()}):
        assert each.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert each[name].dtype == array.dtype
            assert np.array_equal(each[name], array)


def test_a_file_that_was_reserved_has_the_length_of_what_is_written(tmp_path: Path) -> None:
    lengths: list[int] = []
    for name, reserved in (("plain", 0), ("reserved", 50_000)):
        if reserved:
            reserve(str(tmp_path / name), reserved)
        write_arrays(str(tmp_path / name), ARRAYS)
        lengths.append((tmp_path / name).stat().st_size)
    assert lengths[0] == lengths[1]


def test_a_file_that_cannot_be_reserved_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr("os.posix_fallocate", refuse, raising=False)
    path = str(tmp_path / "image")
    reserve(path, 1000)
    write_arrays(path, ARRAYS)
    assert load_file(path).keys() == ARRAYS.keys()


def test_arrays_with_gaps_are_not_written(tmp_path: Path) -> None:
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        write_arrays(str(tmp_path / "image"), {"gaps": np.zeros((4, 4), np.uint8)[:, ::2]})
