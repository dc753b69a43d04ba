"""Calls without a tree: rows that are too short for one, or none, run as captured, and refused programs raise.

Other ranks may have a tree in the same call, and wait for this one wherever ranks decide together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dta_compile.distributed.group import Group
from dta_compile.errors import DTAError, RefusalError
from dta_compile.integrations.fully_shard_by_layer import all_run_layer_by_layer, gather_all
from dta_compile.options import Options
from dta_compile.runtime import interception
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.engine import may_run_layer_by_layer
from dta_compile.runtime.one_tree.call import GroupRanks

Run = Callable[..., Sequence[Any]]

TOO_SHORT = RefusalError(
    "rows of one or two tokens, or a batch without rows, cannot be part of one tree over ranks",
    expected="rows of three tokens or more on all ranks, or on none",
    got="shorter rows, or none, on this rank",
    hint="give a rank without work a row of padding, which attention_mask or loss leave out",
)


def beside_trees(run: Run, options: Options, ranks: Ranks, why: DTAError = TOO_SHORT) -> Run:
    """Wrap a graph that has no tree, so that it decides with other ranks what `Engine` decides with them.

    Args:
        ranks: this rank's tensor-parallel group.
        why: what the wrapper raises, on all ranks, if this rank's rows should be part of one tree over ranks.
    """
    group = GroupRanks(Group(options.mesh), ranks) if options.is_over_ranks else None

    def run_beside(*args: Any) -> Sequence[Any]:
        if not interception.is_active():
            may_run_layer_by_layer(options)  # notes the mode of the call
            all_run_layer_by_layer(False)
        gather_all()
        if group is not None:
            _require_alike(group, why)
        return run(*args)

    return run_beside


def _require_alike(group: GroupRanks, why: DTAError) -> None:
    """Raise an error on all ranks of one tree, unless none of them has a tree."""

    def refuse() -> None:
        raise why

    try:
        group.check(refuse)
    except DTAError as problem:
        if problem is not why:  # then it is an error of all ranks
            raise
