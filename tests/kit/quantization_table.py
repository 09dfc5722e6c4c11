"""The table of quantized formats in the guide.

python -m tests.kit.quantization_table  # writes the table into the page
"""

from __future__ import annotations

import re

from aioengine.model_files import quantized_formats
from tests.kit.source import ROOT

PAGE = ROOT / "examples" / "guides" / "quantization.md"
HEAD = "| format | numbers | GPU | CPU |\n|---|---|---|---|\n"


def updated(page: str) -> str:
    """Return the page with the table of the code."""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in quantized_formats.table())
    return re.sub(re.escape(HEAD) + r"(?:\|.*\n)*", lambda _: HEAD + rows, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
