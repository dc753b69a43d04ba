"""One tree over ranks: pieces divide its rows evenly, read what earlier ones compute, and are scheduled in step."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.errors import OptionError, PlanError, ScheduleError
from dta_compile.options import Options
from dta_compile.plan import CostModel, Footprint, Limits, PartBytes, PrefixTree, Schedule, plan, verify
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.one_tree import KeptByParts, deal_out, exchange_seconds, schedule_of
from tests.support.pages import read_page

SEQUENCES = st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=9)
RATES = st.sampled_from([(1.0, 0.0), (1.0, 0.3), (0.0, 1.0)])
AGENT = [[1] * 40 + [2] * 30, [1] * 40 + [2] * 30 + [3] * 9, [1] * 40 + [4] * 17, [1] * 40 + [4] * 17, [], [5]]


def dealt(sequences, ranks, most, rates=(1.0, 0.0), units=None):
    dealing = Dealing.of(PrefixTree.build(sequences, units=units), ranks, most, rates)
    dealing.check()
    return dealing


def costs_of(dealing, rates):
    total = np.cumsum(np.concatenate([[0.0], rates[0] + rates[1] * (dealing.tree.depths() + 1.0)]))
    return np.diff(total[dealing.bounds]), float(np.diff(total).max(initial=0))


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 6), st.sampled_from([1, 3, 100]), RATES)
def test_pieces_divide_the_rows_evenly(sequences, ranks, most, rates):
    dealing = dealt(sequences, ranks, most, rates)
    tree = dealing.tree
    rows = np.concatenate([dealing.rows(rank) for rank in range(ranks)])
    assert sorted(rows.tolist()) == list(range(tree.num_rows))
    assert sum(dealing.tokens) == tree.num_rows
    pieces, longest = costs_of(dealing, rates)
    of_rounds = pieces.reshape(-1, ranks)
    assert np.ptp(of_rounds, 1).max() <= 2 * longest + 1e-9, "a piece ends at the token nearest to an equal share"
    assert max(dealing.costs) - min(dealing.costs) <= dealing.rounds * 2 * longest + 1e-9
    if not rates[1]:
        assert np.ptp(dealing.tokens) <= 2, "ranks have equally many tokens where these cost the same"
    assert dealing.rounds == 1 or np.diff(dealing.bounds).min() > 0, "every rank takes part in every round"


@settings(max_examples=50, deadline=None)
@given(SEQUENCES, st.integers(1, 5), st.sampled_from([1, 3, 100]))
def test_a_piece_reads_one_path_of_earlier_pieces(sequences, ranks, most):
    dealing = dealt(sequences, ranks, most)
    parents = np.arange(-1, dealing.tree.num_rows - 1)
    ends = dealing.tree.row + dealing.tree.stop - dealing.tree.start - 1
    parents[dealing.tree.row] = np.where(dealing.tree.parent < 0, -1, ends[dealing.tree.parent])
    traffic = np.zeros_like(dealing.traffic)
    for number, rank in np.ndindex(dealing.rounds, ranks):
        (start, stop), above = dealing.piece(rank, number), dealing.above(rank, number)
        needed = set()
        for row in range(start, stop):
            while (row := int(parents[row])) >= 0:
                needed.add(row)
        assert needed - set(range(start, stop)) == set(above.tolist())
        assert (dealing.owners(above) < number * ranks + dealing.place(rank, number)).all()
        for source in dealing.holders_of(above):
            traffic[number, rank, source] += source != rank
        top, first = dealing.tops[number], dealing.of_top(rank, number)
        assert (above[:first] == top[:first]).all() and not set(top[first:].tolist()) & set(above.tolist())
    assert (dealing.traffic == traffic).all()
    assert dealing.received == traffic.sum((0, 2)).tolist()


def test_units_are_never_cut():
    units = [np.array([[2, 7], [9, 12]])] * 2
    for ranks, most in ((2, 3), (3, 100), (9, 1)):
        dealing = dealt([[1] * 12, [1] * 12 + [2, 3]], ranks, most, units=units)
        assert not {3, 4, 5, 6, 10, 11} & set(dealing.bounds.tolist())
    with pytest.raises(PlanError, match="cuts tokens"):
        dataclasses.replace(dealing, bounds=np.array([0, 4, *[14] * 8])).check()


def test_bounds_that_do_not_divide_a_tree_are_named():
    dealing = dealt(AGENT, 3, 100)
    for bounds in ([0, 5, 3, dealing.tree.num_rows], [0, 5, 9, 10], [1, 5, 9, dealing.tree.num_rows]):
        with pytest.raises(PlanError, match="do not divide"):
            dataclasses.replace(dealing, bounds=np.array(bounds)).check()


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 5), st.integers(1, 12), st.sampled_from([None, 0, 30]), st.booleans())
def test_schedules_parse_back_and_ranks_are_in_step(sequences, ranks, chunk_size, budget, scores):
    mode = "score" if scores else "transparent"
    known = {"chunk_size": chunk_size, "memory_budget": budget, "bytes_per_token": 2.0, "mode": mode}
    plans = [plan(sequences, ranks=ranks, rank=rank, **known) for rank in range(ranks)]
    for of_rank in plans:
        schedule, dealing = of_rank.schedule, of_rank.dealing
        assert Schedule.parse(str(schedule)) == schedule
        verify(of_rank.prefix_tree, schedule, dealing=dealing, rank=of_rank.rank)
        assert of_rank.stats.tree_tokens == sum(dealing.tokens)
        assert of_rank.simulation.forward.tokens >= dealing.tokens[of_rank.rank]
    steps = {tuple(type(op) for op in of_rank.schedule.ops) for of_rank in plans if of_rank.schedule.chunks}
    assert len(steps) <= 1, "ranks with pieces run the same kinds of ops"


RULES = {
    "runs the pieces of rank 1": lambda lines: lines[:1] + lines[2:],
    "not kept on a stack": lambda lines: [*lines, "restore  s0[0:1]"],
    "after the attach of all": lambda lines: [line.replace("s0..s5", "s0..s4") for line in lines],
    "every token is backpropagated": lambda lines: lines[:4],
    "no graph is live": lambda lines: lines[:-1],
    "states of a piece are exchanged": lambda lines: [line.replace(" out", " out kv") for line in lines],
    "states of earlier rounds": lambda lines: lines[:4] + lines[5:],
    "gradients that later rounds have": lambda lines: [*lines[:5], lines[7], lines[8], lines[5], lines[6]],
    "chunks of the first": lambda lines: [*lines, "forward  s0[0:1]"],
}


@pytest.mark.parametrize("rule", RULES)
def test_a_schedule_that_breaks_a_rule_is_named(rule):
    made = plan(AGENT, ranks=2, rank=1, chunk_size=30, memory_budget=0)
    lines = str(made.schedule).splitlines()
    kinds = " ".join(line.split()[0] for line in lines[1:])
    assert kinds == "anchor anchor attach anchor forward backward forward backward"
    with pytest.raises(ScheduleError, match=rule):
        verify(made.prefix_tree, Schedule.parse("\n".join(RULES[rule](lines))), dealing=made.dealing, rank=1)


def test_what_a_plan_over_ranks_says(tmp_path):
    made = plan(AGENT, ranks=3, rank=1, chunk_size=20, kv_bytes_per_token=8)
    dealing, tokens = made.dealing, made.stats.tree_tokens
    assert f"{tokens} tokens run in all = tokens of the tree; 3 ranks in 2 rounds" in str(made).replace("\n", " ")
    known = made.scalars()
    assert (known["dta/ranks"], known["dta/rank_tokens"]) == (3, dealing.tokens[1])
    assert known["dta/rank_imbalance"] == pytest.approx(1, abs=0.1)
    made.to_html(tmp_path / "page.html")
    page = read_page(tmp_path / "page.html")
    of_rows = np.repeat(page.columns["rankValue"], np.diff(page.columns["rankStart"], append=tokens))
    assert (of_rows == dealing.holders_of(np.arange(tokens))).all()
    assert page.facts["ranks"] == {"count": 3, "own": 1, "rounds": 2}
    assert page.columns["forwardsValue"].tolist() == [1], "every token is run once, by one of the ranks"
    made.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["round"] for event in events if "round" in event.get("args", {})] == [0, 1, 1, 0]
    assert any(event.get("args", {}).get("name", "").startswith("rank 1: ") for event in events)


def test_costs_count_attention_and_head_rows():
    path, options = PrefixTree.build([list(range(4000))]), Options(chunk_size=4000)
    of_all = Limits(head_starts=np.arange(4001))
    of_second_half = Limits(head_starts=np.maximum(np.arange(4001) - 2000, 0))
    by_attention, by_heads = (deal_out(path, options, known, "score", 2)[0] for known in (of_all, of_second_half))
    assert max(by_attention.imbalance, by_heads.imbalance) < 1.001
    assert 2000 < by_attention.tokens[0] < by_heads.tokens[0]


def test_exchange_is_priced_by_bytes_and_messages():
    """A path of 100 tokens on two ranks: the second reads the first one's tokens in a forward, and sends gradients."""
    parts = (PartBytes(Footprint(kv_token=5.0)),) * 2
    limits = Limits(0, Footprint(kv_token=10.0), parts=parts)
    tree = PrefixTree.build([list(range(100))])
    dealing, _ = deal_out(tree, Options(chunk_size=100), limits, "transparent", 2)
    read = dealing.received[1]
    assert (read, dealing.traffic.tolist()) == (dealing.tokens[0], [[[0, 0], [read, 0]]])
    schedule = schedule_of(dealing, 1, Options(), "transparent", 2, KeptByParts(2))
    seconds = exchange_seconds(dealing, schedule, limits, link=1e3, latency=1.0)
    assert seconds == pytest.approx((1 + 2) * read * 10 / 1e3 + 2 * 2 * 1.0)
    again = schedule_of(dealing, 1, Options(), "transparent", 2)  # both parts go forward twice
    more = exchange_seconds(dealing, again, limits, link=1e3, latency=1.0)
    assert more == pytest.approx((2 + 2) * read * 10 / 1e3 + 3 * 2 * 1.0)
    prompt = PrefixTree.build([[0] * 25 + [number] * 25 for number in range(1, 4)])  # ranks 1, 2 and 3 read it
    dealing, _ = deal_out(prompt, Options(chunk_size=100), limits, "score", 4)
    assert dealing.tops[0].tolist() == list(range(25)) and dealing.traffic[0].sum(0).tolist() == [75, 0, 0, 0]
    sent = exchange_seconds(dealing, schedule_of(dealing, 1, Options(), "score", 2), limits, link=1e3, latency=0.0)
    assert sent == pytest.approx(25 * 10 / 1e3), "each rank passes on what it receives"
    states = dataclasses.replace(limits, footprint=Footprint(kv_token=10.0, state=1.0))
    assert exchange_seconds(dealing, schedule, states, link=1e3, latency=1.0) > seconds, "recurrences run in turn"


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (PlanError, {"ranks": 0}),
        (PlanError, {"ranks": 2, "rank": 2}),
        (PlanError, {"ranks": 2, "mode": "streaming"}),
        (OptionError, {"ranks": 2, "strategy": "dfs"}),
        (OptionError, {"strategy": "one_tree"}),
        (OptionError, {"ranks": 2, "sweep": "chunks"}),
    ],
)
def test_what_does_not_fit_one_tree_is_refused(error, given):
    with pytest.raises(error):
        plan(AGENT, **given)


