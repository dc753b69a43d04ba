import dataclasses

import pytest

from dta_compile.errors import ScheduleError
from dta_compile.plan import (
    PrefixTree,
    Schedule,
    Simulation,
    Work,
    verify,
)

# s0 and s1 share two tokens, s2 is a prefix of s0, s3 is empty: rows 0-1 shared, 2-4 of s0, 5 of s1.
TREE = PrefixTree.build([[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3], []])
LEGAL = """
    forward s1[0:2] out
    forward s1[2:3] out
    pop s1[2:3]
    forward s0[2:5] out
    attach s0..s3
    backward s0[2:5]
    pop s0[2:5]
    backward s1[2:3]
    backward s1[0:2]
    pop s1[0:2]
"""


def schedule_of(text, mode="transparent", chunk_size=3):
    header = f"# dta schedule strategy=by-hand order=by-hand mode={mode} chunk_size={chunk_size}"
    return Schedule.parse(f"{header}\n{text}")


def test_a_legal_schedule_is_counted():
    work = Work(launches=3, slices=3, tokens=6, pairs=(1 + 2) + 3 + (3 + 4 + 5), heads=6)
    assert verify(TREE, schedule_of(LEGAL)) == Simulation(
        ops=10,
        forward=work,
        backward=work,
        recomputed_tokens=0,
        restored_tokens=0,
        peak_stack_tokens=5,
        peak_live_tokens=6,
        peak_stored_tokens=0,
    )


def test_recomputed_and_restored_tokens_are_counted():
    text = """
        anchor s1[0:2] out
        forward s1[2:3] out
        pop s1[2:3]
        forward s0[2:5] out
        attach s0..s3
        pop s0[2:5]
        restore s1[2:3]
        pop s1[2:3]
        backward s0[2:5]
        backward s1[2:3]
        forward s1[0:2]
        backward s1[0:2]
        pop s1[0:2]
    """
    simulation = verify(TREE, schedule_of(text))
    assert (simulation.forward.tokens, simulation.recomputed_tokens, simulation.restored_tokens) == (8, 2, 1)
    assert simulation.peak_live_tokens == 4


# (rule, text of LEGAL that is replaced, by what, the row that is then wrong, what the error expects, what it got)
ILLEGAL = [
    (
        "slices lie inside their sequence",
        "forward s0[2:5] out",
        "forward s0[2:6] out",
        "forward  s0[2:6] out",
        "part of [0:5]",
        "s0[2:6]",
    ),
    (
        "slices name a sequence of the batch",
        "pop s1[2:3]\n    forward",
        "pop s4[2:3]\n    forward",
        "pop      s4[2:3]",
        "s0..s3",
        "s4[2:3]",
    ),
    (
        "chunks hold at most chunk_size tokens",
        "forward s1[0:2] out\n    forward s1[2:3] out",
        "forward s0[0:5] out",
        "forward  s0[0:5] out",
        "<= 3",
        "5",
    ),
    (
        "the stack holds the KV of the tokens above a chunk",
        "forward s1[0:2] out",
        "",
        "forward  s1[2:3] out",
        "s1[0:2] on the stack",
        "an empty stack",
    ),
    ("pop takes what is on top of the stack", "pop s1[2:3]", "pop s1[1:2]", "pop      s1[1:2]", "s1[..:3]", "s1[1:2]"),
    (
        "a token has one live graph",
        "forward s1[2:3] out",
        "forward s0[1:3] out",
        "forward  s0[1:3] out",
        "no live graph",
        "a graph of s1[0:2]",
    ),
    (
        "a restore copies from one spine that is kept",
        "backward s1[2:3]",
        "restore s0[2:5]",
        "restore  s0[2:5]",
        "kept KV that covers s0[2:5]",
        "s1[0:2], s1[2:3]",
    ),
    (
        "all outputs of a sequence are written before it is attached",
        "forward s1[2:3] out",
        "forward s1[2:3]",
        "attach   s0..s3",
        "outputs of s1[0:3]",
        "none yet of token 2",
    ),
    ("sequences are of the batch", "s0..s3", "s0..s4", "attach   s0..s4", "s0..s3", "s4"),
    ("every sequence is attached once", "s0..s3", "s0..s3 s1", "attach   s0..s3 s1", "s1 not attached yet", ""),
    (
        "backward consumes the graph of exactly its chunk",
        "backward s1[0:2]",
        "backward s0[0:2]",
        "backward s0[0:2]",
        "a graph of s0[0:2]",
        "s1[0:2]",
    ),
    (
        "backward comes after the attach of all sequences through the chunk",
        "s0..s3",
        "s0 s1 s3",
        "backward s0[2:5]",
        "attach of s2 first",
        "not attached",
    ),
    (
        "backward comes after the backward of everything below",
        "backward s1[2:3]\n",
        "",
        "backward s1[0:2]",
        "no open branches below s1[0:2]",
        "1 open, the last below token 1",
    ),
    (
        "tokens leave the stack only after the backward that their KV gradients wait for",
        "backward s1[2:3]\n",
        "pop s0[1:2]\n",
        "pop      s0[1:2]",
        "backward of s0[1:2] first",
        "a cut to 1",
    ),
    (
        "every token is backpropagated once",
        "backward s1[2:3]\n",
        "backward s1[2:3]\n forward s1[2:3]\n",
        "forward  s1[2:3]",
        "tokens before their backward",
        "s1[2:3] is done",
    ),
    ("the stack is empty at the end", "pop s1[0:2]", "", "(end)", "depth 0", "s0[0:2]"),
]


