"""Snapshots: where in the radix tree the states of layers are kept, for models whose layers have them.

The pages of a prefix suffice for layers with keys and values. Layers with a state of fixed size know it behind the
newest token alone, so a prefix is reused up to a place where a copy of the state was kept: a snapshot. A node of the
tree may have one, of the state behind its page, in a slot of the runner's pool. Snapshots stand at multiples of
``span`` tokens, which are borders of pages, and are taken where reuse is likely (as in Marconi, arXiv 2411.19379):

- behind the last multiple within the tokens that a request begins with, if these are many: for the same prompt, and
  for the next turn,
- where a prompt leaves what is cached: its beginning has come a second time, without a snapshot,
- where a waiting request leaves the prompt of one that is being computed,
- at multiples that rows come to anyway: of each request the newest ``NUM_ROLLING``, for its next turn and to resume it.

Steps end at the first three, its *stops*. A request may wait until another one has passed a place: the other one is
that node's *maker*. A snapshot counts when the step that copied it has a result. It is never locked, since a request
copies it in the step that it begins with: then the slot may be given to another one, whose copy comes later.
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


class Place(NamedTuple):
    """A border of pages: the number of tokens before it, and the node of the last page before it."""

    position: int
    node: Node


class _Copy(NamedTuple):
    """A snapshot that a step in flight takes. is_rolling: later ones of the same request take its place."""

    position: int
    slot: int
    is_rolling: bool


class RequestSnapshots:
    """Those of one request while it has pages.

    source: the slot with the state that it begins with; NO_SNAPSHOT: it begins at its start. stops: positions at which
    a step of it is to end. makes: the places whose maker it is, ascending. copies: in flight, ascending. nodes: those
    that have a snapshot of it. rolling: those of these whose snapshots later ones replace, the oldest first.
    """

    __slots__ = ("copies", "makes", "nodes", "rolling", "source", "stops")

    def __init__(self, source: int) -> None:
        self.source = source
        self.stops: set[int] = set()
        self.makes: deque[Place] = deque()
        self.copies: deque[_Copy] = deque()
        self.nodes: list[Node] = []
        self.rolling: deque[Node] = deque()


class Snapshots:
    """The slots 0 ... num_slots - 1 and the nodes that have them, the one unused for longest first.

    Attributes:
        span: snapshots stand at multiples of so many tokens, a multiple of the page size.
    """

    __slots__ = ("_free", "_makers", "_page_size", "_slots", "num_slots", "span")

    def __init__(self, num_slots: int, *, span: int, page_size: int) -> None:
        if span < 1 or span % page_size:
            raise ValueError(f"snapshots can be at multiples of the page size, {page_size}, not of {span} tokens")
        self.num_slots = num_slots
        self.span = span
        self._page_size = page_size
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[Node, int] = OrderedDict()
        self._makers: dict[Node, RequestSnapshots] = {}

    @property
    def num_kept(self) -> int:
        """Nodes that have a snapshot."""
        return len(self._slots)

    # ------------------------------------------------------------ before a request begins

    def num_usable(self, path: list[Node]) -> int:
        """How many of these first pages of a request it can reuse: those up to the last node with a snapshot."""
        each = self.span // self._page_size
        places = range(len(path) // each * each, 0, -each)
        return next((count for count in places if path[count - 1] in self._slots), 0)

    def missing(self, path: list[Node], num_usable: int) -> Place | None:
        """Where a snapshot would serve a request with these first pages better than behind the usable ones."""
        position = len(path) * self._page_size // self.span * self.span
        num_pages = position // self._page_size
        return Place(position, path[num_pages - 1]) if num_pages > num_usable else None

    def has_maker(self, node: Node) -> bool:
        """Whether a running request is going to pass this place."""
        return node in self._makers

    def ask_for(self, place: Place) -> None:
        """Have the maker of a place stop there, unless it has passed it."""
        self._makers[place.node].stops.add(place.position)

    def begin(self, path: list[Node], num_matched: int, missing: Place | None) -> RequestSnapshots:
        """A request begins. ``path``: its nodes, the first ``num_matched`` of them reused, the others announced.
        missing: as ``missing`` has found.
        """
        source = NO_SNAPSHOT
        if num_matched:
            source = self._slots[path[num_matched - 1]]
            self._slots.move_to_end(path[num_matched - 1])
        own, size, span = RequestSnapshots(source), self._page_size, self.span
        if missing is not None:
            own.stops.add(missing.position)
        if missing is not None and missing.node.parent is not None:  # else it was evicted since
            own.makes.append(missing)
        else:
            places = range(num_matched * size + span, len(path) * size + 1, span)
            own.makes.extend(Place(position, path[position // size - 1]) for position in places)
        self._makers.update((place.node, own) for place in own.makes)
        return own

    def stop_before(self, own: RequestSnapshots, start: int, end: int) -> None:
        """Have a request stop at the last place before ``end``, where others may go on, if it computes at least
        ``LEAST_GAIN`` spans from ``start`` to there.
        """
        position = (end - 1) // self.span * self.span
        if position - start >= LEAST_GAIN * self.span:
            own.stops.add(position)

    # ------------------------------------------------------------ while it runs

    def end_of_row(self, own: RequestSnapshots, start: int, end: int, num_tokens: int) -> int:
        """Where a row ends that could compute ``start`` ... ``end`` of ``num_tokens``: at the first stop, or at the
        last multiple of ``span`` where it does not get to the end of the tokens.
        """
        stop = min((stop for stop in own.stops if start < stop < end), default=0)
        if stop:
            return stop
        last = end // self.span * self.span
        return last if start < last and end < num_tokens else end

    def take(self, own: RequestSnapshots, position: int) -> int:
        """The slot for the state behind a row that ends at ``position``, a multiple of ``span``; NO_SNAPSHOT: none."""
        is_rolling = position not in own.stops
        while is_rolling and len(own.rolling) >= NUM_ROLLING:
            self.drop(own.rolling.popleft())
        slot = self._free_slot()
        if slot != NO_SNAPSHOT:
            own.copies.append(_Copy(position, slot, is_rolling))
        return slot

    def passed(self, own: RequestSnapshots, path: list[Node], num_computed: int) -> None:
        """Positions before ``num_computed`` have a result. ``path``: its nodes, of which some may be missing while
        another request computes the same.
        """
        while own.makes and own.makes[0].position <= num_computed:
            self._forget_maker(own.makes.popleft().node, own)
        while own.copies and own.copies[0].position <= num_computed:
            copy = own.copies.popleft()
            num_pages = copy.position // self._page_size
            node = path[num_pages - 1] if num_pages <= len(path) else None
            if node is None or node in self._slots:  # another request has kept the same
                self._free.append(copy.slot)
                continue
            self._slots[node] = copy.slot
            own.nodes.append(node)
            if copy.is_rolling:
                own.rolling.append(node)

    def end(self, own: RequestSnapshots, *, is_invalid: bool = False) -> None:
        """It runs no more. What it kept stays, unless ``is_invalid``: then what it computed is wrong."""
        for place in own.makes:
            self._forget_maker(place.node, own)
        self._free.extend(copy.slot for copy in own.copies)
        own.makes.clear()
        own.copies.clear()
        if is_invalid:
            for node in own.nodes:
                self.drop(node)

    def drop(self, node: Node) -> None:
        """A node has no snapshot any more; one that has none is ignored."""
        slot = self._slots.pop(node, NO_SNAPSHOT)
        if slot != NO_SNAPSHOT:
            self._free.append(slot)

    def check_integrity(self, running: Iterable[RequestSnapshots]) -> None:
        """Raises RuntimeError unless every slot is free, kept or in flight once, ``running`` being all requests."""
        requests = list(running)
        slots = [*self._free, *self._slots.values(), *(copy.slot for each in requests for copy in each.copies)]
        if sorted(slots) != list(range(self.num_slots)):
            raise RuntimeError(f"the slots {sorted(slots)} of snapshots are not those up to {self.num_slots}")
        if any(node.parent is None or node.is_pending for node in self._slots):
            raise RuntimeError("a snapshot belongs to a node that is not in the tree, or not computed")
        places = {id(place.node) for each in requests for place in each.makes}
        if places != {id(node) for node in self._makers}:
            raise RuntimeError(f"{len(self._makers)} places have a maker, and requests know of {len(places)}")

    # ------------------------------------------------------------ inside

    def _forget_maker(self, node: Node, own: RequestSnapshots) -> None:
        if self._makers.get(node) is own:
            del self._makers[node]

    def _free_slot(self) -> int:
        """A slot that is free, or of the snapshot unused for longest; those of sessions come last."""
        if not self._free and self._slots:
            oldest = next(iter(self._slots))
            self.drop(next((node for node in self._slots if not node.num_pins), oldest))
        return self._free.pop() if self._free else NO_SNAPSHOT
