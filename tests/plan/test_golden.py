"""Listings of a tree of three leaves, as every strategy runs it in every mode, word for word."""

import pytest

from dta_compile.options import Options
from dta_compile.plan import PrefixTree, Schedule, build_schedule, verify

TREE = PrefixTree.build([[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 7]])

GOLDEN = {
    ("vanilla", "score", None): """
anchor   s2[0:1] out
anchor   s2[1:2] out
pop      s2[1:2]
anchor   s1[1:3] out
anchor   s1[3:4] out
pop      s1[3:4]
anchor   s0[3:5] out
pop      s0[0:5]
attach   s0..s2
""",
    ("vanilla", "transparent", 0): """
anchor   s2[0:1] out
anchor   s2[1:2] out
pop      s2[1:2]
anchor   s1[1:3] out
anchor   s1[3:4] out
pop      s1[3:4]
forward  s0[3:5] out
attach   s0..s2
backward s0[3:5]
pop      s0[3:5]
forward  s1[3:4]
backward s1[3:4]
pop      s1[3:4]
forward  s1[1:3]
backward s1[1:3]
pop      s1[1:3]
forward  s2[1:2]
backward s2[1:2]
pop      s2[1:2]
forward  s2[0:1]
backward s2[0:1]
pop      s2[0:1]
""",
    ("vanilla", "transparent", None): """
forward  s2[0:1] out
forward  s2[1:2] out
pop      s2[1:2]
forward  s1[1:3] out
forward  s1[3:4] out
pop      s1[3:4]
forward  s0[3:5] out
attach   s0..s2
backward s0[3:5]
pop      s0[3:5]
backward s1[3:4]
backward s1[1:3]
pop      s1[1:3]
backward s2[1:2]
backward s2[0:1]
pop      s2[0:1]
""",
    ("vanilla", "streaming", None): """
forward  s2[0:1] out
forward  s1[1:3] out
forward  s0[3:5] out
attach   s0
backward s0[3:5]
pop      s0[3:5]
forward  s1[3:4] out
attach   s1
backward s1[3:4]
pop      s1[3:4]
backward s1[1:3]
pop      s1[1:3]
forward  s2[1:2] out
attach   s2
backward s2[1:2]
pop      s2[1:2]
backward s2[0:1]
pop      s2[0:1]
""",
    ("dfs", "score", None): """
anchor   s2[0:2] out
pop      s2[1:2]
anchor   s1[1:2] out
anchor   s1[2:4] out
pop      s1[3:4]
anchor   s0[3:5] out
pop      s0[0:5]
attach   s0..s2
""",
    ("dfs", "transparent", 0): """
anchor   s2[0:2] out
pop      s2[1:2]
anchor   s1[1:2] out
anchor   s1[2:4] out
pop      s1[3:4]
forward  s0[3:5] out
attach   s0..s2
backward s0[3:5]
pop      s0[3:5]
forward  s1[2:4]
backward s1[2:4]
pop      s1[2:4]
forward  s1[1:2]
backward s1[1:2]
pop      s1[1:2]
forward  s2[0:2]
backward s2[0:2]
pop      s2[0:2]
""",
    ("dfs", "transparent", None): """
forward  s2[0:2] out
pop      s2[1:2]
forward  s1[1:2] out
forward  s1[2:4] out
pop      s1[3:4]
forward  s0[3:5] out
attach   s0..s2
backward s0[3:5]
pop      s0[3:5]
backward s1[2:4]
pop      s1[2:3]
backward s1[1:2]
pop      s1[1:2]
backward s2[0:2]
pop      s2[0:1]
""",
    ("dfs", "streaming", None): """
anchor   s0[0:1] out
anchor   s0[1:3] out
forward  s0[3:5] out
attach   s0
backward s0[3:5]
pop      s0[3:5]
forward  s1[2:4] out
attach   s1
backward s1[2:4]
pop      s1[2:4]
forward  s1[1:2]
backward s1[1:2]
pop      s1[1:2]
forward  s2[0:2] out
attach   s2
backward s2[0:2]
pop      s2[0:2]
""",
    ("dense", "score", None): """
anchor   s2[0:2] out
pop      s2[0:2]
anchor   s1[0:2] out
anchor   s1[2:4] out
pop      s1[0:4]
anchor   s0[0:1] out
anchor   s0[1:3] out
anchor   s0[3:5] out
pop      s0[0:5]
attach   s0..s2
""",
    ("dense", "transparent", 0): """
anchor   s2[0:2] out
pop      s2[0:2]
anchor   s1[0:2] out
anchor   s1[2:4] out
pop      s1[0:4]
anchor   s0[0:1] out
anchor   s0[1:3] out
forward  s0[3:5] out
attach   s0..s2
backward s0[3:5]
pop      s0[3:5]
forward  s0[1:3]
backward s0[1:3]
pop      s0[1:3]
forward  s0[0:1]
backward s0[0:1]
pop      s0[0:1]
anchor   s1[0:2]
forward  s1[2:4]
backward s1[2:4]
pop      s1[2:4]
forward  s1[0:2]
backward s1[0:2]
pop      s1[0:2]
forward  s2[0:2]
backward s2[0:2]
pop      s2[0:2]
""",
    ("dense", "transparent", None): """
forward  s2[0:2] out
pop      s2[0:2]
forward  s1[0:2] out
forward  s1[2:4] out
pop      s1[0:4]
forward  s0[0:1] out
forward  s0[1:3] out
forward  s0[3:5] out
attach   s0..s2
backward s0[3:5]
pop      s0[3:5]
backward s0[1:3]
pop      s0[1:3]
backward s0[0:1]
pop      s0[0:1]
restore  s1[0:2]
backward s1[2:4]
backward s1[0:2]
pop      s1[0:2]
backward s2[0:2]
""",
    ("dense", "streaming", None): """
anchor   s0[0:1] out
anchor   s0[1:3] out
forward  s0[3:5] out
attach   s0
backward s0[3:5]
pop      s0[3:5]
forward  s0[1:3]
backward s0[1:3]
pop      s0[1:3]
forward  s0[0:1]
backward s0[0:1]
pop      s0[0:1]
anchor   s1[0:2] out
forward  s1[2:4] out
attach   s1
backward s1[2:4]
pop      s1[2:4]
forward  s1[0:2]
backward s1[0:2]
pop      s1[0:2]
forward  s2[0:2] out
attach   s2
backward s2[0:2]
pop      s2[0:2]
""",
}


@pytest.mark.parametrize("strategy, mode, keep_tokens", GOLDEN)
def test_listing(strategy, mode, keep_tokens):
    tree = TREE.unshared() if strategy == "dense" else TREE
    schedule = build_schedule(tree, Options(chunk_size=2, strategy=strategy), mode, keep_tokens)
    header, listing = str(schedule).split("\n", 1)
    assert header == f"# dta schedule strategy={strategy} order=backward_dfs mode={mode} chunk_size=2"
    assert listing == GOLDEN[strategy, mode, keep_tokens].strip()
    verify(tree, Schedule.parse(str(schedule)))
