"""The order in which readers are woken."""

from __future__ import annotations

import threading

from aioengine.frontend.calls.call import CallRow
from aioengine.frontend.calls.delivery import Delivery
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import FirstToken, TextChunks
from tests.kit.calls import add_row, make_call


def test_readers_of_first_tokens_are_woken_first() -> None:
    rows: dict[int, CallRow] = {}
    woken: list[int] = []
    for uid in range(4):
        call = make_call(1, is_stream=True)
        rows[uid] = add_row(call, uid)
        call.wakers = (lambda uid=uid: woken.append(uid),)
    delivery = Delivery(rows, threading.RLock(), lambda _: None)
    first_tokens = [FirstToken(uid, 0, 1.0, 2.0) for uid in (2, 3)]
    delivery.deliver(TextChunks(TokenColumns([0, 1, 2, 3], [5] * 4), ["a"] * 4, first_tokens=first_tokens))
    delivery.wake()
    assert woken == [2, 3, 0, 1]
