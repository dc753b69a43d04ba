from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.options import Options
from dta_compile.plan import Chunk, PrefixTree, Segment, Slice, chunk_tree, rectangles, segments
from dta_compile.plan.tree.segments import Rectangle
from tests.support.execution import Tokens, check_attention

# Below 1 2: 3 4 (with 5, 6 7 below it), 8, and at depth 1: 9.
SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 8], [1, 9]]
CHUNK = Chunk(Slice(0, 0, 2), (Slice(0, 2, 4), Slice(0, 4, 5), Slice(1, 4, 6), Slice(2, 2, 3), Slice(3, 1, 2)))


def test_segments_and_rectangles_of_a_packed_chunk():
    parts = segments(PrefixTree.build(SEQUENCES), CHUNK)
    assert parts == [
        Segment(first=0, last=2, end=9, depth=0, parent=-1),
        Segment(first=2, last=4, end=7, depth=2, parent=0),
        Segment(first=4, last=5, end=5, depth=4, parent=1),
        Segment(first=5, last=7, end=7, depth=4, parent=1),
        Segment(first=7, last=8, end=8, depth=2, parent=0),
        Segment(first=8, last=9, end=9, depth=1, parent=0),
    ]
    assert sorted(rectangles(parts), key=lambda r: r.query_first) == [
        Rectangle(query_first=2, query_last=8, key_first=0, key_last=2),  # 3 4 and all below it, and 8
        Rectangle(query_first=4, query_last=7, key_first=2, key_last=4),  # 5 and 6 7 together
        Rectangle(query_first=8, query_last=9, key_first=0, key_last=1),  # hangs from inside the spine
    ]


def test_branches_on_the_stack_have_no_rectangles():
    tree = PrefixTree.build([[1, 2], [1, 3, 4], [1, 5]])
    parts = segments(tree, Chunk(None, (Slice(0, 1, 2), Slice(1, 1, 3), Slice(2, 1, 2))))
    assert [(part.parent, part.depth, part.end) for part in parts] == [(-1, 1, 1), (-1, 1, 3), (-1, 1, 4)]
    assert rectangles(parts) == []


@settings(max_examples=150)
@given(st.data())
def test_squares_rectangles_and_prefix_are_the_pairs_of_the_tree_each_once(batches, data):
    sequences, strategy = data.draw(batches), data.draw(st.sampled_from(["packed", "packed", "dfs", "dense"]))
    tree, tokens = PrefixTree.build(sequences, share=strategy != "dense"), Tokens(sequences, strategy != "dense")
    chunk_size = data.draw(st.sampled_from([1, 3, 4, 7, 12, 1000]))
    for chunk in chunk_tree(tree, Options(strategy=strategy, chunk_size=chunk_size)).chunks:
        parts = segments(tree, chunk)
        check_attention(tokens, chunk, parts)
        inside = [token for part in chunk.slices for token in tokens.of(part)]
        for part in parts:
            below = {token for key in inside[part.first : part.last] for token in tokens.below[key]}
            assert below.intersection(inside[part.last : part.end]) == set(inside[part.last : part.end])
            assert not below.intersection(inside[part.end :])
        hanging = {(part.parent, part.depth) for part in parts if part.parent >= 0}
        assert len(rectangles(parts)) == len(hanging), "all that hangs from one token goes in one kernel"
