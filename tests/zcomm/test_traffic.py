"""The traffic counters: exact from any thread, scoped by a block, summed over any part of the key."""

# covers zcomm/_transport/traffic.py

from __future__ import annotations

import sys
import threading

import zcomm
from zcomm._transport.traffic import record


def test_threads_lose_no_counts() -> None:
    def send() -> None:
        for _ in range(20_000):
            record(("race", "int8", "inter"), 1, 3, 5)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with zcomm.traffic() as sent:
            threads = [threading.Thread(target=send) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sent.as_dict() == {"race|int8|inter": {"calls": 40_000, "elements": 120_000, "bytes": 200_000}}


def test_a_block_counts_what_happens_inside_and_keeps_it() -> None:
    key = ("scoped", "bf16", "intra")
    record(key, 1, 10, 20)
    with zcomm.traffic() as outer:
        record(key, 2, 10, 20)
        with zcomm.traffic() as inner:
            assert inner.bytes() == 0
            record(key, 3, 10, 20)
            assert inner.bytes() == 60
    record(key, 4, 10, 20)
    assert (inner.calls(), outer.calls(), zcomm.traffic().calls(operation="scoped")) == (3, 5, 10)
    snapshot = zcomm.traffic()
    record(key, 1, 10, 20)
    assert snapshot.calls(operation="scoped") == 10


def test_totals_by_any_part_of_the_key() -> None:
    with zcomm.traffic() as sent:
        record(("gather", "int8", "intra"), 1, 1, 1)
        record(("gather", "int8", "inter"), 1, 10, 10)
        record(("reduce", "int4", "inter"), 1, 100, 100)
    assert sent.bytes(operation="gather") == 11
    assert sent.elements(link="inter") == 110
    assert sent.calls(format="int4") == 1
    assert sent.bytes(operation="gather", format="int4") == 0
    assert [key.operation for key, _ in sent] == ["gather", "gather", "reduce"]


def test_table_has_a_line_a_key_and_a_total() -> None:
    with zcomm.traffic() as sent:
        record(("gather", "int8", "inter"), 2, 500, 1000)
    header, row, total = str(sent).splitlines()
    assert header.split() == ["operation", "format", "link", "messages", "elements", "bytes"]
    assert row.split() == ["gather", "int8", "inter", "2", "1000", "2000"]
    assert total.split() == ["total", "2", "1000", "2000"]
