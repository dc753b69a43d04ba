"""Turn a plan into the columns of an HTML page (`page`): tree, schedule, and data of its sequences."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dta_compile.errors import PlanError
from dta_compile.plan import Plan
from dta_compile.plan.cost import Limits
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.interpret import Held, interpret
from dta_compile.plan.peak_memory import bytes_by_op
from dta_compile.plan.schedule import Anchor, Attach, Backward, Forward, Pop, Restore, Schedule, extent, format_op
from dta_compile.plan.tree.chunk import Chunk, Slice
from dta_compile.plan.tree.lexicographic import as_integers, each
from dta_compile.plan.tree.prefix_tree import IntArray, PrefixTree
from dta_compile.plan.tree.split_prefixes import Images
from dta_compile.views.page import Column, compressed_size, data_url, decoder, page, tokens_in

# Most deflated bytes of all data; with base64 and the scripts the page stays just below 3 MB. Tokens get the bytes that
# the other columns leave, but at least 1/20, however many ops and segments there are.
MOST_BYTES, LEAST_SHARE = 2_080_000, 20

ROLES = ("other", "system", "user", "tool", "thinking", "answer")
# Role that follows each marker of chat templates; None: the template names the role after the marker.
MARKS: dict[str, str | None] = dict.fromkeys(("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>"))
MARKS |= {"<think>": "thinking", "</think>": "answer", "<tool_response>": "tool", "</tool_response>": "user"}
MARKS |= {"<|system|>": "system", "<|user|>": "user", "<|assistant|>": "answer", "<|observation|>": "tool"}
NAME_TOKENS = 12  # tokens after a marker that are searched for the name of the role
NAMES = {"system": "system", "developer": "system", "user": "user", "assistant": "answer", "model": "answer"}
NAMES |= {"tool": "tool", "ipython": "tool", "observation": "tool"}
KINDS = tuple(kind.__name__.lower() for kind in (Anchor, Forward, Restore, Pop, Attach, Backward))
# State of a chunk after a run of a graph, as `assets/schedule.js` numbers them: run, graph live, KV kept, done.
STATES, KV_KEPT = {"cache_only": 1, "forward_only": 1, "forward": 2, "backward": 4}, 3


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """Optional data of a plan's sequences, besides their tree: arguments of `Plan.to_html`, which describes them."""

    sequences: Iterable[Any] | None = None
    tokenizer: Any = None
    rewards: Iterable[float] | None = None
    loss_masks: Iterable[Any] | None = None
    names: Iterable[str] | None = None
    images: Images | None = None
    thumbnails: Mapping[Hashable, bytes | PathLike[str]] | None = None
    losses: Any = None
    device: tuple[str, float, float] | None = None


