"""Planned schedules with one thing changed: what `verify` lets pass must still be exact."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.errors import ScheduleError
from dta_compile.options import Options
from dta_compile.plan import (
    Anchor,
    Backward,
    Chunk,
    Forward,
    Keep,
    Pop,
    PrefixTree,
    Restore,
    build_schedule,
    chunk_tree,
    segments,
    simulate,
    verify,
)
from dta_compile.plan.schedule import MODES
from tests.plan.execution import Tokens, check_attention, execute


@st.composite
def _planned(draw, batches):
    sequences, strategy = draw(batches), draw(st.sampled_from(["packed", "packed", "packed", "dfs", "vanilla"]))
    options = Options(strategy=strategy, chunk_size=draw(st.sampled_from([1, 2, 3, 7, 12])))
    tree = PrefixTree.build(sequences)
    chunks = chunk_tree(tree, options)
    positions = range(len(chunks.chunks))
    graphs = draw(st.none() | st.sets(st.sampled_from(positions or [0])))
    kv = draw(st.sets(st.sampled_from([k for k in positions if chunks.chunks[k].spine] or [0])))
    keep = Keep(None if graphs is None else frozenset(graphs), frozenset(kv))
    return sequences, tree, build_schedule(tree, options, draw(st.sampled_from(MODES)), keep, chunks)


def _slice(draw, part, sequences):
    """Another bound, or another sequence."""
    if draw(st.booleans()):
        return dataclasses.replace(part, sequence=draw(st.integers(0, len(sequences) - 1)))
    field, by = draw(st.sampled_from(["start", "stop"])), draw(st.sampled_from([-1, 1]))
    return dataclasses.replace(part, **{field: getattr(part, field) + by})


def _chunk(draw, chunk, sequences):
    """Slices in another order, one changed or dropped, the spine made a branch or a branch the spine."""
    spine, branches = chunk.spine, list(chunk.branches)
    k = draw(st.integers(0, max(len(branches) - 1, 0)))
    match draw(st.sampled_from(["slice", "order", "order", "drop", "spine"])):
        case "order" if len(branches) > 1:
            branches = draw(st.permutations(branches))
        case "drop" if len(chunk.slices) > 1 and branches:
            del branches[k]
        case "spine" if spine is not None:
            spine, branches = None, [spine, *branches]
        case "spine":
            spine = branches.pop(k)
        case _ if spine is not None and not (branches and draw(st.booleans())):
            spine = _slice(draw, spine, sequences)
        case _:
            branches[k] = _slice(draw, branches[k], sequences)
    return Chunk(spine, tuple(branches))


@st.composite
def _mutated(draw, sequences, schedule):
    """The schedule with an op dropped, doubled, moved or changed, or a chunk changed throughout."""
    ops = list(schedule.ops)
    runs = [k for k, op in enumerate(ops) if isinstance(op, (Anchor, Forward))]
    packed = [k for k in runs if len(ops[k].chunk.branches) > 1]
    flagged = [k for k in runs if getattr(ops[k], "kv", False)]
    parts = [k for k, op in enumerate(ops) if isinstance(op, (Pop, Restore))]
    kinds = {"op": range(len(ops)), "run": runs, "packed": packed, "kv": flagged, "part": parts}
    kind = draw(st.sampled_from([kind for kind, positions in kinds.items() if positions]))
    k = draw(st.sampled_from(kinds[kind]))
    op = ops[k]
    if kind == "op":
        match draw(st.sampled_from(["drop", "double", "swap"])):
            case "drop":
                del ops[k]
            case "double":
                ops.insert(draw(st.integers(k, len(ops))), op)
            case "swap":
                ops[k : k + 2] = ops[k : k + 2][::-1]
    elif kind == "part":
        ops[k] = type(op)(_slice(draw, op.part, sequences))
    elif kind == "kv":
        ops[k] = dataclasses.replace(op, kv=False)
    elif kind == "run" and draw(st.booleans()):
        other = Forward if isinstance(op, Anchor) else Anchor
        ops[k] = draw(st.sampled_from([dataclasses.replace(op, out=not op.out), other(op.chunk, op.out)]))
    else:
        new = _chunk(draw, op.chunk, sequences)
        for n in range(len(ops)) if draw(st.booleans()) else [k]:
            if getattr(ops[n], "chunk", None) == op.chunk:
                ops[n] = dataclasses.replace(ops[n], chunk=new)
    return dataclasses.replace(schedule, ops=tuple(ops))


@settings(max_examples=1000)
@given(st.data())
def test_what_verify_accepts_is_exact(batches, data):
    sequences, tree, schedule = data.draw(_planned(batches))
    for _ in range(data.draw(st.integers(1, 2))):
        if schedule.ops:
            schedule = data.draw(_mutated(sequences, schedule))
    try:
        verify(tree, schedule)
    except ScheduleError:
        return
    execute(sequences, schedule)
    for chunk in {op.chunk for op in schedule.ops if hasattr(op, "chunk")}:
        check_attention(Tokens(sequences), chunk, segments(tree, chunk))


@settings(max_examples=200)
@given(st.data())
def test_dropping_an_operation_is_noticed(batches, data):
    """No op of a planned schedule can be left out, except pops: what is pushed next cuts the stack too."""
    _, tree, schedule = data.draw(_planned(batches))
    needed = [k for k, op in enumerate(schedule.ops) if not isinstance(op, Pop)]
    if needed:
        k = data.draw(st.sampled_from(needed))
        with pytest.raises(ScheduleError):
            verify(tree, dataclasses.replace(schedule, ops=schedule.ops[:k] + schedule.ops[k + 1 :]))


@settings(max_examples=200)
@given(st.data())
def test_counts_agree_with_counting_token_by_token(batches, data):
    _, tree, schedule = data.draw(_planned(batches))
    depths = {Anchor: [], Forward: [], Backward: []}
    for op in schedule.ops:
        if type(op) in depths:
            depths[type(op)] += [depth for part in op.chunk.slices for depth in range(part.start, part.stop)]
    simulation, forward = verify(tree, schedule), depths[Anchor] + depths[Forward]
    assert simulation == simulate(tree, schedule)
    assert simulation.forward.tokens == len(forward) == tree.num_rows + simulation.recomputed_tokens
    assert simulation.forward.pairs == sum(depth + 1 for depth in forward)
    assert simulation.backward.pairs == sum(depth + 1 for depth in depths[Backward])
    assert simulation.restored_tokens == sum(op.part.tokens for op in schedule.ops if isinstance(op, Restore))
