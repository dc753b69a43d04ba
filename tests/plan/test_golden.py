"""Listings of small trees, as every strategy runs them in every mode, word for word."""

import pytest

from dta_compile.options import Options
from dta_compile.plan import KEEP_ALL, KEEP_NOTHING, Keep, PrefixTree, Schedule, build_schedule, verify

TREE = PrefixTree.build([[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 7]])  # chunks of 2
# Two branches that do not fit into one chunk, and a short one; chunks of 4.
PACKED_TREE = PrefixTree.build([[1, 2, 2, 3, 3], [1, 2, 2, 4, 4], [1, 5, 5, 6, 6], [1, 5, 5, 7, 7], [1, 9]])
KEEP = {"all": KEEP_ALL, "nothing": KEEP_NOTHING, "kv": Keep(frozenset(), kv=frozenset({1, 3}))}

GOLDEN = {
    ("vanilla", "score", "nothing"): """
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
    ("vanilla", "transparent", "nothing"): """
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
    ("vanilla", "transparent", "all"): """
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
    ("vanilla", "streaming", "nothing"): """
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
    ("dfs", "score", "nothing"): """
anchor   s2[0:2] out
pop      s2[1:2]
anchor   s1[1:2] out
anchor   s1[2:4] out
pop      s1[3:4]
anchor   s0[3:5] out
pop      s0[0:5]
attach   s0..s2
""",
    ("dfs", "transparent", "nothing"): """
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
    ("dfs", "transparent", "all"): """
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
    ("dfs", "streaming", "nothing"): """
anchor   s1[0:1] out
anchor   s1[1:3] out
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
    ("dense", "score", "nothing"): """
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
    ("dense", "transparent", "nothing"): """
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
    ("dense", "transparent", "all"): """
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
    ("dense", "streaming", "nothing"): """
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
    ("packed", "score", "nothing"): """
anchor   s2[0:3] out
anchor   +s2[3:5]+s3[3:5] out
pop      s2[1:3]
anchor   s0[1:3]+s4[1:2] out
anchor   +s0[3:5]+s1[3:5] out
pop      s0[0:3]
attach   s0..s4
""",
    ("packed", "transparent", "nothing"): """
anchor   s2[0:3] out
anchor   +s2[3:5]+s3[3:5] out
pop      s2[1:3]
anchor   s0[1:3]+s4[1:2] out
forward  +s0[3:5]+s1[3:5] out
attach   s0..s4
backward +s0[3:5]+s1[3:5]
forward  s0[1:3]+s4[1:2]
backward s0[1:3]+s4[1:2]
pop      s0[1:3]
anchor   s2[1:3]
forward  +s2[3:5]+s3[3:5]
backward +s2[3:5]+s3[3:5]
forward  s2[0:3]
backward s2[0:3]
pop      s2[0:3]
""",
    ("packed", "transparent", "kv"): """
anchor   s2[0:3] out kv
anchor   +s2[3:5]+s3[3:5] out
pop      s2[1:3]
anchor   s0[1:3]+s4[1:2] out kv
forward  +s0[3:5]+s1[3:5] out
attach   s0..s4
backward +s0[3:5]+s1[3:5]
forward  s0[1:3]+s4[1:2]
backward s0[1:3]+s4[1:2]
pop      s0[1:3]
restore  s2[1:3]
forward  +s2[3:5]+s3[3:5]
backward +s2[3:5]+s3[3:5]
forward  s2[0:3]
backward s2[0:3]
pop      s2[0:3]
""",
    ("packed", "transparent", "all"): """
forward  s2[0:3] out
forward  +s2[3:5]+s3[3:5] out
pop      s2[1:3]
forward  s0[1:3]+s4[1:2] out
forward  +s0[3:5]+s1[3:5] out
attach   s0..s4
backward +s0[3:5]+s1[3:5]
backward s0[1:3]+s4[1:2]
pop      s0[1:3]
restore  s2[1:3]
backward +s2[3:5]+s3[3:5]
backward s2[0:3]
pop      s2[0:3]
""",
    ("packed", "streaming", "nothing"): """
anchor   s0[0:3] out
forward  +s0[3:5]+s1[3:5] out
attach   s0 s1
backward +s0[3:5]+s1[3:5]
forward  s0[1:3]+s4[1:2] out
attach   s4
backward s0[1:3]+s4[1:2]
pop      s0[1:3]
anchor   s2[1:3] out
forward  +s2[3:5]+s3[3:5] out
attach   s2 s3
backward +s2[3:5]+s3[3:5]
forward  s2[0:3]
backward s2[0:3]
pop      s2[0:3]
""",
}


@pytest.mark.parametrize("strategy, mode, keep", GOLDEN)
def test_listing(strategy, mode, keep):
    tree, chunk_size = (PACKED_TREE, 4) if strategy == "packed" else (TREE, 2)
    if strategy == "dense":
        tree = tree.unshared()
    schedule = build_schedule(tree, Options(chunk_size=chunk_size, strategy=strategy), mode, KEEP[keep])
    header, listing = str(schedule).split("\n", 1)
    assert header == f"# dta schedule strategy={strategy} order=backward_dfs mode={mode} chunk_size={chunk_size}"
    assert listing == GOLDEN[strategy, mode, keep].strip()
    verify(tree, Schedule.parse(str(schedule)))
