"""Planned schedules with a thing or two changed: what `verify` lets pass must still be exact."""

import dataclasses
import random

import pytest

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
    with_states,
)
from dta_compile.plan.schedule import MODES
from tests.support.execution import Tokens, check_attention, execute


def planned(rng):
    """A batch with many forks, its tree, and a schedule that keeps anything."""
    sequences = [[0]]
    for _ in range(rng.randint(2, 7)):
        base = rng.choice(sequences)
        sequences.append(base[: rng.randint(0, len(base))] + [rng.randrange(3) for _ in range(rng.randint(0, 4))])
    strategy, chunk_size = rng.choice(["packed", "packed", "packed", "dfs", "vanilla"]), rng.choice([1, 2, 3, 5, 7, 12])
    options = Options(strategy=strategy, chunk_size=chunk_size, order=rng.choice(["backward_dfs", "random"]))
    tree = PrefixTree.build(sequences)
    chunks = chunk_tree(tree, options)
    kept = [rng.choice(["graph", "kv", ""]) for _ in chunks.chunks]
    graphs = frozenset(k for k, kind in enumerate(kept) if kind == "graph")
    kv = frozenset(k for k, kind in enumerate(kept) if kind == "kv" and chunks.chunks[k].spine)
    return sequences, tree, build_schedule(tree, options, rng.choice(MODES), Keep(graphs, kv), chunks)


def changed_slice(rng, part, sequences):
    """Another bound, or another sequence."""
    if rng.random() < 0.5:
        return dataclasses.replace(part, sequence=rng.randrange(len(sequences)))
    field = rng.choice(["start", "stop"])
    return dataclasses.replace(part, **{field: getattr(part, field) + rng.choice([-1, 1])})


def changed_chunk(rng, chunk, sequences):
    """Slices in another order, one changed or dropped, the spine made a branch or a branch the spine."""
    spine, branches = chunk.spine, list(chunk.branches)
    k = rng.randrange(max(len(branches), 1))
    match rng.choice(["slice", "order", "drop", "spine"]):
        case "order" if len(branches) > 1:
            branches.append(branches.pop(k))
        case "drop" if len(chunk.slices) > 1 and branches:
            del branches[k]
        case "spine" if spine is not None:
            spine, branches = None, [spine, *branches]
        case "spine":
            spine = branches.pop(k)
        case _ if spine is not None and not (branches and rng.random() < 0.5):
            spine = changed_slice(rng, spine, sequences)
        case _:
            branches[k] = changed_slice(rng, branches[k], sequences)
    return Chunk(spine, tuple(branches))


def mutated(rng, sequences, schedule):
    """The schedule with an op dropped, doubled, moved or changed, or a chunk changed throughout."""
    ops = list(schedule.ops)
    k = rng.randrange(len(ops))
    op, kind = ops[k], rng.choice(["drop", "double", "swap", "here", "throughout", "throughout"])
    if kind == "drop":
        del ops[k]
    elif kind == "double":
        ops.insert(rng.randint(k, len(ops)), op)
    elif kind == "swap":
        ops[k : k + 2] = ops[k : k + 2][::-1]
    elif isinstance(op, (Pop, Restore)):
        ops[k] = type(op)(changed_slice(rng, op.part, sequences))
    elif isinstance(op, (Anchor, Forward)) and kind == "here":
        other = Forward if isinstance(op, Anchor) else Anchor
        states = tuple(depth + rng.choice([0, 0, 1]) for depth in op.states if rng.random() < 0.8)
        changes = [dataclasses.replace(op, out=not op.out), other(op.chunk, op.out, states=op.states)]
        ops[k] = rng.choice([*changes, dataclasses.replace(op, states=states)])
    elif isinstance(op, (Anchor, Forward, Backward)):
        new = changed_chunk(rng, op.chunk, sequences)
        same = [n for n in range(len(ops)) if getattr(ops[n], "chunk", None) == op.chunk]
        for n in same if kind == "throughout" else [k]:
            ops[n] = dataclasses.replace(ops[n], chunk=new)
    return dataclasses.replace(schedule, ops=tuple(ops))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_what_verify_accepts_is_exact(seed):
    rng, accepted = random.Random(seed), 0
    for _ in range(1500):
        sequences, tree, planned_schedule = planned(rng)
        states = rng.random() < 0.5
        if states:
            planned_schedule = with_states(tree, planned_schedule)
        schedule = mutated(rng, sequences, planned_schedule)
        if rng.random() < 0.5 and schedule.ops:
            schedule = mutated(rng, sequences, schedule)
        try:
            verify(tree, schedule, states=states)
        except ScheduleError:
            continue
        execute(sequences, schedule, states=states)
        for chunk in {op.chunk for op in schedule.ops if hasattr(op, "chunk")}:
            check_attention(Tokens(sequences), chunk, segments(tree, chunk))
        accepted += schedule != planned_schedule
    assert accepted > 50, "other names for the same tokens, pops left out, runs that are not needed"


def test_dropping_an_operation_is_noticed():
    """No op of a planned schedule can be left out, except pops: what is pushed next cuts the stack too."""
    rng = random.Random(0)
    for _ in range(300):
        _, tree, schedule = planned(rng)
        k = rng.choice([k for k, op in enumerate(schedule.ops) if not isinstance(op, Pop)])
        with pytest.raises(ScheduleError):
            verify(tree, dataclasses.replace(schedule, ops=schedule.ops[:k] + schedule.ops[k + 1 :]))


def test_counts_agree_with_counting_token_by_token():
    rng = random.Random(0)
    for _ in range(300):
        _, tree, schedule = planned(rng)
        depths = {Anchor: [], Forward: [], Backward: []}
        for op in schedule.ops:
            if type(op) in depths:
                depths[type(op)] += [depth for part in op.chunk.slices for depth in range(part.start, part.stop)]
        counts, forward = verify(tree, schedule), depths[Anchor] + depths[Forward]
        assert counts == simulate(tree, schedule)
        assert counts.forward.tokens == len(forward) == tree.num_rows + counts.recomputed_tokens
        assert counts.forward.pairs == sum(depth + 1 for depth in forward)
        assert counts.backward.pairs == sum(depth + 1 for depth in depths[Backward])
        assert counts.restored_tokens == sum(op.part.tokens for op in schedule.ops if isinstance(op, Restore))
