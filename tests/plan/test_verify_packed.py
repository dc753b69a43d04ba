import pytest

from dta_compile.errors import ScheduleError
from dta_compile.plan import PrefixTree, Schedule, Simulation, Work, verify
from dta_compile.plan.interpret import interpret
from tests.support.execution import execute

# s0 to s2 share 1 2, s1 and s2 also 6; s3 forks from the first token.
SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 6, 7], [1, 2, 6, 8], [1, 9]]
TREE = PrefixTree.build(SEQUENCES)
LEGAL = """
    forward s0[0:2]+s3[1:2] out
    forward +s0[2:5]+s1[2:4]+s2[3:4] out
    attach s0..s3
    backward +s0[2:5]+s1[2:4]+s2[3:4]
    backward s0[0:2]+s3[1:2]
    pop s0[0:2]
"""
# The KV of the two spines is kept and comes back.
KEPT = """
    anchor s0[0:2]+s3[1:2] out kv
    anchor s1[2:3] out kv
    anchor +s1[3:4]+s2[3:4] out
    forward +s0[2:5] out
    attach s0..s3
    pop s1[0:3]
    restore s1[0:2]
    backward +s0[2:5]
    restore s1[2:3]
    forward +s1[3:4]+s2[3:4]
    backward +s1[3:4]+s2[3:4]
    forward s1[2:3]
    backward s1[2:3]
    forward s0[0:2]+s3[1:2]
    backward s0[0:2]+s3[1:2]
    pop s0[0:2]
"""


def schedule_of(text, mode="transparent", chunk_size=7):
    header = f"# dta schedule strategy=packed order=by-hand mode={mode} chunk_size={chunk_size}"
    return Schedule.parse(f"{header}\n{text}")


def test_a_packed_schedule_is_counted():
    schedule = schedule_of(LEGAL)
    pairs = (1 + 2) + 2 + (3 + 4 + 5) + (3 + 4) + 4
    work = Work(launches=2, slices=5, tokens=9, pairs=pairs, heads=9)
    execute(SEQUENCES, schedule)
    assert verify(TREE, schedule) == Simulation(
        ops=6,
        forward=work,
        backward=work,
        recomputed_tokens=0,
        restored_tokens=0,
        peak_stack_tokens=2,
        peak_live_tokens=9,
        peak_stored_tokens=0,
    )
    # Branches never come onto the stack, so without the spine nothing does.
    alone = verify(PrefixTree.build([[1], [2]]), schedule_of("anchor +s0[0:1]+s1[0:1] out\nattach s0 s1", "score"))
    assert alone.peak_stack_tokens == 0


def test_kept_kv_and_head_rows_are_counted():
    schedule = schedule_of(KEPT)
    execute(SEQUENCES, schedule)
    head_starts = [0, *range(10)]  # the first token has no head row
    simulation = verify(TREE, schedule, head_starts)
    assert (simulation.peak_stored_tokens, simulation.peak_live_tokens) == (2 + 1, 3)
    assert (simulation.restored_tokens, simulation.recomputed_tokens) == (2 + 1, 2 + 1 + 3)
    assert (simulation.forward.heads, simulation.backward.heads) == (15 - 2, 9 - 1)
    stored = [event.held.stored for event in interpret(TREE, schedule)]
    assert stored == [2] + [3] * 10 + [2] * 2 + [0] * 3, "until the chunk's graph, which has it, is there"
    again = schedule_of(KEPT.replace("anchor s1[2:3] out kv", "anchor s1[2:3] out kv\n" * 2))
    assert verify(TREE, again).peak_stored_tokens == 2 + 1, "what is kept twice is there once"


