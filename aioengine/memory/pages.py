"""PageAllocator: which pages of the KV pool are free. It knows page ids and nothing else."""

from __future__ import annotations


class PageAllocator:
    """Hands out page ids 0 ... num_pages - 1; a page given back last is handed out first."""

    __slots__ = ("_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages. Raises ValueError, and takes none, where fewer are free: ask ``num_free`` first."""
        if count > len(self._free):
            raise ValueError(f"{count} pages were asked for and {len(self._free)} are free")
        if count <= 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def free(self, pages: list[int]) -> None:
        """Give pages back, each exactly once (an overflow is noticed, a page given twice only by the owner's count)."""
        self._free.extend(pages)
        if len(self._free) > self.num_pages:
            raise ValueError(f"{len(self._free)} pages are free of {self.num_pages}: some were given back twice")