def picture(plan: Plan, title: str, *data: Any) -> str:
    """Return the text of the page.

    Args:
        data: what is known of the sequences, the attributes of `Known`.

    Raises:
        PlanError: the data do not fit the plan's sequences.
    """
    tree, schedule, limits, known = plan.prefix_tree, plan.schedule, plan.limits, Known(*data)
    facts = {"summary": str(plan), "stats": dataclasses.asdict(plan.stats), "shared": tree.shared}
    dealing, rank = plan.dealing, plan.rank
    columns = _segments(tree) | _ops(tree, schedule, dealing, rank) | _levels(tree, schedule, limits)
    columns |= _outcomes(tree, known) | _causes(tree, known)
    names = None if known.names is None else [str(name) for name in _counted("names", known.names, tree)]
    ops = [format_op(op) for op in schedule.ops]
    left = MOST_BYTES - compressed_size("\n".join([*ops, *(names or ())]), *columns.values())
    tokens, token_facts = _tokens(tree, known, max(left, MOST_BYTES // LEAST_SHARE))
    settings = dataclasses.asdict(dataclasses.replace(schedule, ops=(), others=(), groups=()))
    counted = limits.footprint.counts_tokens
    more = {
        "title": title,
        "kinds": KINDS,
        "schedule": settings,
        "ops": ops,
        "names": names,
        "unit": "tokens" if counted else "bytes",
        "budget": None if counted else limits.budget,
        "thumbnails": _thumbnails(known),
        "losses": None if known.losses is None else _figures(known.losses),
        "ranks": None if dealing is None else {"count": dealing.ranks, "own": rank, "rounds": dealing.rounds},
        "device": None if counted or known.device is None else _device(*known.device, columns["peakBytes"]),
    }
    return page(title, {**facts, **more, **token_facts}, columns | tokens)


def _segments(tree: PrefixTree) -> dict[str, Column]:
    """Return columns by segment (in preorder) and by sequence; `order` gives the rows of the picture."""
    return {
        "parent": tree.parent,
        "stop": tree.stop,
        "sequence": tree.sequence,
        "order": tree.order,
        "length": tree.lengths,
        "endNode": tree.end_node,
    }


def _ops(tree: PrefixTree, schedule: Schedule, dealing: Dealing | None, rank: int) -> dict[str, Column]:
    """Return columns by op, and runs of tree tokens that are forwarded equally often or written by one chunk.

    By op: kind, index of its distinct chunk or slice, state of its chunk, sequence whose path is on the stack after it.
    `partFirst` points from a chunk or slice to its ranges of tree tokens, `attachFirst` from an op to its sequences.
    """
    parts: dict[Chunk | Slice, int] = {}
    kinds, part_of, states, stack, attached = [], [], [], [], []
    times, owner = np.zeros(tree.num_rows + 1, np.int64), np.full(tree.num_rows, -1, np.int64)
    for event in interpret(tree, schedule):
        op = event.op
        kinds.append(KINDS.index(type(op).__name__.lower()))
        part = extent(op)
        number = -1 if part is None else parts.setdefault(part, len(parts))
        part_of.append(number)
        states.append(KV_KEPT if getattr(op, "kv", False) else STATES.get(op.graph, 0))
        stack.append(event.sequence)
        attached.append(op.sequences if isinstance(op, Attach) else ())
        if isinstance(op, (Anchor, Forward)):
            for start, stop in tree.chunk_ranges(op.chunk):
                times[[start, stop]] += 1, -1
                owner[start:stop][owner[start:stop] < 0] = number if op.out else -1
    times = np.cumsum(times)[:-1]
    of_ranks = {} if dealing is None else _pieces(dealing, rank, times)
    ranges = [_ranges(tree, part) for part in parts]
    flat = np.array([edge for group in ranges for edge in group], np.int64).reshape(-1, 2)
    return {
        "kind": np.array(kinds, np.int64),
        "part": np.array(part_of, np.int64),
        "state": np.array(states, np.int64),
        "stackSequence": np.array(stack, np.int64),
        "attachFirst": _offsets(attached),
        "attached": np.array([sequence for group in attached for sequence in group], np.int64),
        "partFirst": _offsets(ranges),
        "partTokens": np.array([part.tokens for part in parts], np.int64),
        "rangeStart": flat[:, 0],
        "rangeStop": flat[:, 1],
        **_runs("forwards", times),
        **_runs("owner", owner),
        **of_ranks,
    }


def _pieces(dealing: Dealing, rank: int, times: IntArray) -> dict[str, Column]:
    """Return runs of tree tokens by the rank that runs them; count in `times` what all ranks run, not `rank` alone.

    All ranks run the pieces of a round equally often.
    """
    for number in range(dealing.rounds):
        start, stop = dealing.piece(rank, number)
        first, last = (int(dealing.bounds[edge * dealing.ranks]) for edge in (number, number + 1))
        times[first:last] = times[start] if start < stop else 1
    return _runs("rank", np.repeat(dealing.holders, np.diff(dealing.bounds)))


def _ranges(tree: PrefixTree, part: Chunk | Slice) -> list[tuple[int, int]]:
    if isinstance(part, Chunk):
        return tree.chunk_ranges(part)
    return tree.row_ranges(part.sequence, part.start, part.stop)


def _offsets(groups: Sequence[Sequence[Any]]) -> IntArray:
    """Return the offset of each group in their concatenation, and the end of the last one."""
    return np.cumsum([0, *map(len, groups)])


def _levels(tree: PrefixTree, schedule: Schedule, limits: Limits) -> dict[str, Column]:
    """Return the tokens held after every op and, where known, the bytes kept after it and live while it runs."""
    live = list(bytes_by_op(tree, schedule, limits.footprint, limits.head_starts))
    columns: dict[str, Column] = {
        name: np.array([getattr(op.held, name) for op in live], np.int64) for name in Held._fields
    }
    if not limits.footprint.counts_tokens:
        columns |= {"keptBytes": np.array([op.kept for op in live]), "peakBytes": np.array([op.peak for op in live])}
    return columns


def _runs(name: str, values: IntArray) -> dict[str, Column]:
    """Run-length encode: return the start and the value of every run."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else np.zeros(0, np.int64)
    return {f"{name}Start": starts, f"{name}Value": values[starts]}


def _outcomes(tree: PrefixTree, known: Known) -> dict[str, Column]:
    """Return rewards by sequence, and the number of sequences that train on each run of tree tokens."""
    columns: dict[str, Column] = {}
    if known.rewards is not None:
        rewards = _counted("rewards", known.rewards, tree)
        try:
            columns["reward"] = np.array([float(reward) for reward in rewards], np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise PlanError("rewards are not numbers", expected="one for every sequence", got=str(error)) from error
        if not np.isfinite(columns["reward"]).all():
            first = int(np.argmin(np.isfinite(columns["reward"])))
            raise PlanError("a reward is not finite", where=f"sequence {first}", got=f"{columns['reward'][first]}")
    if known.loss_masks is not None:
        times = np.zeros(tree.num_rows + 1, np.int64)
        for sequence, mask in enumerate(_counted("loss_masks", known.loss_masks, tree)):
            for first, last in _spans(sequence, mask, int(tree.lengths[sequence])):
                for start, stop in tree.row_ranges(sequence, first, last):
                    times[[start, stop]] += 1, -1
        columns |= _runs("trained", np.cumsum(times)[:-1])
    return columns


def _causes(tree: PrefixTree, known: Known) -> dict[str, Column]:
    """Return runs of tree tokens by the cause that they are run again for, as numbers from 1; 0: none."""
    if known.losses is None:
        return {}
    of_token = np.zeros(tree.num_rows, np.int64)
    for number, cause in reversed([*enumerate(known.losses.causes, 1)]):  # the first cause has the most tokens
        for sequence, first, last in cause.again:
            for start, stop in tree.row_ranges(sequence, first, last):
                of_token[start:stop] = number
    return _runs("cause", of_token)


def _figures(losses: Any) -> list[dict[str, Any]]:
    """Return the table of `dta why`: a row for each cause, and for all of them if there are several."""
    rows = [*losses.causes, *([losses.together] if len(losses.causes) > 1 else [])]
    return [
        {"name": row.name, "places": row.places, "gained": row.gained, "compression": row.compression}
        | {"advice": row.advice, "examples": [(place.sequence, place.at) for place in row.examples]}
        for row in rows
    ]


def _device(name: str, memory: float, peak: float, running: Column) -> dict[str, Any]:
    """Return facts of a device; `base` is what the step holds besides graphs, KV and the chunk at work."""
    return {"name": name, "memory": memory, "base": max(peak - float(running.max(initial=0)), 0)}


def _spans(sequence: int, mask: Any, length: int) -> list[tuple[int, int]]:
    """Convert a loss mask, or ranges, to half-open ranges of positions."""
    try:
        array = np.asarray(mask.detach().cpu().numpy() if hasattr(mask, "detach") else mask)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    if array.ndim == 1 and len(array) == length and array.dtype.kind in "biuf" and np.isin(array, (0, 1)).all():
        edges = np.flatnonzero(np.diff(np.concatenate([[False], array != 0, [False]])))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    if array.size == 0 and not (array.dtype == np.bool_ and length):
        return []
    if array.ndim == 2 and array.shape[1] == 2 and array.dtype.kind in "iu":
        spans = [(int(first), int(last)) for first, last in array]
        if all(0 <= first <= last <= length for first, last in spans):
            return spans
    raise PlanError(
        "a loss mask does not fit its sequence",
        where=f"sequence {sequence}",
        expected=f"{length} booleans (or zeros and ones), or ranges (start, stop) within [0:{length}]",
        got=f"shape {array.shape} of {array.dtype}" if array.size > 8 or array.ndim != 2 else str(array.tolist()),
    )


def _tokens(tree: PrefixTree, known: Known, most: int) -> tuple[dict[str, Column], dict[str, Any]]:
    decode = None if known.tokenizer is None else decoder(known.tokenizer)
    if known.sequences is None:
        if decode is not None:
            raise PlanError("a tokenizer without tokens", hint="pass sequences=..., the token ids of every sequence")
        # Show the tokens at which neighbours differ, which the tree has; in a compiled call these are codes of inputs.
        forks = {"common": tree.common, "fork": tree.forks.reshape(-1)} if tree.shared else {}
        return forks, {"ends": None, "texts": None}
    arrays = _sequences(tree, known.sequences)
    columns = (arrays[i][start:stop] for i, start, stop in zip(tree.sequence, tree.start, tree.stop, strict=True))
    rows = np.concatenate([np.zeros(0, np.int64), *(column.astype(np.int64) for column in columns)])
    tokens = tokens_in(rows, tree.stop - tree.start, decode, most, _units(tree, known.images))
    facts = {"ends": tokens.ends, "texts": list(tokens.texts) if decode is not None else None, "roles": ROLES}
    roles = {} if decode is None else _roles(tree, rows, decode)
    return {"token": tokens.entries, "vocabulary": tokens.ids} | roles, facts


def _units(tree: PrefixTree, images: Images | None) -> dict[tuple[int, int], str]:
    """Return the texts of images by their ranges of tree tokens."""
    texts: dict[tuple[int, int], str] = {}
    for index, start, stop, number in images.spans(tree.lengths.tolist()) if images is not None else ():
        for place in tree.row_ranges(index, start, stop):
            texts[place] = f"⟨image {number}, {stop - start} tokens⟩"
    return texts


def _thumbnails(known: Known) -> dict[int, str]:
    """Return thumbnails as URLs, by number of the image."""
    numbers = known.images.numbers if known.images is not None else {}
    given = ((image, content) for image, content in (known.thumbnails or {}).items() if image in numbers)
    return {numbers[image]: data_url(_picture(content, f"image {image}"), f"image {image}") for image, content in given}


def _picture(content: Any, where: str) -> bytes:
    if not isinstance(content, (bytes, str, PathLike)):
        expected, got = "bytes, or the name of a file", type(content).__name__
        raise PlanError("a thumbnail that a page cannot hold", where=where, expected=expected, got=got)
    return content if isinstance(content, bytes) else Path(content).read_bytes()


def _roles(tree: PrefixTree, rows: IntArray, decode: Callable[[list[int]], str]) -> dict[str, Column]:
    """Return runs of tree tokens by the role of their message, found by markers of chat templates, if there are any."""
    texts = {number: decode([number]) for number in np.unique(rows).tolist()}
    marks = {number: MARKS[text.strip()] for number, text in texts.items() if text.strip() in MARKS}
    if not marks:
        return {}
    roles = np.zeros(len(rows), np.int64)
    markers = np.flatnonzero(np.isin(rows, list(marks)))
    at_end: list[tuple[str, str | None]] = []  # by segment: role at its end, and the name read so far if incomplete
    for parent, start, size in zip(tree.parent.tolist(), tree.row.tolist(), tree.stop - tree.start, strict=True):
        role, begun = at_end[parent] if parent >= 0 else (ROLES[0], None)
        stop = start + int(size)
        edges = markers[np.searchsorted(markers, start) : np.searchsorted(markers, stop)].tolist()
        for first, last in pairwise([start, *edges, stop]):
            if first in edges:
                role, begun = marks[int(rows[first])] or ROLES[0], None if marks[int(rows[first])] else ""
            if begun is not None:
                named = first + (first in edges)
                begun += "".join(texts[token] for token in rows[named : min(last, named + NAME_TOKENS)].tolist())
                if name := re.match(r"\s*(\w+)\W", begun if last == stop else f"{begun}\n"):  # a marker ends it too
                    role, begun = NAMES.get(name[1], ROLES[0]), None
            roles[first:last] = ROLES.index(role)
        at_end.append((role, begun))
    return _runs("role", roles)


def _sequences(tree: PrefixTree, sequences: Iterable[Any]) -> list[npt.NDArray[Any]]:
    """Return the sequences as arrays; raise `PlanError` unless they share the prefixes that they share in the tree."""
    arrays = [
        as_integers(sequence, f"sequence {index}")
        for index, sequence in enumerate(_counted("sequences", sequences, tree))
    ]
    for index, (array, length) in enumerate(zip(arrays, tree.lengths.tolist(), strict=True)):
        if len(array) != length:
            raise _other_sequences(f"sequence {index}", f"{length} tokens", f"{len(array)}")
    for (left, right), shared in zip(pairwise(tree.order.tolist()), tree.lcp[1:].tolist(), strict=True):
        if not np.array_equal(arrays[left][:shared], arrays[right][:shared]):
            raise _other_sequences(f"sequences {left} and {right}", f"{shared} equal tokens", "others")
    return arrays


def _other_sequences(where: str, expected: str, got: str) -> PlanError:
    return PlanError("these sequences are not the plan's", where=where, expected=expected, got=got)


def _counted(name: str, values: Iterable[Any], tree: PrefixTree) -> list[Any]:
    items, count = each(values), len(tree.lengths)
    if len(items) != count:
        raise PlanError(f"{name} are not one for every sequence", expected=f"{count} of them", got=f"{len(items)}")
    return items
