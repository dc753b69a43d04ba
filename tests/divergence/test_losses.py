"""Where sharing is lost: the cause by name, and a gain that equals what the same batch has without it."""

import dataclasses
import json
import random
import uuid

import numpy as np
import pytest

from dta_compile.cli import main
from dta_compile.data import ReadOptions, Recorded, bundled, read
from dta_compile.divergence import find_losses
from dta_compile.divergence.causes import Difference, align, cause_of_text
from dta_compile.errors import PlanError
from dta_compile.plan import plan
from tests.support.chat import KEEPING, STRIPPING, say, tokenizer, write_lines

SENTENCE = (
    "a tree keeps what rows share and every branch begins where two of them differ so that no token is computed twice "
    "while leaves add gradients to their stem until all have been read once more from last first"
)
WORDS = SENTENCE.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return str(path)


def text(random, size):
    return " ".join(random.choice(WORDS) for _ in range(size))


def talks(system, count=6, turns=3, thinking=False, tools=None, seed=0):
    """Transcripts of two tasks; `system` and `tools` are functions of a number and of random numbers."""
    source = random.Random(seed)
    policy, tasks = text(source, 120), [text(source, 12) for _ in range(2)]
    rows = []
    for number in range(count):
        messages = [say("system", f"{system(number, source)} {policy}"), say("user", tasks[number % 2])]
        for _ in range(turns):
            thought = {"reasoning_content": text(source, source.randint(10, 40))} if thinking else {}
            messages.append(say("assistant", text(source, source.randint(4, 20)), **thought))
            messages.append(say("user", text(source, 8)))
        rows.append({"messages": messages[:-1], **({"tools": tools(source)} if tools else {})})
    return rows


def losses_of(rows, folder, path, template=None):
    found = read(write_lines(path / "talks.jsonl", rows), ReadOptions(folder, template))
    return find_losses(found.sequences, found.tokenizer.decode)


def shuffled_tools(source):
    made = random.Random(9)
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": text(made, 12), "parameters": {}}}
        for i in range(5)
    ]
    return source.sample(tools, len(tools))


@pytest.mark.parametrize(
    ("cause", "system"),
    [
        ("time stamps", lambda i, r: f"Now: 2026-11-{10 + i}T10:{20 + 3 * i}:{11 + 7 * i}Z."),
        ("time stamps", lambda i, r: f"Today is {('Monday', 'Friday')[i % 2]}, March {3 + i}, 2026, {1 + i}:05 PM."),
        ("time stamps", lambda i, r: f"ts={1763867000 + 137 * i}"),
        ("ids and numbers", lambda i, r: f"Session {uuid.UUID(int=r.getrandbits(128))}."),
        ("ids and numbers", lambda i, r: f"Request req_{r.getrandbits(64):x}:"),
        ("ids and numbers", lambda i, r: f"Episode {17 + i}:"),
        ("whitespace", lambda i, r: "Be brief." + " " * (i % 3) + "\n" * (i % 2)),
    ],
)
def test_what_stands_before_the_same_is_named_and_counted(cause, system, folder, tmp_path):
    losses = losses_of(talks(system), folder, tmp_path)
    constant = losses_of(talks(lambda i, r: (system(i, r), "Be brief.")[1]), folder, tmp_path)
    assert losses.causes[0].name == cause
    assert constant.causes == ()
    assert losses.together.tree_tokens == pytest.approx(constant.tree_tokens, rel=0.05)
    assert losses.causes[0].gained > 0.4 * losses.tree_tokens
    (place, *_) = losses.causes[0].examples
    assert place.before.startswith("<|im_start|>system") and place.left != place.right and place.run > 100


def test_thinking_that_the_template_strips_costs_what_keeping_it_saves(folder, tmp_path):
    rows = talks(lambda i, r: "Be brief.", thinking=True, turns=4)
    stripped, kept = (losses_of(rows, folder, tmp_path, template) for template in (STRIPPING, KEEPING))
    assert [cause.name for cause in stripped.causes] == ["stripped thinking"]
    assert stripped.causes[0].tree_tokens == kept.tree_tokens
    assert stripped.causes[0].compression == kept.compression
    assert kept.causes == ()
    assert "<think>" in stripped.causes[0].examples[0].left


def test_the_order_of_tools(folder, tmp_path):
    losses = losses_of(talks(lambda i, r: "Be brief.", tools=shuffled_tools), folder, tmp_path)
    assert losses.causes[0].name == "tool order"
    assert losses.causes[0].gained > 0.3 * losses.tree_tokens


def test_time_stamps_between_trajectories_in_results_of_tools(folder, tmp_path):
    """Turn after turn alike until a tool says when it was called; nothing is lost within a trajectory."""
    payload, rows = text(random.Random(3), 80), []
    for number in range(4):
        result = say("tool", f"called at 10:4{number}:0{number}. {payload}")
        answers = [say("assistant", text(random.Random(9 + number * turn), 9)) for turn in range(2)]
        rows.append({"messages": [say("user", "Look it up."), answers[0], result, answers[1]]})
    losses = losses_of(rows, folder, tmp_path)
    assert [cause.name for cause in losses.causes] == ["time stamps"]
    assert losses.causes[0].places == 3 and "called at" in losses.causes[0].examples[0].before


