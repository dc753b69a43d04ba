import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import ScheduleError
from dta_compile.plan import Anchor, Attach, Backward, Chunk, Forward, Pop, Restore, Schedule, Slice
from dta_compile.plan.schedule import MODES, SWEEPS

HEADER = "# dta schedule strategy=dfs order=backward_dfs mode=transparent chunk_size=512"
numbers = st.integers(0, 10**6)
slices = st.builds(lambda at, start, more: Slice(at, start, start + more), numbers, numbers, st.integers(1, 10**6))
branches = st.lists(slices, min_size=1, max_size=3).map(tuple)
chunks = st.builds(Chunk, slices) | st.builds(Chunk, slices, branches) | st.builds(Chunk, st.none(), branches)
states = st.lists(numbers, max_size=3).map(tuple)
ops = st.one_of(
    st.builds(Anchor, chunks, st.booleans(), st.booleans(), states),
    st.builds(Forward, chunks, st.booleans(), states),
    st.builds(Attach, st.lists(st.integers(0, 30), max_size=12).map(tuple)),
    st.builds(Backward, chunks),
    st.builds(Pop, slices),
    st.builds(Restore, slices),
)
words = st.sampled_from(["dfs", "packed", "by-hand"])
schedules = st.builds(
    Schedule,
    st.lists(ops, max_size=8).map(tuple),
    words,
    words,
    st.sampled_from(MODES),
    st.integers(1, 9999),
    st.sampled_from(SWEEPS),
)
runs = st.lists(st.tuples(st.integers(1, 9), st.lists(ops, max_size=3).map(tuple)), min_size=1, max_size=4)


@given(schedules, runs)
def test_parts_that_run_other_ops(schedule, runs):
    """Neighbours with the same ops are one run, and most parts run the ops that are listed first."""
    by_run = [(number, dataclasses.replace(schedule, ops=ops, sweep="stages")) for number, ops in runs]
    made = dataclasses.replace(schedule, sweep="stages").with_parts(by_run)
    expected = [one for number, one in by_run for _ in range(number)]
    assert [made.of_part(part) for part in range(len(expected))] == expected
    assert sum(share for share, _ in made.kinds) == pytest.approx(1)
    assert {str(kind) for _, kind in made.kinds} == {str(one) for one in expected}
    assert Schedule.parse(str(made)) == made


@pytest.mark.parametrize(
    "lines",
    [
        ["parts 1..0 of 3:"],
        ["parts 0..3 of 3:"],
        ["parts 0..1 of 3"],
        ["parts 0..1 of 3:", "parts 1..1 of 3:"],
        ["parts 0..1 of 3:", "parts 2..2 of 4:"],
    ],
)
def test_runs_of_parts_that_are_none(lines):
    with pytest.raises(ScheduleError, match="not a run of parts"):
        Schedule.parse("\n".join([f"{HEADER} sweep=stages", *lines]))
    with pytest.raises(ScheduleError, match="unknown operation"):
        Schedule.parse("\n".join([HEADER, *lines]))


@given(schedules)
def test_text_parses_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule


def test_listing():
    spine, branch, below = Slice(1, 5, 9), Slice(2, 7, 8), Slice(3, 8, 10)
    schedule = Schedule(
        (
            Anchor(Chunk(Slice(0, 0, 1200)), out=True, kv=True),
            Anchor(Chunk(spine, (branch,)), kv=True, states=(6, 9)),
            Forward(Chunk(spine), states=(7,)),
            Forward(Chunk(None, (branch, below)), out=True),
            Attach((*range(16), 18)),
            Attach((4, 5, 2)),
            Backward(Chunk(spine, (branch, below))),
            Restore(spine),
            Pop(spine),
        ),
        strategy="dfs",
        order="backward_dfs",
        mode="transparent",
        chunk_size=512,
    )
    assert str(schedule).splitlines() == [
        HEADER,
        "anchor   s0[0:1200] out kv",
        "anchor   s1[5:9]+s2[7:8] kv states@6,9",
        "forward  s1[5:9] states@7",
        "forward  +s2[7:8]+s3[8:10] out",
        "attach   s0..s15 s18",
        "attach   s4 s5 s2",
        "backward s1[5:9]+s2[7:8]+s3[8:10]",
        "restore  s1[5:9]",
        "pop      s1[5:9]",
    ]


