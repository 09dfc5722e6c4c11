"""Snapshots: copies of recurrent states in the radix tree, for models with state layers (Mamba, gated delta nets).

For attention layers, the pages of a prefix are enough to reuse it. A recurrent layer has one state of fixed size, for
the newest token only. So a prefix can be reused only up to a page boundary at which a copy of the state exists: a
snapshot. A node of the tree may have one, for the state after its page. Its id is its index in the runner's pool.
Snapshots are taken at multiples of ``span`` tokens (page boundaries) where reuse is likely (Marconi, arXiv 2411.19379):

- at the last multiple within a long prompt: for the same prompt again, and for the next turn,
- where a prompt diverges from the cached prefix: this prefix was requested twice and has no snapshot there,
- where a waiting request diverges from a prompt that is being computed,
- at multiples at which rows end anyway: the newest ``NUM_ROLLING`` of each request, for its next turn and for resuming.

In the first three cases a row of the request must end there: these are its *stop positions*. A request may wait until
a running request has computed up to a boundary. The running one is the *producer* of the node at that boundary. A
snapshot can be used once the result of the step that copied it has arrived. Snapshots need no locks: a request copies
its snapshot in its first step, and a later snapshot with the same id is written by a later step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from msgspec import Struct, field

from aioengine.memory.radix import Node

NO_SNAPSHOT = -1
MIN_GAIN = 2
"""A prompt gets an extra stop position only if a later request saves at least this many spans."""
NUM_ROLLING = 2
"""Two, because eviction takes the last pages of a preempted request first, and the newest snapshot with them."""


class Boundary(NamedTuple):
    """A page boundary: the number of tokens before it, and the node of the last page before it."""

    position: int
    node: Node


class _Copy(NamedTuple):
    """A snapshot taken by a step in flight. is_rolling: later rolling snapshots of the same request replace it."""

    position: int
    snapshot_id: int
    is_rolling: bool


class RequestSnapshots(Struct, eq=False):
    """The snapshots of one request while it has pages.

    Attributes:
        source: id of the snapshot from which its state is loaded; NO_SNAPSHOT: it starts with a zero state.
        stop_positions: positions at which one of its rows must end.
        produces: the boundaries that it produces, ascending.
        copies: snapshots in flight, ascending.
        nodes: nodes with a snapshot taken by this request.
        rolling: the ``nodes`` with a rolling snapshot, oldest first.
    """

    source: int
    stop_positions: set[int] = set()
    produces: deque[Boundary] = field(default_factory=deque[Boundary])
    copies: deque[_Copy] = field(default_factory=deque[_Copy])
    nodes: list[Node] = []
    rolling: deque[Node] = field(default_factory=deque[Node])


class Snapshots:
    """The snapshots 0 ... num_snapshots - 1 and their nodes, least recently used first.

    Attributes:
        span: snapshots are taken at multiples of this number of tokens. A multiple of the page size.
    """

    def __init__(self, num_snapshots: int, *, span: int, page_size: int) -> None:
        self.num_snapshots = num_snapshots
        self.span = span
        self._page_size = page_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._ids: OrderedDict[Node, int] = OrderedDict()
        self._producers: dict[Node, RequestSnapshots] = {}

    # ------------------------------------------------------------ before a request begins

    def num_usable(self, path: list[Node]) -> int:
        """Return how many pages of ``path`` a new request can reuse: up to the last node with a snapshot."""
        pages_per_span = self.span // self._page_size
        counts = range(len(path) // pages_per_span * pages_per_span, 0, -pages_per_span)
        return next((count for count in counts if path[count - 1] in self._ids), 0)

    def missing_snapshot(self, path: list[Node], num_usable: int) -> Boundary | None:
        """Return the boundary at which a snapshot would make more than ``num_usable`` pages of ``path`` reusable."""
        position = len(path) * self._page_size // self.span * self.span
        num_pages = position // self._page_size
        return Boundary(position, path[num_pages - 1]) if num_pages > num_usable else None

    def has_producer(self, node: Node) -> bool:
        """Return whether a running request is going to compute the page of this node."""
        return node in self._producers

    def stop_at(self, boundary: Boundary) -> None:
        """Add a stop position at ``boundary`` to its producer."""
        self._producers[boundary.node].stop_positions.add(boundary.position)

    def begin(self, path: list[Node], num_matched: int, missing: Boundary | None) -> RequestSnapshots:
        """Start a request. path: its nodes; the first ``num_matched`` are reused, the others are pending.
        missing: result of ``missing_snapshot`` for this request.
        """
        source = NO_SNAPSHOT
        if num_matched:
            source = self._ids[path[num_matched - 1]]
            self._ids.move_to_end(path[num_matched - 1])
        request, size, span = RequestSnapshots(source), self._page_size, self.span
        if missing is not None:
            request.stop_positions.add(missing.position)
        if missing is not None and missing.node.parent is not None:  # without a parent it was evicted
            request.produces.append(missing)
        else:
            positions = range(num_matched * size + span, len(path) * size + 1, span)
            request.produces.extend(Boundary(position, path[position // size - 1]) for position in positions)
        self._producers.update((boundary.node, request) for boundary in request.produces)
        return request

    def stop_before(self, request: RequestSnapshots, start: int, end: int) -> None:
        """Add a stop position at the last multiple of ``span`` before ``end``, if it is at least ``MIN_GAIN`` spans
        after ``start``.
        """
        position = (end - 1) // self.span * self.span
        if position - start >= MIN_GAIN * self.span:
            request.stop_positions.add(position)

    # ------------------------------------------------------------ while it runs

    def end_of_row(self, request: RequestSnapshots, start: int, end: int, num_tokens: int) -> int:
        """Return the end of a row that could compute ``start`` ... ``end`` of ``num_tokens`` tokens: the first stop
        position, else the last multiple of ``span`` if more tokens follow, else ``end``.
        """
        stop = min((stop for stop in request.stop_positions if start < stop < end), default=0)
        if stop:
            return stop
        last = end // self.span * self.span
        return last if start < last and end < num_tokens else end

    def take(self, request: RequestSnapshots, position: int) -> int:
        """Allocate a snapshot for the state after a row that ends at ``position``, a multiple of ``span``. Return its
        id, or NO_SNAPSHOT if none is left.
        """
        is_rolling = position not in request.stop_positions
        while is_rolling and len(request.rolling) >= NUM_ROLLING:
            self.drop(request.rolling.popleft())
        if not self._free and self._ids:  # evict the least recently used snapshot; pinned ones come last
            oldest = next(iter(self._ids))
            self.drop(next((node for node in self._ids if not node.num_pins), oldest))
        snapshot_id = self._free.pop() if self._free else NO_SNAPSHOT
        if snapshot_id != NO_SNAPSHOT:
            request.copies.append(_Copy(position, snapshot_id, is_rolling))
        return snapshot_id

    def record_computed(self, request: RequestSnapshots, path: list[Node], num_computed: int) -> None:
        """Record that positions before ``num_computed`` are computed. path: the nodes of the request; the last ones may
        be missing while another request computes the same pages.
        """
        while request.produces and request.produces[0].position <= num_computed:
            self._forget_producer(request.produces.popleft().node, request)
        while request.copies and request.copies[0].position <= num_computed:
            copy = request.copies.popleft()
            num_pages = copy.position // self._page_size
            node = path[num_pages - 1] if num_pages <= len(path) else None
            if node is None or node in self._ids:  # another request has the same snapshot
                self._free.append(copy.snapshot_id)
                continue
            self._ids[node] = copy.snapshot_id
            request.nodes.append(node)
            if copy.is_rolling:
                request.rolling.append(node)

    def end(self, request: RequestSnapshots, *, is_invalid: bool = False) -> None:
        """Record that the request stops running. Its snapshots stay, unless ``is_invalid``: its states are wrong."""
        for boundary in request.produces:
            self._forget_producer(boundary.node, request)
        self._free.extend(copy.snapshot_id for copy in request.copies)
        request.produces.clear()
        request.copies.clear()
        if is_invalid:
            for node in request.nodes:
                self.drop(node)

    def drop(self, node: Node) -> None:
        """Free the snapshot of a node, if it has one."""
        snapshot_id = self._ids.pop(node, NO_SNAPSHOT)
        if snapshot_id != NO_SNAPSHOT:
            self._free.append(snapshot_id)

    # ------------------------------------------------------------ private

    def _forget_producer(self, node: Node, request: RequestSnapshots) -> None:
        if self._producers.get(node) is request:
            del self._producers[node]
