import dataclasses
import random

import pytest

from dta_compile.options import CHOICES, Options
from dta_compile.plan import (
    KEEP_ALL,
    KEEP_NOTHING,
    Chunk,
    CostModel,
    Footprint,
    Keep,
    PartBytes,
    PrefixTree,
    Schedule,
    Slice,
    Work,
    build_schedule,
    bytes_of_halves,
    choose_keep,
    chunk_tree,
    simulate,
)
from dta_compile.plan.interpret import chunk_work
from tests.support.plans import peak_bytes

COST = CostModel()
# Chunks of 4, first backward first: +s0[3:5]+s1[3:5], s0[1:3]+s4[1:2], +s2[3:5]+s3[3:5], s2[0:3].
TREE = PrefixTree.build([[1, 2, 2, 3, 3], [1, 2, 2, 4, 4], [1, 5, 5, 6, 6], [1, 5, 5, 7, 7], [1, 9]])
OPTIONS = Options(strategy="packed", chunk_size=4)


def kept(budget, footprint, tree=TREE, options=OPTIONS, cost=COST):
    return choose_keep(tree, options, chunk_tree(tree, options), budget, footprint, cost)


def test_footprint():
    footprint = Footprint(10, 3, 2, working={"forward": ((5, 1, 0), (0, 2, 4))})
    assert footprint.graph(Work(tokens=7, heads=4)) == 7 * 10 + 4 * 3
    assert footprint.kv(Chunk(Slice(0, 2, 5), (Slice(1, 3, 9),))) == 3 * 2, "branches leave no KV"
    assert footprint.kv(Chunk(None, (Slice(1, 3, 9),))) == 0
    assert [footprint.while_running("forward", Work(tokens=n, heads=1)) for n in (0, 3)] == [5, 10]
    assert footprint.while_running("backward", Work(tokens=3)) == 0, "not known"


def test_without_budget_all_is_kept_and_with_none_nothing():
    footprint = Footprint(graph_token=100, kv_token=1)
    assert kept(None, footprint) is KEEP_ALL
    assert kept(0, footprint) == KEEP_NOTHING
    assert kept(10**6, footprint) == Keep(frozenset({1, 2, 3})), "all but the first chunk, whose graph is free"


def test_kv_comes_first_where_it_saves_more_per_byte():
    # The spine of the last chunk is all that the second phase runs again for others.
    assert kept(3, Footprint(graph_token=100, kv_token=1)) == Keep(frozenset(), kv=frozenset({3}))
    assert kept(299, Footprint(graph_token=100, kv_token=1)) == Keep(frozenset(), kv=frozenset({3}))
    assert kept(300, Footprint(graph_token=100, kv_token=1)) == Keep(frozenset({3})), "the graph takes the KV's place"
    assert kept(50, Footprint(graph_token=100, kv_token=0)) == KEEP_NOTHING
    # Where KV is nearly as large as the graph, the graph saves more: the chunk's own forward as well.
    assert kept(300, Footprint(graph_token=100, kv_token=99)).graphs == {3}


def test_a_graph_does_not_count_on_kv_that_did_not_fit():
    # The spine s1[0:2] is put back twice, once for each of two chunks; its KV takes 120 bytes, its graph 200.
    tree = PrefixTree.build([[1, 0], [1, 1, 1, 0, 0], [0]])
    options = Options(strategy="dfs", chunk_size=3, order="lexicographic")
    footprint = Footprint(graph_token=100, kv_token=60)
    assert str(chunk_tree(tree, options).chunks[3]) == "s1[0:2]"
    assert 3 not in kept(100, footprint, tree, options).graphs
    assert kept(120, footprint, tree, options) == Keep(frozenset(), kv=frozenset({3}))
    assert 3 in kept(200, footprint, tree, options).graphs


def random_trees(count):
    generator = random.Random(0)
    for _ in range(count):
        sequences = [[]]
        for _ in range(generator.randint(2, 9)):
            base = generator.choice(sequences)
            tail = [generator.randrange(3) for _ in range(generator.randint(1, 12))]
            sequences.append(base[: generator.randint(0, len(base))] + tail)
        strategy = generator.choice(["packed", "packed", "dfs", "vanilla", "dense"])
        order, chunk_size = generator.choice(CHOICES["order"]), generator.choice([2, 3, 5, 9, 20])
        footprint = Footprint(
            graph_token=generator.choice([1, 10, 100]),
            graph_head=generator.choice([0, 5]),
            kv_token=generator.choice([0, 1, 5, 60]),
        )
        tree = PrefixTree.build(sequences, share=strategy != "dense")
        yield tree, Options(strategy=strategy, order=order, chunk_size=chunk_size), footprint


