"""Nested weights as a file of speedscope (https://www.speedscope.app), which draws them as flame graphs.

Source: speedscope's file format schema, its "evented" profiles: frames are opened and closed at ascending places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["as_speedscope"]

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
