"""Plans as files for trace viewers: what they show adds up to what the plan says."""

import json

import pytest

from dta_compile.data import bundled, load_rollouts
from dta_compile.plan import plan
from dta_compile.plan.timeline import op_name

SEQUENCES = [rollout.tokens for rollout in load_rollouts(bundled())]
BYTES = {"bytes_per_token": 100, "kv_bytes_per_token": 8}
CASES = [
    {},
    {"strategy": "dfs", "chunk_size": 64, "memory_budget": 0},
    {"strategy": "packed", "chunk_size": 128, "memory_budget": 200_000, **BYTES},
    {"mode": "streaming", "strategy": "vanilla"},
    {"mode": "score"},
]


def events_of(made, path):
    made.to_chrome_trace(path / "trace.json")
    return json.loads((path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("options", CASES)
def test_a_prediction_adds_up_to_the_plan(options, tmp_path):
    made = plan(SEQUENCES, **options)
    events = events_of(made, tmp_path)
    ops = [one for one in events if one["ph"] in "Xi"]
    assert [one["args"]["op"] for one in ops] == str(made.schedule).splitlines()[1:]
    assert sum(one.get("dur", 0) for one in ops) / 1e6 == pytest.approx(made.estimates.seconds, abs=1e-7 * len(ops))
    for amount in ("tokens", "pairs", "launches"):
        total = getattr(made.simulation.forward, amount) + getattr(made.simulation.backward, amount)
        assert sum(one["args"].get(amount, 0) for one in ops) == total
    ends = [0.0, *(one["ts"] + one.get("dur", 0) for one in ops)]
    assert all(end <= one["ts"] for end, one in zip(ends, ops, strict=False))
    highest = {}
    for one in events:
        if one["ph"] == "C":
            highest[one["name"]] = max(highest.get(one["name"], 0), one["args"]["value"])
    stats = made.stats
    assert highest["stack tokens"] == stats.peak_stack_tokens
    assert (highest["live tokens"], highest["stored tokens"]) == (stats.peak_live_tokens, stats.peak_stored_tokens)
    assert ("live bytes" in highest) == ("bytes_per_token" in options)


def test_names_are_short_and_say_what_runs():
    made = plan(SEQUENCES, chunk_size=256, strategy="dfs", memory_budget=0)
    names = [op_name(op) for op in made.schedule.ops]
    assert max(map(len, names)) < 60
    assert {name.split()[0] for name in names} == {"anchor", "attach", "forward", "backward", "pop"}


def test_nothing_to_run_is_a_trace_too(tmp_path):
    assert [one["ph"] for one in events_of(plan([]), tmp_path)].count("M") == 3


@pytest.mark.parametrize("sequences", [SEQUENCES, [[1, 2], [1, 2, 3], [4], [], [4]], []])
def test_speedscope_has_the_tokens_of_every_segment(sequences, tmp_path):
    made = plan(sequences)
    made.to_speedscope(tmp_path / "tree.json")
    found = json.loads((tmp_path / "tree.json").read_text())
    once, often = found["profiles"]
    assert once["endValue"] == made.stats.tree_tokens and often["endValue"] == made.stats.tokens
    for profile in found["profiles"]:
        path, last = [], 0
        for event in profile["events"]:
            assert event["at"] >= last
            last = event["at"]
            if event["type"] == "O":
                path.append(event["frame"])
            else:
                assert path.pop() == event["frame"]
        assert not path
    assert len(found["shared"]["frames"]) == len(made.tree)


def test_a_deep_chain_is_written_at_once(tmp_path):
    made = plan([list(range(n)) for n in range(1, 3000)])
    made.to_speedscope(tmp_path / "tree.json")
    assert (tmp_path / "tree.json").stat().st_size < 1_000_000


def test_scalars_are_numbers_with_flat_names():
    made = plan(SEQUENCES)
    found = made.scalars()
    assert all(name.startswith("dta/") and type(value) is float for name, value in found.items())
    assert found["dta/compression"] == made.stats.compression
    assert "dta/seconds" not in found
    made.estimates.measured_seconds = 0.5
    assert made.scalars()["dta/tokens_per_second"] == made.stats.tokens / 0.5
