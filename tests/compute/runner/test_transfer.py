"""Copies to the device: several arrays at once. The device is simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aioengine.runner.transfer import PinnedUpload, upload_together

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


class CountedUpload(PinnedUpload):
    def __init__(self) -> None:
        self.num_copies = 0

    def __call__(self, column: npt.NDArray[Any]) -> Tensor:
        self.num_copies += 1
        return torch.from_numpy(column.copy())


def test_arrays_of_any_shape_are_uploaded_in_one_copy_and_aligned() -> None:
    upload = CountedUpload()
    columns = {
        "odd": np.arange(7),
        "even": np.arange(8),
        "axes": np.arange(15).reshape(3, 5),
        "pages": np.arange(6, dtype=np.int32).reshape(2, 3),
        "one": np.arange(1),
    }
    tensors = upload_together(upload, columns)
    assert upload.num_copies == 1
    for name, column in columns.items():
        assert np.array_equal(tensors[name].numpy(), column)
        assert tensors[name].numpy().dtype == column.dtype
        assert tensors[name].data_ptr() % 16 == 0
