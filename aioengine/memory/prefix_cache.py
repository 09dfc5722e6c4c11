"""PrefixCache: the radix tree and the pages. It finds the computed prefix of a request, and owns every page.

A page is free, cached (in the tree), or owned by one request. The page table of a request in an ``Allocation``:

    | shared with others | computed here, in the tree | being computed, pending in the tree | the partly filled rest |
      0 ... path                              num_ready                             len(path)               len(pages)

Two requests may have computed the same page (two greedy answers to one prompt): the second keeps its own page until
it ends and locks the node of the first, so that its further pages find their place in the tree.

A session pins pages that its requests computed. A pinned page that no request uses is kept while any other page can be
evicted; then the session idle for longest loses its pins. So pins keep no request waiting, and such a page counts as
allocatable.

Where layers have states, a prefix is reused up to a snapshot of them (``memory.snapshots``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from aioengine.memory.radix import Node, RadixTree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.memory.radix import Key, Salt
    from aioengine.memory.snapshots import Boundary, RequestSnapshots, Snapshots


class PageAllocator:
    """Allocates page ids 0 ... num_pages - 1, the last freed page first."""

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
        """Take ``count`` pages.

        Raises:
            ValueError: fewer are free, and none was taken; check ``num_free`` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages are needed and {len(self._free)} are free")
        if count <= 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def free(self, pages: list[int]) -> None:
        """Free pages, each exactly once.

        Raises:
            ValueError: more pages are free than there are. A page that was freed twice before that is not noticed here.
        """
        self._free.extend(pages)
        if len(self._free) > self.num_pages:
            raise ValueError(f"{len(self._free)} pages are free of {self.num_pages}: some were given back twice")


NEVER = 1 << 62  # a position that no request reaches


class Match(NamedTuple):
    """The computed prefix of a request. Valid until anything else is done with the cache.

    path: one node for each page.
    pending: where another request is computing further pages of this one just now, the node of the last of them.
    salt: requests with another one share nothing with it.
    missing: where a snapshot would make more of it reusable; with ``pending``, its node.
    """

    path: list[Node]
    pending: Node | None
    salt: Salt = ""
    missing: Boundary | None = None


class Allocation:
    """The pages of one request.

    pages: the page table. path: the nodes locked, one for each of the first pages. num_matched: how many of them were
    there when it began. num_ready: how many of them are computed. room: positions that the pages have place for.
    border: the position at which the next page is complete and ``insert`` has something to do. salt: as in ``Match``.
    unsent: pages that no row of a plan has named yet. snapshots: of the request; None for a model without states.
    """

    __slots__ = (
        "capacity",
        "next_insert_at",
        "num_matched",
        "num_ready",
        "pages",
        "path",
        "salt",
        "snapshots",
        "unsent",
    )

    def __init__(self, salt: Salt = "") -> None:
        self.pages: list[int] = []
        self.path: list[Node] = []
        self.num_matched = 0
        self.num_ready = 0
        self.capacity = 0
        self.next_insert_at = NEVER
        self.salt = salt
        self.unsent: list[int] = []
        self.snapshots: RequestSnapshots | None = None

    @property
    def num_owned(self) -> int:
        """Pages that stand in no node of the tree: of this request alone."""
        cached = sum(node.page == page for node, page in zip(self.path, self.pages, strict=False))
        return len(self.pages) - cached