def test_two_causes_are_told_apart(folder, tmp_path):
    rows = talks(lambda i, r: f"Now: 2026-11-{10 + i} 10:{20 + i}.", thinking=True, turns=4)
    losses = losses_of(rows, folder, tmp_path)
    assert {cause.name for cause in losses.causes} == {"time stamps", "stripped thinking"}
    assert losses.together.gained >= max(cause.gained for cause in losses.causes)


def test_different_answers_to_one_prompt_are_no_loss(folder, tmp_path):
    losses = losses_of(talks(lambda i, r: "Be brief."), folder, tmp_path)
    assert losses.causes == () and losses.together is None


@pytest.mark.parametrize("known", ["turns", "spans", "tokens"])
def test_real_rollouts_of_token_ids_alone(known):
    """Thinking of the bundled rollouts was stripped: by turns and spans, by spans, and by nothing but the tokens."""
    sequences = read(str(bundled())).sequences
    if known != "turns":
        sequences = [dataclasses.replace(one, trajectory=None, turn=None) for one in sequences]
    if known == "tokens":
        sequences = [Recorded(one.tokens) for one in sequences]
    losses = find_losses(sequences)
    assert losses.causes[0].name == "stripped thinking"
    assert losses.causes[0].gained == pytest.approx(2754, rel=0.02)
    assert losses.tree_tokens == plan([one.tokens for one in sequences]).stats.tree_tokens


@pytest.mark.parametrize(
    ("left", "right", "cause"),
    [
        ([], [7, 7, 8], "inserted"),
        ([7, 7, 8], [], "removed"),
        ([7, 7, 8], [9, 9], "replaced"),
        ([5, 6, 7], [7, 6, 5], "order"),
    ],
)
def test_token_ids_tell_causes_by_structure(left, right, cause):
    before, after = list(range(100, 140)), list(range(200, 300))
    losses = find_losses([Recorded([*before, *left, *after]), Recorded([*before, *right, *after, 1])])
    assert [one.name for one in losses.causes] == [cause]
    assert losses.causes[0].gained == len(after) + len(right)


@pytest.mark.parametrize(
    ("left", "right", "cause"),
    [
        ("Cancelled", "Confirmed", "replaced"),
        ("b0fY3 at 10", "Aq7Zx at 11", "ids and numbers"),
        ("aBcDeFgHiJ", "xYzWvUtSrQ", "ids and numbers"),
        ("the same", "the same", "other tokens"),
    ],
)
def test_texts_tell_causes(left, right, cause):
    assert cause_of_text(Difference("", left, right, "")) == cause


def test_a_long_rule_is_classified():
    # A pattern that tries every start of a run of dashes anew takes hours.
    assert cause_of_text(Difference("", "-" * 200_000, "-" * 100_000 + "x", "")) == "replaced"


@pytest.mark.parametrize("sequences", [[], [[]], [[1, 2, 3]], [[1], [1], [1]], [[], [5], []]])
def test_little_to_compare(sequences):
    losses = find_losses([Recorded(one) for one in sequences])
    assert losses.causes == () and losses.sequences == len(sequences)


def test_what_is_no_token_id_is_an_error():
    with pytest.raises(PlanError, match="sequence 1"):
        find_losses([Recorded([1]), Recorded([1 << 70])])


def test_hunks_and_runs_cover_both_sequences():
    source = np.random.default_rng(0)
    for _ in range(50):
        a = source.integers(0, 6, 200)
        b = np.concatenate([a[:40], source.integers(0, 6, source.integers(0, 30)), a[source.integers(40, 90) :]])
        i = j = int(np.argmin(np.append(a[: min(len(a), len(b))] == b[: min(len(a), len(b))], False)))
        for hunk in align(a, b, i):
            assert (hunk.a0, hunk.b0) == (i, j)
            i, j = hunk.a1 + hunk.run, hunk.b1 + hunk.run
            assert np.array_equal(a[hunk.a1 : i], b[hunk.b1 : j])
        assert (i, j) == (len(a), len(b))


def test_the_command_names_the_main_cause(folder, tmp_path, capsys):
    assert main(["why", str(bundled())]) == 0
    out = capsys.readouterr().out
    assert "main cause: stripped thinking. 2,754 of the tokens" in out and "--tokenizer" in out
    path = write_lines(tmp_path / "talks.jsonl", talks(lambda i, r: f"Now: 10:{20 + i}."))
    assert main(["why", path, "--tokenizer", folder]) == 0
    out = capsys.readouterr().out
    assert "main cause: time stamps" in out and "Now: 10:" in out
    assert main(["why", path, "--tokenizer", folder, "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (
        written["causes"][0]["name"] == "time stamps" and written["causes"][0]["compression"] > written["compression"]
    )


def test_the_command_says_when_nothing_is_lost(tmp_path, capsys):
    assert main(["why", write_lines(tmp_path / "ids.jsonl", [[1, 2, 3], [1, 2, 4]])]) == 0
    assert "nothing is lost" in capsys.readouterr().out
