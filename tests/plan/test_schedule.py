import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.errors import ScheduleError
from dta_compile.plan import Anchor, Attach, Backward, Forward, Pop, Restore, Schedule, Slice
from dta_compile.plan.schedule import MODES

HEADER = "# dta schedule strategy=dfs order=backward_dfs mode=transparent chunk_size=512"
numbers = st.integers(0, 10**6)
chunks = st.lists(st.builds(Slice, numbers, numbers, numbers), min_size=1, max_size=3).map(tuple)
ops = st.one_of(
    st.builds(Anchor, chunks, st.booleans()),
    st.builds(Forward, chunks, st.booleans()),
    st.builds(Attach, st.lists(st.integers(0, 30), max_size=12).map(tuple)),
    *(st.builds(kind, chunks) for kind in (Backward, Pop, Restore)),
)
words = st.sampled_from(["dfs", "vanilla", "by-hand"])
schedules = st.builds(
    Schedule, st.lists(ops, max_size=8).map(tuple), words, words, st.sampled_from(MODES), st.integers(1, 9999)
)


@given(schedules)
def test_text_parses_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule


def test_listing():
    schedule = Schedule(
        (
            Anchor((Slice(0, 0, 1200),), out=True),
            Forward((Slice(3, 100, 612),)),
            Attach((*range(16), 18)),
            Attach((4, 5, 2)),
            Backward((Slice(1, 5, 9), Slice(2, 5, 7))),
        ),
        strategy="dfs",
        order="backward_dfs",
        mode="transparent",
        chunk_size=512,
    )
    assert str(schedule).splitlines() == [
        HEADER,
        "anchor   s0[0:1200] out",
        "forward  s3[100:612]",
        "attach   s0..s15 s18",
        "attach   s4 s5 s2",
        "backward s1[5:9]+s2[5:7]",
    ]


def test_blank_lines_indents_and_comments_are_skipped():
    text = f"\n  {HEADER}\n\n    # the root\n    anchor s0[0:3]   out\n"
    assert Schedule.parse(text).ops == (Anchor((Slice(0, 0, 3),), out=True),)


@pytest.mark.parametrize(
    "line, what, got",
    [
        ("forwards s0[0:1]", "unknown operation", "forwards"),
        ("forward", "an operation without a chunk", "forward"),
        ("forward s0[0:1] in", "too many words", "forward s0[0:1] in"),
        ("backward s0[0:1] out", "too many words", "backward s0[0:1] out"),
        ("pop s0[0-1]", "not a slice of a sequence", "s0[0-1]"),
        ("anchor s0[0:1]+", "not a slice of a sequence", "nothing"),
        ("attach s0 1", "not a run of sequences", "1"),
        ("attach s4..s2", "a run of sequences is empty", "s4..s2"),
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


def test_the_mode_is_known():
    with pytest.raises(ScheduleError, match="score, transparent, streaming"):
        Schedule.parse(HEADER.replace("transparent", "opaque"))


def test_schedules_are_immutable_values():
    schedule = Schedule.parse(f"{HEADER}\nanchor s0[0:1]")
    assert hash(schedule) == hash(Schedule.parse(str(schedule)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.mode = "score"
