"""The errors for formats that do not work on a device."""

from __future__ import annotations

import pytest

from aioengine.model_files.quantized_formats import FORMATS, check


def test_format_is_refused_on_a_device_with_the_names_that_work_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "quantization", {"a8": ("cuda",), "a4": ("cpu", "cuda"), "a2": ("cpu",)})
    check("quantization", "a8", "cuda")
    check("quantization", "a4", "cpu")
    with pytest.raises(ValueError, match="quantization='a8' does not work on a CPU; allowed there: a4, a2"):
        check("quantization", "a8", "cpu")
