"""The table of quantized formats, and the errors that follow it."""

from __future__ import annotations

import pytest

from aioengine.model_files import quantized_formats
from aioengine.model_files.quantized_formats import FORMATS, STORED, Format, check


def test_format_is_refused_on_a_device_with_the_names_that_work_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Format("a8", "", STORED, ""), Format("a4", "", STORED, STORED), Format("a2", "", STORED, STORED))
    monkeypatch.setitem(FORMATS, "quantization", rows)
    check("quantization", "a8", "cuda")
    check("quantization", "a4", "cpu")
    with pytest.raises(ValueError, match="quantization='a8' does not work on a CPU; what works there: a4, a2"):
        check("quantization", "a8", "cpu")
    assert ('`quantization="a8"`', "", STORED, "refused") in quantized_formats.table()
