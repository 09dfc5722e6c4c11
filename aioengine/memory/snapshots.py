"""Snapshots: where in the radix tree the states of layers are kept, for models whose layers have them.

The pages of a prefix suffice for layers with keys and values. Layers with a state of fixed size know it behind the
newest token alone, so a prefix is reused up to a page boundary at which a copy of the state was kept: a snapshot. A
node of the tree may have one, of the state behind its page; its id is its index in the runner's pool, as with pages.
Snapshots stand at multiples of ``span`` tokens, which are page boundaries, and are taken where reuse is likely (as in
Marconi, arXiv 2411.19379):

- behind the last multiple within the tokens that a request begins with, if these are many: for the same prompt, and
  for the next turn,
- where a prompt leaves what is cached: its beginning has come a second time, without a snapshot,
- where a waiting request leaves the prompt of one that is being computed,
- at multiples that rows come to anyway: of each request the newest ``NUM_ROLLING``, for its next turn and to resume it.

At the first three a row of the request ends: its *stop positions*. A waiting request may wait until a running one has
computed up to a boundary: the running one is the *producer* of that boundary's node. A snapshot can be used when the
step that copied it has a result. It is never locked, since a request copies it in the step that it begins with: after
that its id may be given to another snapshot, whose copy comes later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.memory.radix import Node

NO_SNAPSHOT = -1
LEAST_GAIN = 2
"""Spans that a later request must save for a step that ends within a prompt for its sake alone."""
NUM_ROLLING = 2
"""Under pressure the last pages of a preempted request are evicted first, and with them its newest snapshot."""


class Boundary(NamedTuple):
    """A page boundary: the number of tokens before it, and the node of the last page before it."""

    position: int
    node: Node


class _Copy(NamedTuple):
    """A snapshot that a step in flight takes. is_rolling: later ones of the same request replace it."""

    position: int
    snapshot_id: int
    is_rolling: bool


class RequestSnapshots:
    """Those of one request while it has pages.

    Attributes:
        source: the id of the snapshot that it begins with; NO_SNAPSHOT: it begins at its start.
        stop_positions: where a row of it is to end.
        produces: the boundaries whose producer it is, ascending.
        copies: in flight, ascending.
        nodes: those that have a snapshot of it.
        rolling: those of ``nodes`` whose snapshots later ones replace, the oldest first.
    """

    __slots__ = ("copies", "nodes", "produces", "rolling", "source", "stop_positions")

    def __init__(self, source: int) -> None:
        self.source = source
        self.stop_positions: set[int] = set()
        self.produces: deque[Boundary] = deque()
        self.copies: deque[_Copy] = deque()
        self.nodes: list[Node] = []
        self.rolling: deque[Node] = deque()


class Snapshots:
    """The snapshots 0 ... num_snapshots - 1 and the nodes that have them, the one unused for longest first.

    Attributes:
        span: tokens; snapshots stand at multiples of it. A multiple of the page size.
    """

    __slots__ = ("_free", "_ids", "_page_size", "_producers", "num_snapshots", "span")

    def __init__(self, num_snapshots: int, *, span: int, page_size: int) -> None:
        if span < 1 or span % page_size:
            raise ValueError(f"snapshots can be at multiples of the page size, {page_size}, not of {span} tokens")
        self.num_snapshots = num_snapshots
        self.span = span
        self._page_size = page_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._ids: OrderedDict[Node, int] = OrderedDict()
        self._producers: dict[Node, RequestSnapshots] = {}

    @property
    def num_kept(self) -> int:
        """Nodes that have a snapshot."""
        return len(self._ids)

    # ------------------------------------------------------------ before a request begins

    def num_usable(self, path: list[Node]) -> int:
        """How many of these first pages of a request it can reuse: those up to the last node with a snapshot."""
        each = self.span // self._page_size
        counts = range(len(path) // each * each, 0, -each)
        return next((count for count in counts if path[count - 1] in self._ids), 0)

    def missing(self, path: list[Node], num_usable: int) -> Boundary | None:
        """Where a snapshot would serve a request with these first pages better than behind the usable ones."""
        position = len(path) * self._page_size // self.span * self.span
        num_pages = position // self._page_size
        return Boundary(position, path[num_pages - 1]) if num_pages > num_usable else None

    def has_producer(self, node: Node) -> bool:
        """Whether a running request has still to compute the page of this node."""
        return node in self._producers

    def stop_at(self, boundary: Boundary) -> None:
        """Have the producer of a boundary stop there, unless it has passed it."""
        self._producers[boundary.node].stop_positions.add(boundary.position)

    def begin(self, path: list[Node], num_matched: int, missing: Boundary | None) -> RequestSnapshots:
        """A request begins. ``path``: its nodes, the first ``num_matched`` of them reused, the others announced.
        missing: as ``missing`` has found.
        """
        source = NO_SNAPSHOT
        if num_matched:
            source = self._ids[path[num_matched - 1]]
            self._ids.move_to_end(path[num_matched - 1])
        own, size, span = RequestSnapshots(source), self._page_size, self.span
        if missing is not None:
            own.stop_positions.add(missing.position)
        if missing is not None and missing.node.parent is not None:  # else it was evicted since
            own.produces.append(missing)
        else:
            positions = range(num_matched * size + span, len(path) * size + 1, span)
            own.produces.extend(Boundary(position, path[position // size - 1]) for position in positions)
        self._producers.update((boundary.node, own) for boundary in own.produces)
        return own

    def stop_before(self, own: RequestSnapshots, start: int, end: int) -> None:
        """Have a request stop at the last place before ``end``, where others may go on, if it computes at least
        ``LEAST_GAIN`` spans from ``start`` to there.
        """
        position = (end - 1) // self.span * self.span
        if position - start >= LEAST_GAIN * self.span:
            own.stop_positions.add(position)

    # ------------------------------------------------------------ while it runs

    def end_of_row(self, own: RequestSnapshots, start: int, end: int, num_tokens: int) -> int:
        """Where a row ends that could compute ``start`` ... ``end`` of ``num_tokens``: at the first stop position, or
        at the last multiple of ``span`` where it does not get to the end of the tokens.
        """
        stop = min((stop for stop in own.stop_positions if start < stop < end), default=0)
        if stop:
            return stop
        last = end // self.span * self.span
        return last if start < last and end < num_tokens else end

    def take(self, own: RequestSnapshots, position: int) -> int:
        """Allocate a snapshot of the state behind a row that ends at ``position``, a multiple of ``span``; returns its
        id, NO_SNAPSHOT where none can be had.
        """
        is_rolling = position not in own.stop_positions
        while is_rolling and len(own.rolling) >= NUM_ROLLING:
            self.drop(own.rolling.popleft())
        snapshot_id = self._allocate()
        if snapshot_id != NO_SNAPSHOT:
            own.copies.append(_Copy(position, snapshot_id, is_rolling))
        return snapshot_id

    def passed(self, own: RequestSnapshots, path: list[Node], num_computed: int) -> None:
        """Positions before ``num_computed`` have a result. ``path``: its nodes, of which some may be missing while
        another request computes the same.
        """
        while own.produces and own.produces[0].position <= num_computed:
            self._forget_producer(own.produces.popleft().node, own)
        while own.copies and own.copies[0].position <= num_computed:
            copy = own.copies.popleft()
            num_pages = copy.position // self._page_size
            node = path[num_pages - 1] if num_pages <= len(path) else None
            if node is None or node in self._ids:  # another request has kept the same
                self._free.append(copy.snapshot_id)
                continue
            self._ids[node] = copy.snapshot_id
            own.nodes.append(node)
            if copy.is_rolling:
                own.rolling.append(node)

    def end(self, own: RequestSnapshots, *, is_invalid: bool = False) -> None:
        """It runs no more. What it kept stays, unless ``is_invalid``: then what it computed is wrong."""
        for boundary in own.produces:
            self._forget_producer(boundary.node, own)
        self._free.extend(copy.snapshot_id for copy in own.copies)
        own.produces.clear()
        own.copies.clear()
        if is_invalid:
            for node in own.nodes:
                self.drop(node)

    def drop(self, node: Node) -> None:
        """A node has no snapshot any more; one that has none is ignored."""
        snapshot_id = self._ids.pop(node, NO_SNAPSHOT)
        if snapshot_id != NO_SNAPSHOT:
            self._free.append(snapshot_id)

    def check_integrity(self, running: Iterable[RequestSnapshots]) -> None:
        """Raises RuntimeError unless every snapshot is free, kept or in flight once, ``running`` being all requests."""
        requests = list(running)
        ids = [*self._free, *self._ids.values(), *(copy.snapshot_id for each in requests for copy in each.copies)]
        if sorted(ids) != list(range(self.num_snapshots)):
            raise RuntimeError(f"the ids {sorted(ids)} of snapshots are not those below {self.num_snapshots}")
        if any(node.parent is None or node.is_pending for node in self._ids):
            raise RuntimeError("a snapshot belongs to a node that is not in the tree, or not computed")
        produced = {id(boundary.node) for each in requests for boundary in each.produces}
        if produced != {id(node) for node in self._producers}:
            raise RuntimeError(f"{len(self._producers)} nodes have a producer, and requests know of {len(produced)}")

    # ------------------------------------------------------------ inside

    def _forget_producer(self, node: Node, own: RequestSnapshots) -> None:
        if self._producers.get(node) is own:
            del self._producers[node]

    def _allocate(self) -> int:
        """The id of a free snapshot, else of the one unused for longest; those of sessions come last."""
        if not self._free and self._ids:
            oldest = next(iter(self._ids))
            self.drop(next((node for node in self._ids if not node.num_pins), oldest))
        return self._free.pop() if self._free else NO_SNAPSHOT