@pytest.mark.parametrize("rule, old, new, row, expected, got", ILLEGAL, ids=[case[0] for case in ILLEGAL])
def test_illegal_schedules_are_rejected_with_the_row_marked(rule, old, new, row, expected, got):
    assert old in LEGAL
    with pytest.raises(ScheduleError) as error:
        verify(TREE, schedule_of(LEGAL.replace(old, new, 1)))
    message = str(error.value)
    assert message.startswith(f"illegal schedule: {rule}\n")
    marked = [line for line in message.splitlines() if line.strip().startswith(">>")]
    assert len(marked) == 1
    assert marked[0].endswith(row)
    assert expected in error.value.expected
    assert got in error.value.got


ONE = PrefixTree.build([[7, 8]])


@pytest.mark.parametrize(
    "text, mode, rule",
    [
        ("forward s0[0:2] out\n attach s0\n pop s0[0:2]", "transparent", "no graph is live at the end"),
        ("anchor s0[0:2] out\n attach s0\n pop s0[0:2]", "transparent", "every token is backpropagated once"),
        ("anchor s0[0:2] out\n pop s0[0:2]", "score", "every sequence is attached once"),
        ("forward s0[0:2] out", "score", "scoring keeps no graphs"),
        ("anchor s0[0:2] out\n attach s0\n backward s0[0:2]", "score", "scoring runs nothing backward"),
        ("anchor s0[0:2] out\n restore s0[0:2]", "transparent", "a restore copies from one spine that is kept"),
        ("anchor s0[0:1] out\n anchor s0[1:3]", "score", "slices lie inside their sequence"),
        ("", "score", "every sequence is attached once"),
        ("attach\n forward s0[0:2] out\n attach s0", "transparent", "outputs are written before the attach"),
        ("anchor s0[0:2] out\n attach\n attach s0", "score", "score mode attaches once"),
    ],
)
def test_short_illegal_schedules(text, mode, rule):
    with pytest.raises(ScheduleError, match=rule):
        verify(ONE, schedule_of(text, mode))