def test_parts_keep_what_saves_most():
    """Results of attention are small: they are kept of all parts before graphs are, unless attention costs nothing."""
    parts = (PartBytes(Footprint(graph_token=10.0, result_token=1.0)),) * 4
    tree, costs = PrefixTree.build([list(range(1000))]), CostModel()
    without_attention = dataclasses.replace(costs, forward=costs.forward._replace(pair=0.0))

    def kept(budget, cost):
        limits = Limits(budget, Footprint(graph_token=40.0), cost, parts=parts)
        dealing, keeps = deal_out(tree, Options(chunk_size=1000), limits, "transparent", 1)
        assert dealing.rounds == 1
        return keeps

    slow_attention = dataclasses.replace(costs, forward=costs.forward._replace(pair=1e-6))
    assert kept(13_000, slow_attention) == KeptByParts(2, True)  # the last graph is not kept beside others
    assert kept(13_000, without_attention) == KeptByParts(2, False)
    assert kept(3_500, slow_attention) == KeptByParts(1, True)
    assert kept(20_000, slow_attention) == KeptByParts(2, True)
    assert kept(21_000, slow_attention) == KeptByParts(3, True)
    assert kept(30_000, slow_attention) == kept(None, slow_attention) == KeptByParts(4, False)
    assert kept(0, slow_attention) == KeptByParts(1, False)


def test_ranks_have_equally_many_tokens_of_a_long_path():
    """Later tokens cost more, so that pieces of equal cost are shorter the later they are: ranks take them in turn."""
    dealing = dealt([range(4096)], 4, 256, (1.0, 1e-3))
    assert max(dealing.tokens) < 1.01 * 1024 and dealing.imbalance < 1.01
    assert dealing.rounds <= 6 and max(np.diff(dealing.bounds)) <= 256
    assert max(dealing.exported) <= max(dealing.tokens) and max(dealing.most_above) < 4096
