import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.errors import ScheduleError
from dta_compile.options import Options
from dta_compile.plan import (
    Anchor,
    CostModel,
    Footprint,
    Forward,
    Limits,
    PartBytes,
    PrefixTree,
    Rates,
    Schedule,
    Work,
    simulate,
    verify,
)
from dta_compile.plan.choice import STRATEGIES, Candidates
from dta_compile.plan.interpret import chunk_work
from dta_compile.plan.schedule import MODES

SHARED = PrefixTree.build([[1] * 20 + [n] * 5 for n in range(8)])
TWICE_SHARED = PrefixTree.build([[1] * 20 + [2 + n // 2] * 12 + [10 + n] * 8 for n in range(8)])
TOKENS_ONLY = CostModel(Rates(0, 0, 1, 0, 0), Rates(0, 0, 2, 0, 0), restore=0, source="by hand")
LAUNCHES_ONLY = CostModel(Rates(1, 0, 0, 0, 0), Rates(1, 0, 0, 0, 0), restore=0, source="by hand")


def choose(*arguments):
    """Return tree and schedule that are chosen, and the reason."""
    best, reason = Candidates(*arguments).choose()
    return best.tree, best.schedule, reason()


def test_cost_is_linear_in_the_work():
    assert Rates(1e4, 1e3, 100, 10, 1).seconds(Work(5, 4, 3, 2, 1)) == 54_321
    cost = CostModel(forward=Rates(0, 0, 1, 0, 0), backward=Rates(3, 0, 0, 0, 0), restore=0.5)
    counts = simulate(*choose(SHARED, Options(strategy="dfs", chunk_size=5), "transparent")[:2])
    assert (counts.forward.tokens, counts.backward.launches) == (60, 12)
    assert cost.estimate(dataclasses.replace(counts, restored_tokens=8)) == 60 + 12 * 3 + 8 * 0.5


rates = st.builds(Rates, *[st.sampled_from([0.0, 1.0, 7.0])] * 5)


@settings(max_examples=150)
@given(st.data())
def test_auto_takes_the_cheapest_candidate_the_first_of_equals(batches, data):
    tree, mode = PrefixTree.build(data.draw(batches)), data.draw(st.sampled_from(MODES))
    chunk_size, budget = data.draw(st.sampled_from([1, 3, 8, 100])), data.draw(st.sampled_from([None, 0, 10, 40]))
    cost = data.draw(st.builds(CostModel, rates, rates, st.sampled_from([0.0, 0.1])))
    limits = Limits(budget, Footprint(kv_token=0.2), cost)
    _, schedule, reason = choose(tree, Options(chunk_size=chunk_size), mode, limits)
    seconds = {}
    for strategy in STRATEGIES:
        asked = Options(strategy=strategy, chunk_size=chunk_size)
        run, candidate, why = choose(tree, asked, mode, limits)
        assert why == "asked for"
        seconds[strategy] = cost.estimate(verify(run, candidate))
    if "vanilla holds" in reason:
        del seconds["vanilla"]
    assert schedule.strategy == min(seconds, key=seconds.__getitem__)


def test_the_reason_tells_the_costs():
    tree, schedule, reason = choose(SHARED, Options(chunk_size=100), "transparent")
    assert (tree, schedule.strategy) == (SHARED, "packed")
    assert reason.startswith("auto, by estimated cost (not calibrated): packed 1.00, dfs 6.")
    assert "dense >= 6." in reason, "not planned, since a bound of its cost rules it out"
    _, schedule, reason = choose(SHARED, Options(chunk_size=8), "streaming", Limits(cost=TOKENS_ONLY))
    assert schedule.strategy == "vanilla", "it forwards nothing again"
    assert reason == "auto, by estimated cost (by hand): packed 1.11, dfs 1.11, vanilla 1.00, dense >= 3.33"


def test_dense_is_taken_where_sharing_costs_more_than_it_saves():
    # The stack must be built for the second branch: a launch more than without sharing, to save one token.
    tree = PrefixTree.build([[8, 0], [8, 1, 7]])
    run, schedule, reason = choose(tree, Options(chunk_size=3), "streaming", Limits(cost=LAUNCHES_ONLY))
    assert (schedule.strategy, run.shared) == ("dense", False)
    assert reason == "auto, by estimated cost (by hand): packed 1.25, dfs 1.25, vanilla 1.50, dense 1.00"


@pytest.mark.parametrize(
    "budget, refusal",
    [
        (None, ""),
        (0, "; vanilla holds graphs of 25 > 8 tokens"),
        (1500, "; vanilla holds graphs of 25 > 15 tokens"),
        (2500, ""),
    ],
)
def test_a_strategy_that_must_hold_more_than_the_budget_is_refused(budget, refusal):
    limits = Limits(budget, Footprint(graph_token=60, graph_head=40), TOKENS_ONLY)
    _, schedule, reason = choose(SHARED, Options(chunk_size=8), "streaming", limits)
    assert schedule.strategy == ("packed" if refusal else "vanilla")
    assert reason.endswith(refusal)
    assert ("holds" in reason) == bool(refusal)


@pytest.mark.parametrize("budget", [0, 100, 400, 10**6])
def test_something_is_always_left_however_few_head_rows_there_are(budget):
    head_starts = np.zeros(SHARED.num_rows + 1, int)
    head_starts[-1] = 1
    limits = Limits(budget, Footprint(graph_token=1, graph_head=19), head_starts=head_starts)
    tree, schedule, _ = choose(SHARED, Options(chunk_size=8), "transparent", limits)
    assert verify(tree, schedule).peak_live_tokens <= budget + 2 * 8


LAYER = PartBytes(Footprint(graph_token=10, kv_token=1), sums=100, sent=1)
WHOLE = Footprint(graph_token=100, kv_token=10)


@pytest.mark.parametrize(
    ("budget", "is_asked_for", "expected"),
    [
        (0, True, "stages"),  # a tenth of the sums and of a chunk's graph, for the hidden states of all tokens
        (200, True, "stages"),
        (10**6, True, "chunks"),  # all is kept, whichever way
        (10**6, False, "chunks"),
        (0, False, "stages"),  # little memory is free
    ],
)
def test_stages_are_swept_where_that_is_cheaper_in_the_same_memory(budget, is_asked_for, expected):
    known = {"sums": 1000, "parts": (LAYER,) * 10, "is_asked_for": is_asked_for}
    limits = Limits(budget, WHOLE, TOKENS_ONLY, **known)
    options = Options(chunk_size=8, strategy="packed")
    tree, schedule, _ = choose(SHARED, options, "transparent", limits)
    assert schedule.sweep == expected
    counts = verify(tree, schedule)
    assert counts.recomputed_tokens <= (0 if expected == "chunks" else tree.num_rows), "no token is run three times"
    for sweep in ("chunks", "stages"):
        asked = dataclasses.replace(options, sweep=sweep)
        assert choose(SHARED, asked, "transparent", limits)[1].sweep == sweep


@pytest.mark.parametrize("sweep", ["auto", "chunks", "stages"])
@pytest.mark.parametrize("strategy", ["auto", "packed"])
def test_a_budget_that_is_asked_for_bounds_the_peak_and_costs_no_time(sweep, strategy):
    """Also where it makes another strategy the cheapest than a budget of zero does."""
    options = Options(strategy=strategy, sweep=sweep)

    def choice(budget, cost):
        sizes = (4, 8, 64) if budget else (4,)  # more are allowed
        known = {"sums": 1000, "parts": (LAYER,) * 10, "is_asked_for": True, "chunk_sizes": sizes}
        return Candidates(TWICE_SHARED, options, "transparent", Limits(budget, WHOLE, cost, **known)).choose()[0]

    for cost in (TOKENS_ONLY, LAUNCHES_ONLY):
        nothing = choice(0, cost)
        for budget in (50, 800, 3000):
            best = choice(budget, cost)
            assert best.peak <= nothing.peak + budget
            assert best.seconds <= nothing.seconds


HEAD = PartBytes(Footprint(graph_token=5, graph_head=45))
WITH_HEAD = {"footprint": Footprint(graph_token=105, graph_head=45), "parts": (LAYER,) * 10 + (HEAD,)}
LAYER_BYTES = 10 * SHARED.num_rows


def kept_by_part(schedule, parts):
    return [sum(isinstance(op, Forward) for op in schedule.of_part(part).halves[0]) for part in range(parts)]


@pytest.mark.parametrize(
    ("budget", "layers"),
    [(0, 0), (LAYER_BYTES - 1, 0), (LAYER_BYTES, 1), (9.5 * LAYER_BYTES, 9), (10 * LAYER_BYTES, 10), (None, 10)],
)
def test_of_a_tree_of_one_chunk_the_last_layers_keep_what_fits(budget, layers):
    """The head's backward comes right after its forward, and no other part runs between."""
    limits = Limits(budget, cost=TOKENS_ONLY, **WITH_HEAD)
    options = Options(chunk_size=SHARED.num_rows, strategy="packed", sweep="stages")
    tree, schedule, _ = choose(SHARED, options, "transparent", limits)
    assert kept_by_part(schedule, 11) == [0] * (10 - layers) + [1] * (layers + 1)
    assert Schedule.parse(str(schedule)) == schedule
    assert verify(tree, schedule).recomputed_tokens == round(tree.num_rows * (10 - layers) / 11)


@pytest.mark.parametrize("layers", range(16))
def test_what_chunks_leave_of_the_budget_the_last_layers_keep(layers):
    limits = Limits(layers * LAYER_BYTES, cost=TOKENS_ONLY, **WITH_HEAD)
    options = Options(chunk_size=11, strategy="packed", sweep="stages")
    tree, schedule, _ = choose(SHARED, options, "transparent", limits)
    verify(tree, schedule)
    chunks, kept = len(schedule.chunks), kept_by_part(schedule, 11)
    assert chunks > 4 and kept[:10] == sorted(kept[:10]) and kept[10]
    tokens = [
        sum(op.chunk.tokens for op in schedule.of_part(part).halves[0] if type(op) is Forward) for part in range(11)
    ]
    free = schedule.chunks[-1].tokens
    held = 10 * sum(tokens[:10]) + 50 * (tokens[10] - free)
    assert limits.budget - LAYER_BYTES < held <= limits.budget or kept[10] == chunks, "less is left than a layer takes"


PAIRS = Rates(0.0, 0.0, 1e-3, 1.0, 0.0)


@pytest.mark.parametrize("budget", range(0, 60 * SHARED.num_rows, 7 * SHARED.num_rows))
def test_results_of_attention_are_kept_where_pairs_are_what_costs(budget):
    """First those of deep tokens, which read most, then all of them, then graphs; never beyond the budget."""
    layer = Footprint(graph_token=25, kv_token=5, result_token=2.5)
    whole = Footprint(graph_token=50, kv_token=10, result_token=5)
    limits = Limits(budget, whole, CostModel(PAIRS, PAIRS), parts=(PartBytes(layer),) * 2)
    options = Options(chunk_size=11, strategy="packed", sweep="stages")
    tree, schedule, _ = choose(SHARED, options, "transparent", limits)
    assert verify(tree, schedule).recomputed_tokens <= tree.num_rows
    assert Schedule.parse(str(schedule)) == schedule
    held, pairs = -layer.graph_token * schedule.chunks[-1].tokens, {True: [], False: []}
    for part in range(2):
        for op in schedule.of_part(part).halves[0]:
            if isinstance(op, Forward):
                held += layer.graph_token * op.chunk.tokens
            elif isinstance(op, Anchor):
                held += layer.results(op.chunk) * op.results + layer.kv(op.chunk) * op.kv
                pairs[op.results].append(chunk_work(tree, op.chunk).pairs / op.chunk.tokens)
    assert held <= budget
    assert bool(pairs[True]) == (0 < budget < 45 * tree.num_rows)
    if budget < 5 * tree.num_rows and pairs[True]:
        assert max(pairs[True]) >= max(pairs[False])


def test_parts_of_a_sweep_of_stages_run_the_same_chunks():
    header = "# dta schedule strategy=packed order=lexicographic mode=score chunk_size=2 sweep=stages"
    one, two = (
        "anchor s0[0:2] out\npop s0[0:2]\nattach s0",
        "anchor s0[0:1] out\nanchor s0[1:2] out\npop s0[0:2]\nattach s0",
    )
    tree = PrefixTree.build([[1, 2]])
    verify(tree, Schedule.parse(f"{header}\n{one}\nparts 0..1 of 9:\n{one}"))
    with pytest.raises(ScheduleError, match="all parts of a sweep of stages run the same chunks"):
        verify(tree, Schedule.parse(f"{header}\n{one}\nparts 0..1 of 9:\n{two}"))


CHAIN = [[1] * 9000]


@pytest.mark.parametrize(("launch", "expected"), [(0.0, 2048), (0.02, 4096), (1.0, 8192)])
def test_chunks_are_as_large_as_launches_are_expensive(launch, expected):
    """Five, three and two chunks of 9,000 tokens, each of which takes a tenth of a millisecond."""
    rates = Rates(launch, 0.0, 1e-4, 0.0, 0.0)
    limits = Limits(cost=CostModel(rates, rates), chunk_sizes=(2048, 4096, 8192))
    _, schedule, reason = choose(PrefixTree.build(CHAIN), Options(strategy="packed"), "transparent", limits)
    assert schedule.chunk_size == expected
    assert ("chunks of" in reason) == (expected > 2048)


def test_a_size_that_is_asked_for_is_taken():
    rates = Rates(1.0, 0.0, 1e-4, 0.0, 0.0)
    limits = Limits(cost=CostModel(rates, rates), chunk_sizes=(2048, 4096, 8192))
    _, schedule, _ = choose(PrefixTree.build(CHAIN), Options(chunk_size=3000), "transparent", limits)
    assert schedule.chunk_size == 3000
