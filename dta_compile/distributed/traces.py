"""Write the plans of all ranks as one trace."""

from __future__ import annotations

from os import PathLike

from dta_compile.distributed.group import Group, GroupLike
from dta_compile.files import write_output
from dta_compile.plan import Plan
from dta_compile.trace_files import as_chrome_trace


def to_chrome_trace(plan: Plan, path: str | PathLike[str], group: GroupLike = None) -> None:
    """Write the plans of all ranks as one Chrome trace (see `Plan.to_chrome_trace`), with separate tracks per rank.

    A collective: every rank of the group calls it with its plan, and the first rank writes. Measured times are on the
    system clocks, so that times of different machines are only as comparable as these.

    Args:
        plan: this rank's plan, from `dta_compile.last_plan(compiled)`.
        path: the file to write; ignored on other ranks.
        group: the ranks; None: all of them.

    Raises:
        OSError: the first rank cannot write the file.
    """
    ranks = Group(group)
    began = [value for value in ranks.gather(plan.estimates.began) if value is not None]
    processes_of_ranks = ranks.gather(plan.trace_processes(ranks.rank, min(began, default=None)))
    scalars = ranks.gather(plan.scalars())
    if ranks.rank == 0:
        facts = {f"rank {rank}": value for rank, value in enumerate(scalars)}
        text = as_chrome_trace([process for processes in processes_of_ranks for process in processes], facts)
        write_output(path, text)
