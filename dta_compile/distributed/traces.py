"""The plans of all ranks in one trace."""

from __future__ import annotations

from os import PathLike

from dta_compile.distributed.group import Group, GroupLike
from dta_compile.files import write_output
from dta_compile.plan import Plan
from dta_compile.views.traces.chrome import as_chrome_trace


def to_chrome_trace(plan: Plan, path: str | PathLike[str], group: GroupLike = None) -> None:
    """Write the plans of all ranks as one Chrome trace (see `Plan.to_chrome_trace`), each with tracks of its own.

    A collective: every rank of the group calls it with its plan, the first one writes. What was measured is on one
    clock, that of the machines; between machines it is as good as their clocks agree.

    Args:
        plan: this rank's, `dta_compile.last_plan(compiled)`.
        path: the file to write; of the other ranks it is not looked at.
        group: the ranks; None: all of them.

    Raises:
        OSError: the first rank cannot write the file.
    """
    ranks = Group(group)
    began = [one for one in ranks.gather(plan.estimates.began) if one is not None]
    found = ranks.gather(plan.trace_processes(ranks.rank, min(began, default=None)))
    scalars = ranks.gather(plan.scalars())
    if ranks.rank == 0:
        facts = {f"rank {rank}": one for rank, one in enumerate(scalars)}
        text = as_chrome_trace([process for processes in found for process in processes], facts)
        write_output(path, text)