class PrefixCache:
    """Match, lock, insert, unlock: the life of a request's pages. ``enabled`` False: pages without sharing.

    Attributes:
        snapshots: of states; None for a model without.
    """

    __slots__ = ("_allocator", "_pins", "_tree", "enabled", "num_pages", "page_size", "snapshots")

    def __init__(
        self, *, num_pages: int, page_size: int, enabled: bool = True, snapshots: Snapshots | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enabled
        self.snapshots = snapshots
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixTree(page_size)
        self._pins: OrderedDict[int, dict[Node, None]] = OrderedDict()
        """By session, the one idle for longest first: its pinned nodes, parents first."""

    @property
    def num_free(self) -> int:
        """Allocatable pages: free, or cached and unlocked, pinned or not."""
        return self._allocator.num_free + self._tree.num_unlocked

    @property
    def num_cached(self) -> int:
        """Pages in the tree, used by a request or not."""
        return self._tree.num_nodes

    @property
    def num_pinned(self) -> int:
        """Pages that are kept for sessions, and that no request uses."""
        return self._tree.num_pinned

    def pages_for(self, num_tokens: int) -> int:
        """The most pages that a request of ``num_tokens`` tokens has at a time."""
        return -(-num_tokens // self.page_size)

    # ------------------------------------------------------------ ask

    def match(self, token_ids: list[int], salt: Salt = "", *, known: Node | None = None) -> Match:
        """The computed prefix of ``token_ids``, in whole pages, without the last token.

        known: ``pending`` of an earlier match, of these ids or fewer of them.
        """
        if not self.enabled:
            return Match([], None)
        path = self._tree.walk(token_ids, (len(token_ids) - 1) // self.page_size, salt, known=known)
        if (snapshots := self.snapshots) is not None:
            num_usable = snapshots.num_usable(path)
            missing = snapshots.missing(path, num_usable)
            is_coming = missing is not None and snapshots.has_producer(missing.node)
            return Match(path[:num_usable], missing.node if missing and is_coming else None, salt, missing)
        if path and path[-1].is_pending:
            return Match([node for node in path if not node.is_pending], path[-1], salt)
        return Match(path, None, salt)

    def num_available(self, match: Match) -> int:
        """Allocatable pages besides those of ``match`` once these are locked."""
        num_unlocked = 0
        for node in reversed(match.path):
            if node.num_locks:
                break  # and so are all nodes before it
            num_unlocked += 1
        return self.num_free - num_unlocked

    def num_left(self, match: Match, num_tokens: int, promised: int) -> int:
        """Allocatable pages once a request with this prefix has those for its ``num_tokens`` tokens, and the running
        ones have the ``promised`` pages. Negative: the number that is missing.
        """
        return self.num_available(match) - self.pages_for(num_tokens) + len(match.path) - promised

    def num_promised(self, running: Iterable[tuple[Allocation, int]]) -> int:
        """Pages that running requests, each with its known tokens, have still to take for these: they have them all."""
        return 0

    # ------------------------------------------------------------ do

    def lock(self, token_ids: list[int], match: Match) -> Allocation:
        """Lock the matched pages and take pages for all of ``token_ids``, announcing the full ones as pending.

        Raises:
            ValueError: there are too few; check ``num_available`` first.
        """
        missing = self.pages_for(len(token_ids)) - len(match.path)
        if missing > self.num_available(match):
            raise ValueError(f"{missing} pages are needed and {self.num_available(match)} are available")
        allocation = Allocation(match.salt)
        self._tree.lock(match.path)
        allocation.path = list(match.path)
        allocation.pages = [node.page for node in match.path] + self._allocate(missing)
        allocation.num_matched = allocation.num_ready = len(match.path)
        allocation.capacity = len(allocation.pages) * self.page_size
        if self.enabled:
            first, parent = allocation.num_ready, allocation.path[-1] if allocation.path else self._tree.root
            allocation.next_insert_at = (first + 1) * self.page_size
            allocation.path += self._tree.announce(
                parent, self._tree.keys(token_ids, first, allocation.salt), allocation.pages[first:]
            )
        if self.snapshots is not None:
            allocation.snapshots = self.snapshots.begin(allocation.path, allocation.num_matched, match.missing)
        return allocation

    def grow(self, allocation: Allocation) -> list[int] | None:
        """Add one page to a request and return it; None, and nothing changed, where there is none."""
        if self.num_free == 0:
            return None
        page = self._allocate(1)
        allocation.pages += page
        allocation.capacity += self.page_size
        return page

    def insert(self, allocation: Allocation, token_ids: list[int], num_computed: int) -> None:
        """Record that positions before ``num_computed`` have KV: other requests now match the full pages among them."""
        size = self.page_size
        index = allocation.num_ready
        num_full = num_computed // size
        while index < num_full:
            if index < len(allocation.path):
                allocation.path[index].is_pending = False
            elif not self._attach(allocation, tuple(token_ids[index * size : (index + 1) * size])):
                break
            index += 1
        allocation.num_ready = index
        allocation.next_insert_at = (index + 1) * size
        if self.snapshots is not None and allocation.snapshots is not None:
            self.snapshots.passed(allocation.snapshots, allocation.path, num_computed)

    def unlock(self, allocation: Allocation, *, is_invalid: bool = False) -> None:
        """Release the pages: computed ones stay cached, all others are free. A second call changes nothing.

        is_invalid: computed pages are wrong, and are freed too unless another request uses them.
        """
        if self.snapshots is not None and allocation.snapshots is not None:
            self.snapshots.end(allocation.snapshots, is_invalid=is_invalid)
            allocation.snapshots = None
        if is_invalid:
            while allocation.num_ready > allocation.num_matched and _is_used_by_none_but(
                allocation, allocation.num_ready - 1
            ):
                allocation.num_ready -= 1
        unfinished = allocation.path[allocation.num_ready :]
        for node in reversed(unfinished):
            self._tree.remove(node)
            if self.snapshots is not None:
                self.snapshots.drop(node)
        ready = allocation.path[: allocation.num_ready]
        owned = [page for node, page in zip(ready, allocation.pages, strict=False) if node.page != page]
        owned += allocation.pages[allocation.num_ready :]
        self._tree.unlock(ready)
        self._allocator.free(owned)
        allocation.pages, allocation.path = [], []
        allocation.num_matched = allocation.num_ready = allocation.capacity = 0
        allocation.next_insert_at = NEVER

    def pin(self, session: int, allocation: Allocation) -> None:
        """Keep the computed pages of a request for a session too, which counts as used just now."""
        pinned = self._pins.setdefault(session, {})
        self._pins.move_to_end(session)
        new = [node for node in allocation.path[: allocation.num_ready] if node not in pinned]
        self._tree.pin(new)
        pinned.update(dict.fromkeys(new))

    def touch(self, session: int) -> None:
        """The session is used just now."""
        if session in self._pins:
            self._pins.move_to_end(session)

    def unpin(self, session: int) -> None:
        """Keep nothing more for a session. Its pages stay cached, as most recently used; an unknown one is ignored."""
        self._tree.unpin(reversed(self._pins.pop(session, {})))

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` cached, unlocked pages, least recently used first; returns how many.

        Pinned ones come last, those of the session idle for longest first.
        """
        evicted: list[int] = []
        while len(evicted) < num_pages:
            if (node := self._tree.evict()) is not None:
                evicted.append(node.page)
                if self.snapshots is not None:
                    self.snapshots.drop(node)
            elif self._pins:
                self.unpin(next(iter(self._pins)))
            else:
                break
        self._allocator.free(evicted)
        return len(evicted)

    def clear(self) -> bool:
        """Free all cached pages that no request uses; returns whether none is left."""
        self.evict(self.num_pages)
        return self.num_cached == 0

    def check_integrity(self, allocations: Iterable[Allocation]) -> None:
        """Raises RuntimeError unless free, cached and owned pages add up, ``allocations`` being all there are; and ids
        of snapshots.
        """
        allocations = list(allocations)
        num_owned = sum(allocation.num_owned for allocation in allocations)
        found = self._allocator.num_free + self.num_cached + num_owned
        if found != self.num_pages:
            raise RuntimeError(
                f"{self._allocator.num_free} free, {self.num_cached} cached and {num_owned} owned pages "
                f"are {found}, not {self.num_pages}"
            )
        if self.snapshots is not None:
            self.snapshots.check_integrity(
                allocation.snapshots for allocation in allocations if allocation.snapshots is not None
            )

    # ------------------------------------------------------------ inside

    def _allocate(self, count: int) -> list[int]:
        self.evict(count - self._allocator.num_free)
        return self._allocator.allocate(count)

    def _attach(self, allocation: Allocation, key: Key) -> bool:
        """Continue the path by a computed page; False while another request is computing the same."""
        parent = allocation.path[-1] if allocation.path else self._tree.root
        if allocation.salt and not allocation.path:
            key = (*key, allocation.salt)
        node = parent.children.get(key)
        if node is None:
            node = self._tree.add(parent, key, allocation.pages[len(allocation.path)])
        elif node.is_pending:
            return False
        else:
            self._tree.lock([node])
        allocation.path.append(node)
        return True


def _is_used_by_none_but(allocation: Allocation, index: int) -> bool:
    """Whether a node of the path has the request's own page, which nothing else keeps and no page continues."""
    node = allocation.path[index]
    is_own = node.page == allocation.pages[index] and node.num_locks == 1 and not node.num_pins
    return is_own and all(child in allocation.path[index + 1 : index + 2] for child in node.children.values())
