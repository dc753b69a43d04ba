"""Compile a captured graph: `PASSES`, the ordered list of passes over one `Program`, and `run_passes`.

lower          lower Dynamo's graph to functional ATen, with attention as one opaque operator
input_sizes    tell weights from data among the inputs, and make feature sizes of ids constants
token_axis     infer the layout of every value: the dimensions over sequences and tokens; find token-mixing operators
mixers         collect the mixer layers; prove attention masks causal, undo the repetition of KV heads
regions        cut into prologue, token region and epilogue; find the frontier between the last two
prefix_key     cut the token region into trunk and head; choose the inputs by which two prefixes are equal
head_rows      restrict the head to tokens that the outputs depend on: not those that the loss ignores
chunk_graph    build the token region as a function of one chunk
lm_head        compute log-probs and entropies over a large vocabulary without materialising logits
dense_graphs   build prologue and epilogue as modules
other_batches  make an epilogue with attention over a batch of other sizes a program of its own
joint          cut the chunk into stages; trace and partition forward and backward of each kind of stage
accumulate     add parameter gradients into accumulators in place
codegen        outline operators between matrix products and attention as generated code
host_calls     reduce the number of calls: views, transposed weights, small additions
in_place       write results over arguments that have no later use
working_memory compute the bytes that each graph allocates at its peak
emit           turn the graphs into code, and the stages into numbers of slots
"""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
import time
from collections.abc import Collection, Sequence

from dta_compile.errors import RefusalError
from dta_compile.passes.axes.input_sizes import input_sizes
from dta_compile.passes.axes.token_axis import token_axis
from dta_compile.passes.axes.tokenwise_operators import register_token_rule
from dta_compile.passes.chunk.chunk_graph import chunk_graph
from dta_compile.passes.chunk.lm_head import lm_head
from dta_compile.passes.contracts import Pass
from dta_compile.passes.copies.fold import fold
from dta_compile.passes.cuts.dense_graphs import dense_graphs
from dta_compile.passes.cuts.head_rows import head_rows
from dta_compile.passes.cuts.other_batches import other_batches
from dta_compile.passes.cuts.prefix_key import prefix_key
from dta_compile.passes.cuts.regions import regions
from dta_compile.passes.fusion.codegen import codegen
from dta_compile.passes.fusion.host_calls import host_calls
from dta_compile.passes.gradients.accumulate import accumulate
from dta_compile.passes.gradients.joint import joint
from dta_compile.passes.gradients.unroll import NotRepeated, require_repeated
from dta_compile.passes.inspection.invariants import Snapshot, check
from dta_compile.passes.inspection.listing import listing, sign
from dta_compile.passes.lowering.lower import lower
from dta_compile.passes.masks.mixers import mixers
from dta_compile.passes.memory.in_place import in_place
from dta_compile.passes.memory.working_memory import working_memory
from dta_compile.passes.program import GraphWithoutAttention, Program
from dta_compile.passes.to_executable.emit import emit

__all__ = ["PASSES", "GraphWithoutAttention", "Program", "register_token_rule", "run_passes"]

PASSES: tuple[Pass, ...] = (
    lower,
    input_sizes,
    token_axis,
    mixers,
    regions,
    prefix_key,
    head_rows,
    chunk_graph,
    lm_head,
    dense_graphs,
    other_batches,
    joint,
    accumulate,
    codegen,
    host_calls,
    in_place,
    working_memory,
    emit,
)

logger = logging.getLogger("dta_compile")


def run_passes(
    program: Program, passes: Sequence[Pass] = PASSES, skip: Collection[str] = (), stop_after: str | None = None
) -> Program:
    """Run passes in order, and check the program's invariants after each.

    They run over a program with few of its equal layers if that can be unrolled (`copies`), and return that one.

    `DTA_DEBUG=<directory>` writes the program's listing after every pass to a folder there.

    Args:
        skip: names of passes to leave out; a program runs without those that `may_be_skipped`.
        stop_after: name of the last pass to run; None: run all. A program stopped early cannot be executed.

    Raises:
        ContractError: a pass breaks its contract or an invariant, which is a bug of ours.
    """
    assert {*skip, stop_after} <= {None, *(step.name for step in PASSES)}, (skip, stop_after)
    if passes is PASSES and stop_after is None and (folded := fold(program)) is not None:
        try:
            return _run(folded, passes, skip, None)
        except (NotRepeated, RefusalError, GraphWithoutAttention) as error:
            logger.debug("the passes run over all copies of layers: %s %s", type(error).__name__, error)
    return _run(program, passes, skip, stop_after)


def _run(program: Program, passes: Sequence[Pass], skip: Collection[str], stop_after: str | None) -> Program:
    folder = _new_folder(os.environ.get("DTA_DEBUG"))
    snapshot = Snapshot(program)
    for number, step in enumerate(passes, len(PASSES) - len(passes)):
        if step.name in skip:
            continue
        start = time.perf_counter()
        snapshot.compare(step)
        step(program)
        require_repeated(program)  # as soon as it is known, because all passes run anew
        sign(program, step)
        snapshot.take(step)
        check(program, step)
        program.timings[step.name] = time.perf_counter() - start
        if folder is not None:
            (folder / f"{number:02d}_{step.name}.txt").write_text(listing(program))
        if step.name == stop_after:
            break
    snapshot.compare()
    if stop_after is not None:
        return program
    logger.debug("passes: %s", {name: f"{seconds:.2f} s" for name, seconds in program.timings.items()})
    if program.rest is not None:
        run_passes(program.rest, PASSES[PASSES.index(token_axis) :], skip)
    return program


def _new_folder(directory: str | None) -> pathlib.Path | None:
    """Make the next unused folder `graph_000`, `graph_001`, ... of a directory; None without a directory."""
    if not directory:
        return None
    numbers = (pathlib.Path(directory) / f"graph_{number:03d}" for number in itertools.count())
    folder = next(path for path in numbers if not path.exists())
    folder.mkdir(parents=True)
    return folder
