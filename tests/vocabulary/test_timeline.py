import json

import pytest

from autopar.timeline import CATEGORIES, MEMORY_KINDS, STREAMS, Event, MemoryPoint, StepTimeline


def bytes_of(**kinds: float) -> tuple[float, ...]:
    return tuple(kinds.get(kind.split()[0], 0.0) for kind in MEMORY_KINDS)


STEP = StepTimeline(
    3.0,
    (
        Event(0, "compute", "layers.1", "forward", 1.0, 2.0, layer=1, microbatch=0),
        Event(0, "compute", "layers.0", "forward", 0.0, 1.0, layer=0, microbatch=0),
        Event(0, "communication", "weight", "gather", 0.5, 1.0, num_bytes=64.0, detail="all_gather over 8 neighbors"),
        Event(1, "compute", "layers.2", "forward", 2.0, 2.5, layer=2, microbatch=0),
    ),
    ((MemoryPoint(0.0, bytes_of(parameters=8.0)), MemoryPoint(1.0, bytes_of(parameters=8.0, saved=4.0))), ()),
)


def test_streams_are_in_order_of_time_and_count_what_is_hidden():
    assert [event.name for event in STEP.on(0, "compute")] == ["layers.0", "layers.1"]
    assert STEP.busy_s(0, "compute") == 2.0
    assert STEP.busy_s(0, "communication") == 0.5
    assert STEP.exposed_s(0) == 1.0
    assert STEP.exposed_s(1) == 2.5
    assert STEP.peak(0).total_bytes == 12.0


def test_a_trace_has_every_event_in_microseconds_on_a_named_thread():
    trace = json.loads(STEP.to_chrome())["traceEvents"]
    complete = [event for event in trace if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        (e.group, STREAMS.index(e.stream), pytest.approx(e.start_s * 1e6), pytest.approx(e.seconds * 1e6))
        for e in sorted(STEP.events, key=lambda e: e.start_s)
    ]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert named == {(group, index): name for group in (0, 1) for index, name in enumerate(STREAMS)}
    assert {e["cat"] for e in complete} <= set(CATEGORIES)
    memory = [e for e in trace if e["ph"] == "C"]
    assert [sum(e["args"].values()) for e in memory] == [8.0, 12.0]


def test_arrows_lead_from_sends_to_what_waits_for_them():
    first = Event(0, "compute", "layers.0", "forward", 0.0, 1.0, microbatch=3)
    send = Event(0, "pipeline", "hidden", "send", 1.0, 1.5, microbatch=3, to_group=1)
    earlier = Event(1, "compute", "layers.1", "forward", 0.2, 0.4, microbatch=2)
    weight = Event(1, "compute", "layers.1", "weight", 1.5, 1.6, microbatch=3)  # waits for nothing that is sent
    reader = Event(1, "compute", "layers.1", "forward", 1.6, 2.0, microbatch=3)
    back = Event(1, "pipeline", "hidden", "send", 2.0, 2.5, microbatch=3, to_group=0)  # nothing reads it
    step = StepTimeline(3.0, (reader, send, weight, first, earlier, back))
    assert list(step.arrivals()) == [(send, reader)]
    trace = json.loads(step.to_chrome())["traceEvents"]
    arrows = [(e["ph"], e["pid"], e["tid"], e["ts"]) for e in trace if e["ph"] in "sf"]
    assert arrows == [("s", 0, STREAMS.index("pipeline"), 1e6), ("f", 1, STREAMS.index("compute"), 1.6e6)]
