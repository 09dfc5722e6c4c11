"""PrefixCache owns every page and finds the computed prefix of a request in a radix tree.

A page is free, cached (in the tree), or owned by one request. The page table of a request (``Allocation.pages``):

    | matched: prefix hit | computed by this request | pending: being computed | last pages, not in the tree |
      0 ...     num_matched                  num_ready                 len(path)                    len(pages)

Two requests may compute the same page (for example two greedy answers to one prompt). The second request keeps its own
page until it ends, and locks the node of the first, so that its later pages can be added below that node.

A session pins the pages that its requests computed. A pinned page without a running request is evicted last: when no
other page is left, the least recently used session loses its pins. So pins never block a request, and pinned pages
count as allocatable.

If layers have recurrent states, a prefix can be reused only up to a snapshot of the state (``memory.snapshots``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from msgspec import Struct

from aioengine.memory.radix import Key, Node, RadixTree, Salt
from aioengine.memory.snapshots import Boundary, RequestSnapshots, Snapshots

NEVER = 1 << 62  # a position that no request reaches
MAX_KEPT_FREE = 512  # pages that are evicted before a prompt needs them


class Match(NamedTuple):
    """The computed prefix of a request. Valid until the next change of the cache.

    path: one node for each page.
    pending: the last of the next pages that another request is computing now; None: there are none.
    salt: the cache namespace.
    missing_snapshot: the page boundary at which a snapshot would make more pages reusable.
    """

    path: list[Node]
    pending: Node | None
    salt: Salt = ""
    missing_snapshot: Boundary | None = None


class Allocation(Struct, eq=False):
    """The pages of one request, see the drawing at the top of this file.

    Attributes:
        salt: the cache namespace.
        pages: the page table.
        path: the locked nodes of the tree, one for each of the first pages.
        num_matched: pages of the prefix hit.
        num_ready: computed pages, including matched ones.
        capacity: positions that fit into ``pages``.
        next_insert_at: number of computed positions at which the next page is full, so that ``insert`` must be called.
        unsent: pages that no row of a plan has named yet.
        snapshots: of the states of this request; None for a model without states.
    """

    salt: Salt = ""
    pages: list[int] = []
    path: list[Node] = []
    num_matched: int = 0
    num_ready: int = 0
    capacity: int = 0
    next_insert_at: int = NEVER
    unsent: list[int] = []
    snapshots: RequestSnapshots | None = None


class PrefixCache:
    """The pages of a request are matched, allocated, inserted and released, in this order.

    Attributes:
        enabled: False: pages are never shared. snapshots: of recurrent states; None for a model without states.
        num_weight_changes: number of calls of ``change_weights``. It is part of the keys of the tree.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, enabled: bool = True, snapshots: Snapshots | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enabled
        self.snapshots = snapshots
        self.num_weight_changes = 0
        self._num_kept_free = min(MAX_KEPT_FREE, num_pages // 64)
        self._free = list(range(num_pages - 1, -1, -1))  # the last freed page is allocated first
        self._tree = RadixTree(page_size)
        self._unadded: list[tuple[Allocation, list[int]]] = []  # with the token ids
        self._pins: OrderedDict[int, dict[Node, None]] = OrderedDict()
        """Session -> its pinned nodes, parents first. The least recently used session comes first."""

    @property
    def num_allocatable(self) -> int:
        """Pages that can be allocated: free pages, and cached pages without a lock, even if they are pinned."""
        return len(self._free) + len(self._tree.unlocked) + self._tree.num_pinned

    @property
    def num_cached(self) -> int:
        """Pages in the tree, locked or not."""
        return self._tree.num_nodes

    @property
    def num_pinned(self) -> int:
        """Pages that are pinned by sessions and not used by a request."""
        return self._tree.num_pinned

    def pages_for(self, num_tokens: int) -> int:
        """Return the largest number of pages that a request of ``num_tokens`` tokens uses at one time."""
        return -(-num_tokens // self.page_size)

    # ------------------------------------------------------------ questions

    def match(self, token_ids: list[int], salt: Salt = "", *, known: Node | None = None) -> Match:
        """Return the computed prefix of ``token_ids`` in whole pages. It never includes the last token.

        known: ``pending`` of an earlier match with a prefix of these ids.
        """
        if not self.enabled:
            return Match([], None)
        self._add_pending()
        if self.num_weight_changes:
            salt = ("weights", self.num_weight_changes, salt)
        path = self._tree.walk(token_ids, (len(token_ids) - 1) // self.page_size, salt, known=known)
        if (snapshots := self.snapshots) is not None:
            num_usable = snapshots.num_usable(path)
            missing = snapshots.missing_snapshot(path, num_usable)
            is_coming = missing is not None and snapshots.has_producer(missing.node)
            return Match(path[:num_usable], missing.node if missing and is_coming else None, salt, missing)
        if path and path[-1].is_pending:
            return Match([node for node in path if not node.is_pending], path[-1], salt)
        return Match(path, None, salt)

    def num_left(self, match: Match, num_tokens: int, promised: int) -> int:
        """Return the allocatable pages that remain after this request has the pages for its ``num_tokens`` tokens and
        the running requests have their ``promised`` pages. A negative number is a shortage.
        """
        num_unlocked = 0
        for node in reversed(match.path):
            if node.num_locks:
                break  # all nodes before it are locked too
            num_unlocked += 1
        num_missing = self.pages_for(num_tokens) - len(match.path)
        return self.num_allocatable - num_unlocked - num_missing - promised

    # ------------------------------------------------------------ changes

    def allocate(self, token_ids: list[int], match: Match) -> Allocation:
        """Lock the matched pages, and allocate pages for the rest of ``token_ids``. Later, the full ones are added as
        pending.

        Check ``num_left`` first.
        """
        num_new_pages = self.pages_for(len(token_ids)) - len(match.path)
        self._tree.lock(match.path)
        allocation = Allocation(match.salt, path=match.path.copy())
        allocation.pages = [node.page for node in match.path] + self._take_pages(num_new_pages)
        allocation.num_matched = allocation.num_ready = len(match.path)
        allocation.capacity = len(allocation.pages) * self.page_size
        if self.enabled:
            allocation.next_insert_at = (allocation.num_ready + 1) * self.page_size
            self._unadded.append((allocation, token_ids))
        if self.snapshots is not None:
            self._add_pending()
            allocation.snapshots = self.snapshots.begin(allocation.path, allocation.num_matched, match.missing_snapshot)
        return allocation

    def after_launch(self) -> None:
        """Do the work that need not delay the step: add the pages of its new requests as pending, and evict pages until
        some are free for the next prompt. For a prompt of 8,000 tokens, each takes 0.4 to 0.8 ms.
        """
        self._add_pending()
        num_missing = self._num_kept_free - len(self._free)
        if num_missing > 0:
            self.evict(min(num_missing, len(self._tree.unlocked)))

    def grow(self, allocation: Allocation) -> list[int] | None:
        """Add one page to a request and return it in a list. If no page is left, return None and change nothing."""
        if self.num_allocatable == 0:
            return None
        page = self._take_pages(1)
        allocation.pages += page
        allocation.capacity += self.page_size
        return page

    def insert(self, allocation: Allocation, token_ids: list[int], num_computed: int) -> None:
        """Record that positions before ``num_computed`` have KV. Other requests can now match their full pages."""
        self._add_pending()
        for index in range(allocation.num_ready, num_computed // self.page_size):
            if not self._make_ready(allocation, token_ids, index):
                break
        allocation.next_insert_at = (allocation.num_ready + 1) * self.page_size
        if self.snapshots is not None and allocation.snapshots is not None:
            self.snapshots.record_computed(allocation.snapshots, allocation.path, num_computed)

    def release(self, allocation: Allocation, *, is_invalid: bool = False) -> None:
        """Release the pages: computed pages stay cached, all others become free. A second call does nothing.

        is_invalid: the computed pages are wrong. They are freed too, unless another request uses them.
        """
        self._add_pending()
        if self.snapshots is not None and allocation.snapshots is not None:
            self.snapshots.end(allocation.snapshots, is_invalid=is_invalid)
            allocation.snapshots = None
        if is_invalid:
            while allocation.num_ready > allocation.num_matched and _is_exclusive(allocation, allocation.num_ready - 1):
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
        self._free.extend(owned)
        allocation.pages, allocation.path = [], []
        allocation.num_matched = allocation.num_ready = allocation.capacity = 0
        allocation.next_insert_at = NEVER

    def pin(self, session: int, allocation: Allocation) -> None:
        """Pin the computed pages of a request for a session, which becomes the most recently used one."""
        pinned = self._pins.setdefault(session, {})
        self._pins.move_to_end(session)
        new = [node for node in allocation.path[: allocation.num_ready] if node not in pinned]
        self._tree.pin(new)
        pinned.update(dict.fromkeys(new))

    def touch(self, session: int) -> None:
        """Make a session the most recently used one."""
        if session in self._pins:
            self._pins.move_to_end(session)

    def unpin(self, session: int) -> None:
        """Remove all pins of a session. Its pages stay cached as most recently used. Ignores unknown sessions."""
        self._tree.unpin(reversed(self._pins.pop(session, {})))

    def change_weights(self) -> None:
        """Match no pages that were computed so far, because the weights have changed. They will be evicted."""
        self.num_weight_changes += 1
        for session in list(self._pins):
            self.unpin(session)

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` cached, unlocked pages, least recently used first. Return how many were freed.

        Pinned pages come last, starting with the least recently used session.
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
        self._free.extend(evicted)
        return len(evicted)

    def clear(self) -> bool:
        """Free all cached pages that no request uses. Return whether the cache is empty."""
        self.evict(self.num_pages)
        return self.num_cached == 0

    # ------------------------------------------------------------ private

    def _add_pending(self) -> None:
        """Add the other pages of new requests to the tree, as pending."""
        for allocation, token_ids in self._unadded:
            path, first = allocation.path, allocation.num_matched
            keys = self._tree.keys(token_ids, first, allocation.salt)
            path += self._tree.add_pending(path[-1] if path else self._tree.root, keys, allocation.pages[first:])
        self._unadded.clear()

    def _take_pages(self, count: int) -> list[int]:
        """Allocate ``count`` pages. Evicts cached pages if needed. Raises ValueError if ``num_allocatable`` is less."""
        if count > len(self._free):
            self.evict(count - len(self._free))
        first = len(self._free) - count
        if first < 0:
            raise ValueError(f"{count} pages are needed, but only {len(self._free)} are free")
        pages = self._free[first:]
        del self._free[first:]
        pages.reverse()
        return pages

    def _make_ready(self, allocation: Allocation, token_ids: list[int], index: int) -> bool:
        """Record that the page ``index`` is computed. Return False while another request is computing the same page."""
        if index < len(allocation.path):
            allocation.path[index].is_pending = False
        else:
            parent = allocation.path[-1] if allocation.path else self._tree.root
            key: Key = tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])
            if allocation.salt and not allocation.path:
                key = (*key, allocation.salt)
            node = self._tree.attach(parent, key, allocation.pages[index])
            if node is None:
                return False
            allocation.path.append(node)
        allocation.num_ready = index + 1
        return True


def _is_exclusive(allocation: Allocation, index: int) -> bool:
    """Return whether only this request uses the page at this index of its path, and no other page follows it."""
    node = allocation.path[index]
    is_own = node.page == allocation.pages[index] and node.num_locks == 1 and not node.num_pins
    return is_own and all(child in allocation.path[index + 1 : index + 2] for child in node.children.values())
