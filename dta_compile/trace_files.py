"""Format traces for Chrome's viewers (Perfetto, chrome://tracing) and speedscope (https://www.speedscope.app).

Chrome's format ("Trace Event Format" of the Chromium project) has times in microseconds, as floating-point numbers.
Events here have integer times in eighths of a microsecond, which those numbers represent exactly: if rounding made an
event end after the next one begins, viewers would nest the second event inside the first.

speedscope's format (its file format schema, "evented" profiles) opens and closes frames at ascending positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

TICKS = 8  # per microsecond

Facts = Mapping[str, Any]


class Event(NamedTuple):
    """Event from `start` to `stop` (ticks); drawn as an instant mark if both are equal."""

    name: str
    start: int
    stop: int
    facts: Facts


class Process(NamedTuple):
    """Tracks and curves under a common heading.

    Attributes:
        tracks: by name of a stream or a thread, its consecutive events.
        counters: times (ticks), and by name the values of curves from then on.
    """

    name: str
    tracks: Mapping[str, Sequence[Event]]
    counters: Sequence[tuple[int, Mapping[str, float]]]


def as_chrome_trace(processes: Iterable[Process], facts: Facts | None = None) -> str:
    """Return the text of a Chrome trace; `facts` become its metadata."""
    lines = (json.dumps(event, separators=(",", ":")) for event in _events(processes))
    head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(facts or {})})
    return head[:-1] + ', "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


def _events(processes: Iterable[Process]) -> Iterator[dict[str, Any]]:
    for number, process in enumerate(processes, start=1):  # Perfetto takes process 0 for the kernel's
        yield _metadata("process_name", {"name": process.name}, number)
        yield _metadata("process_sort_index", {"sort_index": number}, number)
        for tid, (name, events) in enumerate(process.tracks.items(), start=1000 * number + 1):  # unique over processes
            yield _metadata("thread_name", {"name": name}, number, tid)
            yield from (_event(event, number, tid) for event in events)
        for time, values in process.counters:
            for name, value in values.items():
                yield {"ph": "C", "pid": number, "name": name, "ts": time / TICKS, "args": {"value": value}}


def _metadata(name: str, facts: Facts, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": facts}


def _event(event: Event, process: int, thread: int) -> dict[str, Any]:
    common = {"pid": process, "tid": thread, "name": event.name, "cat": "dta", "ts": event.start / TICKS}
    common["args"] = dict(event.facts)
    if event.stop > event.start:
        return {"ph": "X", **common, "dur": (event.stop - event.start) / TICKS}
    return {"ph": "i", "s": "t", **common}


SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def as_speedscope(
    name: str, names: Sequence[str], parents: Sequence[int], profiles: Mapping[str, Sequence[int]]
) -> str:
    """Return the text of a speedscope file with one or several weights of the same tree.

    Args:
        name: name of the file.
        names: names of the nodes, in preorder.
        parents: parents of the nodes; -1 for roots.
        profiles: by name of a profile, the weight of every node without its descendants.
    """
    fields = {
        "$schema": SCHEMA,
        "name": name,
        "exporter": "dta_compile",
        "shared": {"frames": [{"name": node} for node in names]},
        "profiles": [_profile(title, parents, weights) for title, weights in profiles.items()],
    }
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _profile(title: str, parents: Sequence[int], weights: Sequence[int]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    path: list[int] = []
    position = 0
    for node, (parent, weight) in enumerate(zip(parents, weights, strict=True)):
        while path and path[-1] != parent:
            events.append({"type": "C", "frame": path.pop(), "at": position})
        events.append({"type": "O", "frame": node, "at": position})
        path.append(node)
        position += weight
    events += [{"type": "C", "frame": node, "at": position} for node in reversed(path)]
    return {"type": "evented", "name": title, "unit": "none", "startValue": 0, "endValue": position, "events": events}