@pytest.mark.parametrize(
    "text, rule",
    [
        ("anchor s0[0:2] out\n attach s0\n pop s0[0:2]", "other parts run between the halves of a sweep of stages"),
        (
            "anchor s0[0:2] out\n pop s0[0:2]\n attach s0\n anchor s0[0:1]\n",
            "the second half of a sweep of stages runs chunks of the first",
        ),
        (
            "anchor s0[0:2]\n anchor s0[0:2] out\n pop s0[0:2]\n attach s0",
            "hands on the hidden states of every token once",
        ),
        ("anchor s0[0:2] out\n" * 2 + "pop s0[0:2]\n attach s0", "hands on the hidden states of every token once"),
    ],
)
def test_halves_of_a_sweep_of_stages(text, rule):
    """What a chunk reads of other parts is there for the chunks of the first half, and the stack is another part's."""
    schedule = schedule_of(text + "\n forward s0[0:2]\n backward s0[0:2]\n pop s0[0:2]")
    with pytest.raises(ScheduleError, match=rule):
        verify(ONE, dataclasses.replace(schedule, sweep="stages"))


RESULTS = "anchor s0[0:2] out results\n pop s0[0:2]\n attach s0\n"
AGAIN = "forward s0[0:2]\n backward s0[0:2]\n pop s0[0:2]"


def test_results_of_attention_are_kept_for_one_forward_of_a_sweep_of_stages():
    """Which has no query-key pairs then; the backward has them."""
    schedule = dataclasses.replace(schedule_of(RESULTS + AGAIN), sweep="stages")
    counts = verify(ONE, schedule)
    assert (counts.forward.pairs, counts.forward.tokens, counts.backward.pairs) == (3, 4, 3)
    with pytest.raises(ScheduleError, match="results of attention are kept from the first to the second half"):
        verify(ONE, dataclasses.replace(schedule, sweep="chunks"))
    text = "anchor s0[0:2] out\n pop s0[0:2]\n attach s0\n anchor s0[0:2] results\n" + AGAIN
    with pytest.raises(ScheduleError, match="results of attention are kept from the first to the second half"):
        verify(ONE, dataclasses.replace(schedule_of(text), sweep="stages"))


def test_gradients_on_the_stack_survive_a_recompute_that_covers_them():
    # The backward of [1:2] leaves a KV gradient at token 0, which `forward s0[0:1]` puts back in its place.
    text = "anchor s0[0:1] out\n forward s0[1:2] out\n attach s0\n backward s0[1:2]\n"
    recompute = "forward s0[0:1]\n backward s0[0:1]\n pop s0[0:1]"
    assert verify(ONE, schedule_of(text + recompute)).recomputed_tokens == 1
    with pytest.raises(ScheduleError, match="KV gradients wait"):
        verify(ONE, schedule_of(text + "pop s0[0:2]\n" + recompute))


def test_a_spine_takes_no_gradients_that_wait_for_others():
    # s0[1:2] and s1[1:2] have the same place on the stack; the gradients that wait there are of s0.
    tree = PrefixTree.build([[0, 1, 2], [0, 3]])
    phase = "forward s0[0:1] out\n forward s1[1:2] out\n forward s0[1:2] out\n forward s0[2:3] out\n attach s0 s1\n"
    end = "backward s0[0:1]\n pop s0[0:3]"
    legal = f"{phase} backward s0[2:3]\n backward s0[1:2]\n backward s1[1:2]\n {end}"
    assert verify(tree, schedule_of(legal)).recomputed_tokens == 0
    with pytest.raises(ScheduleError, match="a spine takes the KV gradients that wait at its place"):
        verify(tree, schedule_of(f"{phase} backward s0[2:3]\n backward s1[1:2]\n backward s0[1:2]\n {end}"))


def test_only_a_window_of_a_long_listing_is_shown():
    rows = "anchor s0[0:1] out\n pop s0[0:1]\n" * 50
    with pytest.raises(ScheduleError) as error:
        verify(ONE, schedule_of(rows + "pop s0[0:1]\n" + rows))
    listing = str(error.value).splitlines()[1:-2]
    assert len(listing) == 13
    assert listing[6].split()[:2] == [">>", "101"]
