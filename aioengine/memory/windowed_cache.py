"""WindowedCache: a ``PrefixCache`` with page groups (``PageGroups``), for models with sliding-window layers.

The tree is an index: its nodes have no pages. The pages of a node, one for each group, are its children. So each page
is locked, pinned and evicted separately, by the rules of ``RadixTree``:

    root ── (16 ids) ── (16 ids) ── (16 ids)
               │ │         │ │         │ │
               0 1         0 -         0 1      pages of the groups 0 (no window) and 1 (its second one was evicted)

A request allocates pages as its tokens are computed, not at its admission. It locks the pages that its next tokens
attend to. Pages outside the window are unlocked: they stay cached until they are evicted, like pages of finished
requests. A prefix hit is valid if all groups have the pages that the next token attends to. A longer match is shortened
to the last valid length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import field

from aioengine.memory.prefix_cache import NEVER, Allocation, Match, PrefixCache
from aioengine.memory.radix import Key, Node, RadixTree, Salt
from aioengine.settings.page_groups import PageGroups

RELEASED: Final = -1
"""Entry of a page table: the page was released because no later token attends to it."""


class WindowedAllocation(Allocation, eq=False):
    """The pages of one request.

    pages: ``num_groups`` entries for each block of ``page_size`` positions; ``RELEASED`` outside the window.
    nodes: the tree node of each entry; None: the page belongs to this request only, or was released.
    firsts: for each group, the first block of positions whose page is not released.
    """

    nodes: list[Node | None] = field(default_factory=list[Node | None])
    firsts: list[int] = field(default_factory=list[int])


class _PageTree(RadixTree):
    """A tree with nodes for token ids (a lock only keeps them in the tree) and, below them, nodes for pages."""

    def open(self, parent: Node, key: Key, *, is_pending: bool = False) -> Node:
        """Add a node for token ids, locked once."""
        node = parent.children[key] = Node(key, RELEASED, parent, 1, is_pending)
        return node

    def attach(self, parent: Node, key: Key, page: int) -> Node | None:
        node = parent.children.get(key)
        if node is not None and node.is_pending:
            return None
        if node is None:
            return self.open(parent, key)
        node.num_locks += 1
        return node

    def close(self, path: list[Node]) -> None:
        """Undo one lock of each node for token ids, and remove nodes without pages and children."""
        for node in reversed(path):
            node.num_locks -= 1
            self._drop(node)

    def discard(self, page: Node) -> None:
        """Remove the node of a cached page that is neither locked nor pinned."""
        del self.unlocked[page]
        self._detach(page)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        super()._detach(node)
        if parent is not None:
            self._drop(parent)

    def _drop(self, node: Node) -> None:
        while node.parent is not None and not node.children and not node.num_locks:
            parent = node.parent
            del parent.children[node.key]
            node.parent, node.is_pending = None, False
            node = parent


class WindowedCache(PrefixCache):
    """See the module docstring. ``num_pages`` counts the pages of all groups."""

    def __init__(self, groups: PageGroups, *, num_pages: int, enabled: bool = True) -> None:
        super().__init__(num_pages=num_pages, page_size=groups.page_size, enabled=enabled)
        self._groups = groups
        self._tree: _PageTree = _PageTree(groups.page_size)
        self._page_keys: list[Key] = [("page", group) for group in range(groups.num_groups)]

    def pages_for(self, num_tokens: int) -> int:
        return self._groups.pages_for(num_tokens)

    # ------------------------------------------------------------ questions

    def match(self, token_ids: list[int], salt: Salt = "", *, known: Node | None = None) -> Match:
        match = super().match(token_ids, salt, known=known)
        return match._replace(path=match.path[: self._num_valid(match.path)])

    def num_left(self, match: Match, num_tokens: int, promised: int) -> int:
        seen = [page for _, page in self._seen(match.path)]
        num_unlocked = sum(not page.num_locks for page in seen)
        return self.num_allocatable - num_unlocked - max(self.pages_for(num_tokens) - len(seen), 0) - promised

    def num_promised(self, allocation: Allocation, num_tokens: int) -> int:
        """Return the pages that a running request still needs for its known tokens."""
        assert isinstance(allocation, WindowedAllocation)
        if allocation.capacity >= num_tokens:
            return 0
        num_held = len(allocation.pages) - allocation.pages.count(RELEASED)
        return max(self.pages_for(num_tokens) - num_held, 0)

    # ------------------------------------------------------------ changes

    def allocate(self, token_ids: list[int], match: Match) -> WindowedAllocation:
        """Lock the matched pages that the next token attends to, and add nodes for the rest as pending. ``grow``
        allocates the pages of the other tokens.
        """
        groups, path = self._groups, match.path
        allocation = WindowedAllocation(match.salt, path=path.copy())
        allocation.num_matched = allocation.num_ready = len(path)
        allocation.capacity = len(path) * self.page_size
        allocation.next_insert_at = allocation.capacity + self.page_size
        allocation.firsts = [
            min(groups.first_seen(group, allocation.capacity), len(path)) for group in range(groups.num_groups)
        ]
        allocation.pages = [RELEASED] * (len(path) * groups.num_groups)
        allocation.nodes = [None] * len(allocation.pages)
        for entry, page in self._seen(path):
            allocation.pages[entry], allocation.nodes[entry] = page.page, page
        for node in path:
            node.num_locks += 1
        self._tree.lock([page for page in allocation.nodes if page is not None])
        if self.enabled:
            parent = path[-1] if path else self._tree.root
            for key in self._tree.keys(token_ids, len(path), allocation.salt):
                if key in parent.children:
                    break
                parent = self._tree.open(parent, key, is_pending=True)
                allocation.path.append(parent)
        return allocation

    def grow(self, allocation: Allocation) -> list[int] | None:
        """Add one page of each group to a request and return them. If too few are left, return None."""
        assert isinstance(allocation, WindowedAllocation)
        num_groups = self._groups.num_groups
        if self.num_allocatable < num_groups:
            return None
        pages = self._take_pages(num_groups)
        allocation.pages += pages
        allocation.nodes += [None] * num_groups
        allocation.capacity += self.page_size
        return pages

    def insert(self, allocation: Allocation, token_ids: list[int], num_computed: int) -> None:
        """Record that positions before ``num_computed`` have KV, and release pages that no later token attends to."""
        assert isinstance(allocation, WindowedAllocation)
        num_full = num_computed // self.page_size
        for index in range(allocation.num_ready, num_full if self.enabled else 0):
            if not self._make_ready(allocation, token_ids, index):
                break
            self._cache_pages(allocation, index)
        allocation.next_insert_at = ((allocation.num_ready if self.enabled else num_full) + 1) * self.page_size
        for group in range(self._groups.num_groups):
            self._release_unseen(allocation, group, self._groups.first_seen(group, num_computed))

    def release(self, allocation: Allocation, *, is_invalid: bool = False) -> None:
        assert isinstance(allocation, WindowedAllocation)
        if is_invalid:
            self._forget_computed(allocation)
        pages = zip(allocation.pages, allocation.nodes, strict=True)
        owned = [page for page, node in pages if node is None and page != RELEASED]
        self._tree.unlock([node for node in allocation.nodes if node is not None])
        self._tree.close(allocation.path)
        self._free.extend(owned)
        allocation.pages, allocation.nodes, allocation.path = [], [], []
        allocation.num_matched = allocation.num_ready = allocation.capacity = 0
        allocation.next_insert_at = NEVER

    def pin(self, session: int, allocation: Allocation) -> None:
        """Pin the pages that a continuation of the request attends to, and for groups without a window all pages."""
        pinned = self._pins.setdefault(session, {})
        self._pins.move_to_end(session)
        seen = dict.fromkeys(
            page for _, page in self._seen(allocation.path[: self._num_valid(allocation.path[: allocation.num_ready])])
        )
        windows = dict(zip(self._page_keys, self._groups.windows, strict=True))
        unseen = [page for page in pinned if page not in seen and windows[page.key] is not None]
        new = [page for page in seen if page not in pinned]
        self._tree.pin(new)
        self._tree.unpin(unseen)
        pinned.update(dict.fromkeys(new))
        for page in unseen:
            del pinned[page]

    # ------------------------------------------------------------ private

    def _seen(self, path: list[Node]) -> Iterator[tuple[int, Node]]:
        """Yield (index in the page table, page) of a valid prefix for pages that the next token attends to."""
        groups = self._groups
        for group, key in enumerate(self._page_keys):
            for index in range(groups.first_seen(group, len(path) * self.page_size), len(path)):
                yield index * groups.num_groups + group, path[index].children[key]

    def _num_valid(self, path: list[Node]) -> int:
        """Return how many nodes of a path are a valid prefix hit. Looks at each page at most once."""
        num_valid, groups = len(path), self._groups
        present = [num_valid] * groups.num_groups  # for each group: all pages from here up to ``num_valid`` exist
        is_settled = False
        while not is_settled:
            is_settled = True
            for group, key in enumerate(self._page_keys):
                first = groups.first_seen(group, num_valid * self.page_size)
                unknown = reversed(range(first, min(present[group], num_valid)))
                missing = next((index for index in unknown if key not in path[index].children), None)
                if missing is None:
                    present[group] = min(first, present[group])
                else:  # any longer prefix needs this page
                    num_valid = present[group] = missing
                    is_settled = False
        return num_valid

    def _cache_pages(self, allocation: WindowedAllocation, index: int) -> None:
        """Add the computed pages of a block of positions to the tree, unless it already has them."""
        node, first = allocation.path[index], index * self._groups.num_groups
        for entry, key in enumerate(self._page_keys, first):
            if allocation.nodes[entry] is None and allocation.pages[entry] != RELEASED and key not in node.children:
                allocation.nodes[entry] = self._tree.add(node, key, allocation.pages[entry])

    def _release_unseen(self, allocation: WindowedAllocation, group: int, first: int) -> None:
        """Unlock or free the pages of a group before the block of positions ``first``."""
        num_groups = self._groups.num_groups
        for entry in range(allocation.firsts[group] * num_groups + group, first * num_groups, num_groups):
            node, page = allocation.nodes[entry], allocation.pages[entry]
            if node is not None:
                self._tree.unlock([node])
            elif page != RELEASED:
                self._free.append(page)
            allocation.nodes[entry], allocation.pages[entry] = None, RELEASED
        allocation.firsts[group] = max(first, allocation.firsts[group])

    def _forget_computed(self, allocation: WindowedAllocation) -> None:
        """Remove the pages that the request computed, and other pages of the same nodes that no request uses."""
        num_groups = self._groups.num_groups
        for index in range(allocation.num_matched, allocation.num_ready):
            for entry, key in enumerate(self._page_keys, index * num_groups):
                page = allocation.path[index].children.get(key)
                if page is None or page.num_pins or page.num_locks > (page is allocation.nodes[entry]):
                    continue
                if page is allocation.nodes[entry]:
                    self._tree.remove(page)
                    allocation.nodes[entry], allocation.pages[entry] = None, RELEASED
                else:
                    self._tree.discard(page)
                self._free.append(page.page)