# (rule, text of LEGAL that is replaced, by what, the row that is then wrong, what the error got)
ILLEGAL = [
    (
        "slices of a chunk do not overlap",
        "s2[3:4] out",
        "s2[2:4] out",
        "forward  +s0[2:5]+s1[2:4]+s2[2:4] out",
        "+s0[2:5]+s1[2:4]+s2[2:4]",
    ),
    (
        "a branch continues the stack where the chunk starts, or an earlier slice; listed depth-first",
        "+s1[2:4]+s2[3:4] out",
        "+s2[3:4] out",
        "forward  +s0[2:5]+s2[3:4] out",
        "+s0[2:5]+s2[3:4]",
    ),
    (
        "a branch continues the stack where the chunk starts, or an earlier slice; listed depth-first",
        "+s0[2:5]+s1[2:4]+s2[3:4] out",
        "+s1[2:4]+s0[2:5]+s2[3:4] out",
        "forward  +s1[2:4]+s0[2:5]+s2[3:4] out",
        "+s1[2:4]+s0[2:5]+s2[3:4]",
    ),
    (
        "a branch continues the stack where the chunk starts, or an earlier slice; listed depth-first",
        "+s0[2:5]+s1[2:4]+s2[3:4] out",
        "+s0[2:5]+s3[1:2] out",
        "forward  +s0[2:5]+s3[1:2] out",
        "+s0[2:5]+s3[1:2]",
    ),
    (
        "what continues a branch lies in its chunk",
        "+s2[3:4] out",
        " out",
        "forward  +s0[2:5]+s1[2:4] out",
        "1 continuations elsewhere",
    ),
    (
        "what continues a branch lies in its chunk",
        "forward s0[0:2]",
        "forward +s0[0:2]",
        "forward  +s0[0:2]+s3[1:2] out",
        "2 continuations elsewhere",
    ),
    (
        "the stack holds the KV of the tokens above a chunk",
        "forward s0[0:2]+s3[1:2] out",
        "",
        "forward  +s0[2:5]+s1[2:4]+s2[3:4] out",
        "an empty stack",
    ),
    (
        "chunks hold at most chunk_size tokens",
        "forward s0[0:2]+s3[1:2] out",
        "forward s0[0:5]+s1[2:4]+s2[3:4]+s3[1:2] out",
        "forward  s0[0:5]+s1[2:4]+s2[3:4]+s3[1:2] out",
        "9",
    ),
    (
        "slices lie inside their sequence",
        "s3[1:2] out",
        "s3[1:3] out",
        "forward  s0[0:2]+s3[1:3] out",
        "s3[1:3]",
    ),
    (
        "a token has one live graph",
        "attach s0..s3",
        "forward +s0[2:5]\n attach s0..s3",
        "forward  +s0[2:5]",
        "a graph of +s0[2:5]+s1[2:4]+s2[3:4]",
    ),
    (
        "a restore copies from one spine that is kept",
        "attach s0..s3",
        "restore s3[1:2]",
        "restore  s3[1:2]",
        "s0[0:2]+s3[1:2], +s0[2:5]+s1[2:4]+s2[3:4]",
    ),
    (
        "backward consumes the graph of exactly its chunk",
        "backward +s0[2:5]+s1[2:4]+s2[3:4]",
        "backward +s0[2:5]",
        "backward +s0[2:5]",
        "s0[0:2]+s3[1:2], +s0[2:5]+s1[2:4]+s2[3:4]",
    ),
    (
        "backward comes after the attach of all sequences through the chunk",
        "s0..s3",
        "s0..s2",
        "backward s0[0:2]+s3[1:2]",
        "not attached",
    ),
    (
        "backward comes after the backward of everything below",
        "backward +s0[2:5]+s1[2:4]+s2[3:4]\n",
        "",
        "backward s0[0:2]+s3[1:2]",
        "2 open, the last below token 1",
    ),
    (
        "tokens leave the stack only after the backward that their KV gradients wait for",
        "backward s0[0:2]+s3[1:2]\n",
        "",
        "pop      s0[0:2]",
        "a cut to 0 with gradients waiting up to 2",
    ),
]


@pytest.mark.parametrize("rule, old, new, row, got", ILLEGAL, ids=[f"{case[0]}: {case[3]}" for case in ILLEGAL])
def test_illegal_packed_schedules_are_rejected_with_the_row_marked(rule, old, new, row, got):
    assert old in LEGAL
    with pytest.raises(ScheduleError) as error:
        verify(TREE, schedule_of(LEGAL.replace(old, new, 1)))
    assert error.value.what.startswith(f"illegal schedule: {rule}\n")
    (marked,) = (line for line in str(error.value).splitlines() if line.strip().startswith(">>"))
    assert marked.endswith(row)
    assert error.value.expected
    assert error.value.got == got


@pytest.mark.parametrize(
    "old, new, rule",
    [
        ("anchor s1[2:3] out kv", "anchor s1[2:3] out", "a restore copies from one spine that is kept"),
        ("restore s1[0:2]", "restore s1[0:3]", "a restore copies from one spine that is kept"),
        ("restore s1[0:2]", "restore s3[1:2]", "a restore copies from one spine that is kept"),
        ("backward s1[2:3]", "backward s1[2:3]\n restore s1[2:3]", "a restore copies from one spine that is kept"),
        ("restore s1[0:2]\n", "", "the stack holds the KV of the tokens above a chunk"),
        ("restore s1[2:3]\n", "", "the stack holds the KV of the tokens above a chunk"),
        ("restore s1[2:3]\n", "restore s1[2:3]\n pop s1[1:3]\n", "KV gradients wait"),
        ("anchor +s1[3:4]+s2[3:4] out", "anchor +s1[3:4]+s2[3:4] out kv", "KV is kept for a spine"),
    ],
)
def test_what_is_kept_must_be_there(old, new, rule):
    assert old in KEPT
    with pytest.raises(ScheduleError, match=rule):
        verify(TREE, schedule_of(KEPT.replace(old, new, 1)))


@pytest.mark.parametrize("mode", ["score", "streaming"])
def test_kv_is_kept_in_the_transparent_mode_only(mode):
    with pytest.raises(ScheduleError, match="KV is kept for a spine from the first to the second phase"):
        verify(TREE, schedule_of("anchor s0[0:2]+s3[1:2] out kv", mode))
