"""One progress bar. A file of its own, because tqdm is slow to import and most engines never draw one."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[misc]  # it has no types
    """A bar without the thread that tqdm keeps for bars that nobody moves."""

    monitor_interval = 0