def test_parts_of_a_chunk():
    spine, branch = Slice(1, 5, 9), Slice(2, 7, 8)
    assert Chunk(spine, (branch,)).slices == (spine, branch)
    assert Chunk(None, (branch,)).slices == (branch,)
    assert (Chunk(spine, (branch,)).start, Chunk(None, (branch,)).start) == (5, 7)
    assert (Chunk(spine, (branch,)).tokens, Chunk(None, (branch,)).tokens) == (5, 1)


def test_blank_lines_indents_and_comments_are_skipped():
    text = f"\n  {HEADER}\n\n    # the root\n    anchor s0[0:3]   out\n"
    assert Schedule.parse(text).ops == (Anchor(Chunk(Slice(0, 0, 3)), out=True),)


@pytest.mark.parametrize(
    "line, what, got",
    [
        ("forwards s0[0:1]", "unknown operation", "forwards"),
        ("forward", "an operation without a chunk", "forward"),
        ("restore", "an operation without a chunk", "restore"),
        ("forward s0[0:1] in", "unknown words after a chunk", "forward s0[0:1] in"),
        ("forward s0[0:1] kv", "unknown words after a chunk", "forward s0[0:1] kv"),
        ("anchor s0[0:1] kv out", "unknown words after a chunk", "anchor s0[0:1] kv out"),
        ("anchor s0[0:1] out out", "unknown words after a chunk", "anchor s0[0:1] out out"),
        ("anchor s0[0:1] +s1[0:1]", "unknown words after a chunk", "anchor s0[0:1] +s1[0:1]"),
        ("backward s0[0:1] out", "unknown words after a chunk", "backward s0[0:1] out"),
        ("forward s0[0:1] states@1 out", "unknown words after a chunk", "forward s0[0:1] states@1 out"),
        ("backward s0[0:1] states@1", "unknown words after a chunk", "backward s0[0:1] states@1"),
        ("restore s0[0:1] states@1", "unknown words after a chunk", "restore s0[0:1] states@1"),
        ("forward s0[0:1] out states@", "not depths of running states", "states@"),
        ("anchor s0[0:1] states@1,,2", "not depths of running states", "states@1,,2"),
        ("anchor s0[0:1] states@1:2", "not depths of running states", "states@1:2"),
        ("pop s0[0-1]", "not a slice of a sequence", "s0[0-1]"),
        ("pop s0[0:1]+s1[0:1]", "not a slice of a sequence", "s0[0:1]+s1[0:1]"),
        ("restore +s0[0:1]", "not a slice of a sequence", "+s0[0:1]"),
        ("anchor s0[0:1]+", "not a slice of a sequence", "nothing"),
        ("forward s0[0:1]++s1[0:1]", "not a slice of a sequence", "nothing"),
        ("attach s0 1", "not a run of sequences", "1"),
        ("attach s4..s2", "a run of sequences is empty", "s4..s2"),
        ("pop s0[3:1]", "a slice is empty", "s0[3:1]"),
        ("forward s0[0:2]+s1[2:2]", "a slice is empty", "s1[2:2]"),
        ("pop s0[-1:1]", "not a slice of a sequence", "s0[-1:1]"),
        ("pop s0[0:\u0663]", "not a slice of a sequence", "s0[0:\u0663]"),
        (f"pop s0[0:{'9' * 5000}]", "not a slice of a sequence", f"s0[0:{'9' * 5000}]"),
    ],
)
def test_bad_lines_are_named(line, what, got):
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(f"{HEADER}\npop s0[0:1]\n{line}")
    assert error.value.what == what
    assert error.value.where == f"line 3: {line}"
    assert error.value.got == got
    assert error.value.expected


@pytest.mark.parametrize("header", ["", "anchor s0[0:1]", HEADER.replace("512", "0"), HEADER.replace("mode", "node")])
def test_the_header_is_required(header):
    with pytest.raises(ScheduleError, match="no header"):
        Schedule.parse(header)


def test_a_schedule_is_text():
    with pytest.raises(ScheduleError, match="a string"):
        Schedule.parse(None)


def test_the_mode_is_known():
    with pytest.raises(ScheduleError, match="score, transparent, streaming"):
        Schedule.parse(HEADER.replace("transparent", "opaque"))


def test_schedules_are_immutable_values():
    schedule = Schedule.parse(f"{HEADER}\nanchor s0[0:1]")
    assert hash(schedule) == hash(Schedule.parse(str(schedule)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.mode = "score"
