"""One progress bar. A file of its own, because tqdm is slow to import and most engines never draw one."""

from __future__ import annotations

import sys

if "ipywidgets" in sys.modules:  # a notebook that can show more than text
    from tqdm.auto import tqdm
else:
    from tqdm import tqdm

_BYTES = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}B/{total_fmt}B [{elapsed}<{remaining}, {rate_fmt}]"


class Bar(tqdm):  # type: ignore[misc]  # it has no types
    """A bar without the thread that tqdm keeps for bars that nobody moves."""

    monitor_interval = 0


def make_bar(label: str, total: int, unit: str) -> Bar:
    """A bar on stderr. Bytes are shown in MB and MB/s; without a unit there is only the label."""
    bar_format = {"B": _BYTES, "": "{desc}"}.get(unit)
    is_bytes = unit == "B"
    return Bar(
        desc=label, total=total, unit=unit, unit_scale=is_bytes, bar_format=bar_format, file=sys.stderr, leave=False
    )
