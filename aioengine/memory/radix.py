"""RadixTree maps token ids to pages. One node is one full page, so nodes are never split or merged.

    root ── (16 ids) page 4 ── (16 ids) page 9 ── (16 ids) page 2
                           └── (16 ids) page 7

Keys of the first level may end with a salt. Paths with different salts share no nodes.

A node is *pending* while a request is going to compute its page. Other requests with the same prefix wait for it
instead of computing the page again. A lock protects a node and all its ancestors from eviction. Unlocked nodes are in
one list, least recently unlocked first. A path is unlocked from its end to the root, and a parent stays locked as long
as any child. So every node in the list comes after its descendants, the first entry is always a leaf, and evicting a
page takes constant time. A pin also keeps a node out of this list. The ancestors of a pinned node are pinned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec import Struct

Salt = str | tuple[int, str] | tuple[int, str, str] | tuple[str, int, "Salt"]
"""Cache namespace: the user's salt, or (adapter id, user salt), or (adapter id, user salt, "long") with long RoPE.
After the weights were replaced: ("weights", number of replacements, one of these).
"""

Key = tuple[int | Salt, ...]


class Node(Struct, eq=False):
    """One page of token ids, and the page of the pool that holds their KV. ``parent`` is None after removal."""

    key: Key
    page: int
    parent: Node | None
    num_locks: int = 0
    is_pending: bool = False
    children: dict[Key, Node] = {}
    num_pins: int = 0


class RadixTree:
    """Finds the longest known prefix, and the page to evict next.

    Attributes:
        num_nodes: all nodes. num_pinned: pinned nodes that are not locked. unlocked: nodes that are neither locked nor
            pinned, least recently unlocked first.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node((), -1, None)
        self.num_nodes = 0
        self.num_pinned = 0
        self.unlocked: OrderedDict[Node, None] = OrderedDict()

    def keys(self, token_ids: list[int], first: int = 0, salt: Salt = "") -> Iterator[Key]:
        """Yield the full pages of ``token_ids`` as tuples, starting at page ``first``. Page 0 includes the salt."""
        size = self.page_size
        part = token_ids[first * size :] if first else token_ids
        pages = zip(*[iter(part)] * size, strict=False)
        return _salted(pages, salt) if salt and not first else pages

    def walk(self, token_ids: list[int], max_pages: int, salt: Salt = "", *, known: Node | None = None) -> list[Node]:
        """Return the nodes of the longest known prefix, at most ``max_pages``. The last ones may be pending.

        known: a node that an earlier walk with a prefix of these ids returned. The search starts there.
        """
        path: list[Node] = []
        while known is not None and known.parent is not None:
            path.append(known)
            known = known.parent
        path.reverse()
        node = path[-1] if path else self.root
        if len(path) >= max_pages:
            return path[: max(max_pages, 0)]
        for key in self.keys(token_ids, len(path), salt):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            if len(path) == max_pages:
                break
            node = child
        return path

    def add(self, parent: Node, key: Key, page: int) -> Node:
        """Add a child of ``parent`` (the root, or a node that the caller has locked). It is locked once."""
        node = parent.children[key] = Node(key, page, parent, num_locks=1)
        self.num_nodes += 1
        return node

    def attach(self, parent: Node, key: Key, page: int) -> Node | None:
        """Lock the child with this key, or add it. Return None if another request is computing its page."""
        node = parent.children.get(key)
        if node is None:
            return self.add(parent, key, page)
        if node.is_pending:
            return None
        self.lock([node])
        return node

    def add_pending(self, parent: Node, keys: Iterable[Key], pages: Iterable[int]) -> list[Node]:
        """Add a chain of pending nodes below ``parent``, each locked once. Stops at the first key that exists."""
        path: list[Node] = []
        for key, page in zip(keys, pages, strict=False):
            children = parent.children
            if children and key in children:
                break
            parent = children[key] = Node(key, page, parent, 1, True)
            path.append(parent)
        self.num_nodes += len(path)
        return path

    def lock(self, path: list[Node]) -> None:
        """Lock a path that begins at the root, or a child of a node that the caller has locked."""
        unlocked = self.unlocked
        for node in path:
            if node.num_locks == 0:
                if node.num_pins:
                    self.num_pinned -= 1
                else:
                    del unlocked[node]
            node.num_locks += 1

    def unlock(self, path: list[Node]) -> None:
        """Undo one ``lock`` (or ``add``) of every node of a path, from its end to the root."""
        unlocked = self.unlocked
        for node in reversed(path):
            node.num_locks -= 1
            if node.num_locks == 0:
                if node.num_pins:
                    self.num_pinned += 1
                else:
                    unlocked[node] = None

    def pin(self, nodes: Iterable[Node]) -> None:
        """Pin nodes, parents first; the parent of the first one is the root, or pinned."""
        for node in nodes:
            if not node.num_pins and not node.num_locks:
                del self.unlocked[node]
                self.num_pinned += 1
            node.num_pins += 1

    def unpin(self, nodes: Iterable[Node]) -> None:
        """Undo one ``pin`` of every node, children first."""
        for node in nodes:
            node.num_pins -= 1
            if not node.num_pins and not node.num_locks:
                self.unlocked[node] = None
                self.num_pinned -= 1

    def remove(self, node: Node) -> None:
        """Remove a leaf that only the caller has locked."""
        self._detach(node)
        node.num_locks = 0

    def evict(self) -> Node | None:
        """Remove and return the least recently unlocked leaf, or None if all nodes are locked or pinned."""
        if not self.unlocked:
            return None
        node, _ = self.unlocked.popitem(last=False)
        self._detach(node)
        return node

    def _detach(self, node: Node) -> None:
        if node.parent is None or node.children:
            raise ValueError(f"the node of page {node.page} is not a leaf: it has {len(node.children)} children")
        del node.parent.children[node.key]
        node.parent = None
        node.is_pending = False
        self.num_nodes -= 1


def _salted(pages: Iterator[Key], salt: Salt) -> Iterator[Key]:
    """Yield the pages, the first one with the salt at its end."""
    first = next(pages, None)
    if first is not None:
        yield (*first, salt)
    yield from pages
