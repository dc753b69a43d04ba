"""The growing prefix tree: what it counts, and that it never keeps more nodes than it needs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dta_compile.plan import PrefixTree
from dta_compile.rollouts.trie import Trie


def key(tokens):
    return np.array(tokens, np.int32).tobytes()


def nodes(trie):
    """All nodes except the root."""
    stack = list(trie.root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


class Model:
    """A trie beside the sequences that are in it."""

    def __init__(self):
        self.trie, self.sequences, self.ends, self.names = Trie(), {}, {}, iter(range(10**9))

    def insert(self, tokens):
        name = next(self.names)
        fork = self.trie.find(key(tokens))
        prefixes = {tuple(s[:n]) for s in self.sequences.values() for n in range(len(s) + 1)} | {()}
        assert fork.shared == max(n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in prefixes)
        self.sequences[name], self.ends[name] = tokens, self.trie.insert(name, key(tokens), fork)
        return name

    def remove(self, name):
        del self.sequences[name]
        self.trie.remove(name, self.ends.pop(name))

    def segments(self):
        return sorted(np.frombuffer(node.segment, np.int32).tolist() for node in nodes(self.trie))

    def check(self):
        made = list(nodes(self.trie))
        assert self.trie.tokens == PrefixTree.build(list(self.sequences.values())).num_rows
        assert self.trie.tokens * 4 == sum(len(node.segment) for node in made)
        for name, tokens in self.sequences.items():
            assert self.trie.key(self.ends[name]) == key(tokens)
            assert name in self.ends[name].ending
        assert sum(len(node.ending) for node in [self.trie.root, *made]) == len(self.sequences)
        for node in made:
            assert node.parent.children[node.segment[:4]] is node
            assert node.stop - node.parent.stop == len(node.segment) // 4
            assert node.ending or len(node.children) > 1, "neighbours are joined"


@given(st.data())
def test_insertions_and_removals_in_any_order(batches, data):
    model = Model()
    for tokens in [*data.draw(batches), *data.draw(batches)]:
        model.insert(tokens)
        while model.sequences and data.draw(st.booleans()):
            model.remove(data.draw(st.sampled_from(list(model.sequences))))
        model.check()
    for name in list(model.sequences):
        model.remove(name)
    model.check()
    assert not list(nodes(model.trie))


def test_a_path_whose_branches_have_left_is_one_node_again():
    model, base = Model(), list(range(50))
    model.insert(base)
    branches = [model.insert([*base[:n], 99]) for n in range(50)]
    assert len(model.segments()) == 100
    for name in branches:
        model.remove(name)
    assert model.segments() == [base]
