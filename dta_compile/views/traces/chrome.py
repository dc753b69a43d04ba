"""Files of trace viewers: Chrome's (Perfetto, chrome://tracing), and speedscope's (https://www.speedscope.app).

Source: "Trace Event Format" of the Chromium project. There times are microseconds, as floating-point numbers. Here
they are integers of eighths of a microsecond, which such numbers add up exactly: where readers find that one event
ends after the next one begins, by whatever little, they take the other for called by the one.

Source: speedscope's file format schema, its "evented" profiles: frames are opened and closed at ascending places.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

TICKS = 8  # of a microsecond

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that lasts from `start` to `stop` (ticks); of what lasts no time, a mark."""

    name: str
    start: int
    stop: int
    facts: Facts = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Counter:
    """A value from a time (ticks) on, drawn as a curve under `name`."""

    name: str
    time: int
    value: float


@dataclasses.dataclass(frozen=True)
class Track:
    """Events one after the other: of a stream, or of a thread."""

    name: str
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True)
class Process:
    """Tracks and curves under one heading."""

    name: str
    tracks: tuple[Track, ...]
    counters: tuple[Counter, ...] = ()


def as_chrome_trace(processes: Iterable[Process], facts: Facts | None = None) -> str:
    """The text of a trace; `facts` about all of it."""
    lines = (json.dumps(event, separators=(",", ":")) for event in _events(processes))
    head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(facts or {})})
    return head[:-1] + ', "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


def _events(processes: Iterable[Process]) -> Iterator[dict[str, Any]]:
    for number, process in enumerate(processes, start=1):  # to Perfetto, process 0 is the kernel's
        yield _metadata("process_name", {"name": process.name}, number)
        yield _metadata("process_sort_index", {"sort_index": number}, number)
        for thread, track in enumerate(process.tracks, start=1):
            tid = 1000 * number + thread  # threads of all processes are told by one number
            yield _metadata("thread_name", {"name": track.name}, number, tid)
            yield from (_event(event, number, tid) for event in track.events)
        for one in process.counters:
            yield {"ph": "C", "pid": number, "name": one.name, "ts": one.time / TICKS, "args": {"value": one.value}}


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
    """The text of a file with one or several weights of the same tree.

    Args:
        name: of the file.
        names: of the nodes, in preorder.
        parents: of the nodes; -1 for roots.
        profiles: by name, the weight of every node without those below it.
    """
    fields = {
        "$schema": SCHEMA,
        "name": name,
        "exporter": "dta_compile",
        "shared": {"frames": [{"name": one} for one in names]},
        "profiles": [_profile(title, parents, weights) for title, weights in profiles.items()],
    }
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _profile(title: str, parents: Sequence[int], weights: Sequence[int]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    path: list[int] = []
    place = 0
    for node, (parent, weight) in enumerate(zip(parents, weights, strict=True)):
        while path and path[-1] != parent:
            events.append({"type": "C", "frame": path.pop(), "at": place})
        events.append({"type": "O", "frame": node, "at": place})
        path.append(node)
        place += weight
    events += [{"type": "C", "frame": node, "at": place} for node in reversed(path)]
    return {"type": "evented", "name": title, "unit": "none", "startValue": 0, "endValue": place, "events": events}