def test_what_is_kept_fits_and_a_larger_budget_is_no_slower():
    for tree, options, footprint in random_trees(300):
        chunks = chunk_tree(tree, options)
        graphs = [footprint.graph(chunk_work(tree, chunk)) for chunk in chunks.chunks]
        best = float("inf")
        for share in (0, 0.05, 0.1, 0.2, 0.4, 0.7, 1):
            budget = int(share * sum(graphs))
            keep = choose_keep(tree, options, chunks, budget, footprint, COST)
            assert not keep.graphs & keep.kv
            held = sum(graphs[k] for k in keep.graphs) + sum(footprint.kv(chunks.chunks[k]) for k in keep.kv)
            assert held <= budget
            seconds = COST.estimate(simulate(tree, build_schedule(tree, options, "transparent", keep, chunks)))
            # Savings are added up chunk by chunk, though spines that are put back together share a launch.
            assert seconds <= 1.05 * best
            best = min(best, seconds)
        assert keep.graphs == set(range(1, len(graphs)))


HEADER = "# dta schedule strategy=packed order=by-hand mode=transparent chunk_size=4"
SCHEDULE = Schedule.parse(f"""{HEADER}
    anchor s0[0:1] out kv
    forward +s0[1:3]+s1[1:2] out
    attach s0 s1
    backward +s0[1:3]+s1[1:2]
    pop s0[0:1]
    restore s0[0:1]
    anchor s0[0:1]
    forward s0[0:1]
    backward s0[0:1]
    pop s0[0:1]
""")
WORKING = {
    "forward_only": ((5, 1, 1), (0, 4, 0)),
    "cache_only": ((8, 1, 100),),  # has no head rows
    "forward": ((0, 20, 0),),
    "backward": ((7, 30, 0),),
}


@pytest.mark.parametrize(
    "footprint, head_starts, peaks",
    [
        # 2 bytes of KV besides a run of 60, or besides a backward of 97 (the graph that it frees is part of that).
        (Footprint(10, 3, 2, working=WORKING), None, (2 + 60, 2 + 97)),
        # KV and a kept graph of three tokens and head rows.
        (Footprint(10, 3, 2), None, (2 + 39, 2 + 39)),
        # Two of these tokens have no head row.
        (Footprint(10, 3, 2), [0, 1, 1, 2, 2], (2 + 33, 2 + 33)),
        (Footprint(1, working={"cache_only": ((50, 1, 1),)}), None, (3, 51)),
        (Footprint(1, working={"forward_only": ((50, 1, 1),)}), None, (52, 3)),
    ],
)
def test_peak_bytes_of_a_schedule_worked_out_by_hand(footprint, head_starts, peaks):
    assert peak_bytes(PrefixTree.build([[1, 2, 3], [1, 4]]), SCHEDULE, footprint, head_starts) == peaks


def test_bytes_of_halves_of_a_sweep_of_stages():
    """Of two parts of which the second has what the first sent, 11 bytes a token, and its own sums of gradients."""
    tree, layer = PrefixTree.build([[1, 2]]), Footprint(10, 3, 2, working={"forward_only": ((5, 0, 0),)})
    text = "anchor s0[0:2] out\npop s0[0:2]\nattach s0\nforward s0[0:2]\nbackward s0[0:2]\npop s0[0:2]"
    schedule = dataclasses.replace(Schedule.parse(f"{HEADER}\n{text}"), sweep="stages")
    parts = [PartBytes(layer, sums=100, sent=11), PartBytes(layer, sums=7)]
    stack, graph, sent = 2 * 2, 2 * 13, 2 * 11
    assert bytes_of_halves(tree, schedule, parts, 2) == (
        sent + stack + 5,
        max(2 * stack + 100 + graph + sent, sent + 2 * stack + 7 + max(graph, sent)),
    )
    reducing = [parts[0], parts[1]._replace(gathered=(0, 0, 1000))]
    assert bytes_of_halves(tree, schedule, reducing, 2)[1] == sent + 1000, "activations are freed by then"
    kept = Schedule.parse(f"{HEADER}\nforward s0[0:2] out\npop s0[0:2]\nattach s0\nbackward s0[0:2]")
    kept = dataclasses.replace(kept, sweep="stages")
    assert bytes_of_halves(tree, kept, parts, 2)[0] == sent + graph + stack + graph, "the first part's graph stays"


def test_a_graph_takes_the_place_of_the_kv_that_was_kept():
    schedule = Schedule.parse(f"{HEADER}\nanchor s0[0:1] out kv\nattach s0\nforward s0[0:1]\nbackward s0[0:1]")
    assert peak_bytes(PrefixTree.build([[1]]), schedule, Footprint(graph_token=60, kv_token=50)) == (50, 60)


def test_a_graph_takes_the_place_of_the_results_of_attention_that_were_kept():
    text = "anchor s0[0:2] out kv results\npop s0[0:2]\nattach s0\nforward s0[0:2]\nbackward s0[0:2]\npop s0[0:2]"
    schedule = dataclasses.replace(Schedule.parse(f"{HEADER}\n{text}"), sweep="stages")
    footprint = Footprint(graph_token=60, kv_token=10, result_token=15)
    assert peak_bytes(PrefixTree.build([[1, 2]]), schedule, footprint) == (2 * 25, 2 * 60)


def test_nothing_runs_in_an_empty_schedule():
    assert peak_bytes(PrefixTree.build([[]]), Schedule.parse(f"{HEADER}\nattach s0"), Footprint()) == (0, 0)
