import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.options import CHOICES, Options
from dta_compile.plan import Chunk, PrefixTree, Slice, chunk_tree
from dta_compile.plan.tree.chunk_tree import pack
from tests.support.execution import Tokens
from tests.support.units import with_units

CHUNK_SIZES = [1, 2, 3, 7, 12, 1000]


def packed(sequences, chunk_size, order="backward_dfs"):
    return pack(PrefixTree.build(sequences), chunk_size, order)[0]


@settings(max_examples=150)
@given(st.data())
def test_chunks_partition_the_tree_and_continue_the_spine_of_their_parent(batches, data):
    sequences, units = with_units(data.draw(batches), data.draw(st.sampled_from([1, 2, 1000, 1000])))
    strategy = data.draw(st.sampled_from(["packed", "packed", "dfs", "vanilla", "dense"]))
    share, chunk_size = strategy != "dense", data.draw(st.sampled_from(CHUNK_SIZES))
    options = Options(strategy=strategy, chunk_size=chunk_size, order=data.draw(st.sampled_from(CHOICES["order"])))
    chunks, tokens = chunk_tree(PrefixTree.build(sequences, share, units), options), Tokens(sequences, share)
    held = [[token for part in chunk.slices for token in tokens.of(part)] for chunk in chunks.chunks]
    assert Counter(token for inside in held for token in inside) == dict.fromkeys(tokens.above, 1)
    longest = max((last - first for pairs in units for first, last in pairs.tolist()), default=1)
    assert max(map(len, held), default=0) <= max(chunk_size, longest)
    for chunk in chunks.chunks:
        for part in chunk.slices:
            pairs = units[part.sequence]
            assert not any(first < depth < last for first, last in pairs.tolist() for depth in (part.start, part.stop))
    for position, (chunk, parent) in enumerate(zip(chunks.chunks, chunks.parent, strict=True)):
        path = tokens.paths[chunk.slices[0].sequence]
        if chunk.start:
            assert parent > position
            assert path[chunk.start - 1] in tokens.of(chunks.chunks[parent].spine)
        else:
            assert parent == -1


@settings(max_examples=150)
@given(st.data())
def test_a_packed_chunk_has_one_open_path_and_whole_nodes(batches, data):
    sequences, chunk_size = data.draw(batches), data.draw(st.sampled_from(CHUNK_SIZES))
    tree, tokens = PrefixTree.build(sequences), Tokens(sequences)
    chunk_of = {}
    for chunk in packed(sequences, chunk_size):
        inside = [token for part in chunk.slices for token in tokens.of(part)]
        chunk_of |= dict.fromkeys(inside, chunk)
        open_tokens = {token for token in inside if not set(inside).issuperset(tokens.below[token])}
        assert open_tokens <= set(tokens.of(chunk.spine) if chunk.spine else [])
        assert not chunk.spine or tokens.of(chunk.spine)[-1] in open_tokens, "a spine is not longer than it must be"
    for start, stop, sequence in zip(tree.start, tree.stop, tree.sequence, strict=True):
        pieces = {chunk_of[token] for token in tokens.paths[sequence][start:stop]}
        assert len(pieces) == -(-(stop - start) // chunk_size), "as few cuts as can be, none in a node that fits"


def fewest_chunks(tree, chunk_size):
    """Of all partitions of the nodes into chunks that are legal, the smallest, by trying every one."""
    parent, sizes = tree.parent.tolist(), (tree.stop - tree.start).tolist()
    paths = []
    for node, above in enumerate(parent):
        paths.append([*(paths[above] if above >= 0 else []), node])

    def legal(chunk):
        hangs_from = {parent[node] for node in chunk} - set(chunk)
        continued = {parent[node] for node in range(len(parent)) if node not in chunk}
        deepest = max((paths[node] for node in chunk if node in continued), key=len, default=[])
        on_one_path = all(node in deepest for node in chunk if node in continued)
        return sum(sizes[node] for node in chunk) <= chunk_size and len(hangs_from) == 1 and on_one_path

    return min(len(chunks) for chunks in _partitions(len(parent)) if all(map(legal, chunks)))


def _partitions(count):
    if not count:
        yield []
        return
    for groups in _partitions(count - 1):
        yield [*groups, [count - 1]]
        for k, group in enumerate(groups):
            yield [*groups[:k], [*group, count - 1], *groups[k + 1 :]]


def test_the_number_of_chunks_is_the_best_possible_on_small_trees():
    generator, over = random.Random(0), Counter()
    while over.total() < 200:
        sequences = [[]]
        for _ in range(generator.randint(2, 6)):
            base = generator.choice(sequences)
            tail = [generator.randrange(3) for _ in range(generator.randint(1, 9))]
            sequences.append(base[: generator.randint(0, len(base))] + tail)
        tree = PrefixTree.build(sequences)
        if 4 <= len(tree.stop) <= 8:
            longest = int((tree.stop - tree.start).max())
            chunk_size = longest + generator.randint(0, 8)
            over[len(pack(tree, chunk_size)[0]) - fewest_chunks(tree, chunk_size)] += 1
    assert over.keys() <= {0, 1}
    assert over[0] >= 0.95 * over.total()


def test_subtrees_siblings_and_what_is_above_them():
    sequences = [[1, 2, 2, 3, 3], [1, 2, 2, 4, 4], [1, 5, 5, 6, 6], [1, 5, 5, 7, 7], [1, 9]]
    assert [str(chunk) for chunk in packed(sequences, 1000)] == ["+s0[0:5]+s1[3:5]+s2[1:5]+s3[3:5]+s4[1:2]"]
    assert [str(chunk) for chunk in packed(sequences, 4)] == [
        "+s0[3:5]+s1[3:5]",
        "s0[1:3]+s4[1:2]",
        "+s2[3:5]+s3[3:5]",
        "s2[0:3]",
    ]


def test_without_sharing_it_is_sequence_packing():
    """Best fit decreasing: 6 + 4 and 5 + 3 + 2."""
    lengths = [2, 6, 3, 4, 5]
    chunks = packed([[n] * length for n, length in enumerate(lengths)], 10)
    assert sorted(chunk.tokens for chunk in chunks) == [10, 10]
    assert all(chunk.spine is None for chunk in chunks)
    slices = [part for chunk in chunks for part in chunk.slices]
    assert sorted(slices, key=lambda part: part.sequence) == [Slice(n, 0, length) for n, length in enumerate(lengths)]


def test_long_nodes_are_cut():
    assert packed([[7] * 10], 4) == [Chunk(None, (Slice(0, 6, 10),)), Chunk(Slice(0, 2, 6)), Chunk(Slice(0, 0, 2))]
    # What is left of the trunk joins the short branch that hangs from its end.
    assert [str(chunk) for chunk in packed([[7] * 9 + [1] * 3, [7] * 9 + [2]], 4)] == [
        "+s0[9:12]+s1[9:10]",
        "s0[5:9]",
        "s0[1:5]",
        "s0[0:1]",
    ]


@pytest.mark.parametrize("order", CHOICES["order"])
def test_deep_chains_and_wide_fans_in_bounded_time(order):
    chain = [[0] * n + [1] * (n % 5) for n in range(1, 3000)]
    fan = [[1] * 20 + [n] * (1 + n % 60) for n in range(5000)]
    for sequences in (chain, fan):
        tree = PrefixTree.build(sequences)
        started = time.perf_counter()
        chunks, _ = pack(tree, 64, order)
        assert time.perf_counter() - started < 5
        assert len(chunks) <= 1.02 * tree.num_rows / 64 + 1
