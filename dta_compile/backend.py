"""The torch.compile backend "dta": turn Dynamo's graph into a callable, one named call per stage.

Runs the graph classification, rewrites of the captured graph, the passes (or the program cache), and wraps the
`Executable` in an `Engine`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile import records
from dta_compile.capture import dense_calls
from dta_compile.capture.dynamo import preparations, restarts, sizes
from dta_compile.capture.flash_attention import with_our_attention
from dta_compile.capture.flex_attention import without_flex_attention
from dta_compile.capture.graph_breaks import patches
from dta_compile.capture.media import encoder_calls, encoder_modules
from dta_compile.capture.media.given_embeddings import UNSHARED
from dta_compile.capture.recurrences import refuse_final_states
from dta_compile.classify import Captured, Kind, classify
from dta_compile.distributed.group import Group
from dta_compile.errors import DTAError, FinalRefusal, OptionError, RefusalError
from dta_compile.executable.as_captured import as_captured
from dta_compile.executable.executable import Executable
from dta_compile.explanation import capture_report
from dta_compile.integrations.fully_shard import keeping
from dta_compile.ops.library import refused_calls
from dta_compile.options import Options
from dta_compile.passes import GraphWithoutAttention, Program, run_passes
from dta_compile.passes.contracts import ContractError
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.lowering.one_length import symbol_of_length
from dta_compile.passes.program import AmbiguousAxes
from dta_compile.passes.symbols import expression, selects_rows
from dta_compile.passes.to_executable.seal import seal
from dta_compile.program_cache.cache import FOUND, analysed
from dta_compile.program_cache.size_guards import shape_env_of
from dta_compile.runtime.calls.ranks import Ranks
from dta_compile.runtime.engine import Engine
from dta_compile.runtime.measure.profiler import trace_artifact
from dta_compile.runtime.short_rows import beside_trees
from dta_compile.torch_compat.sizes import unite_symbols
from dta_compile.torch_compat.tensors import without_function_modes

logger = logging.getLogger("dta_compile")

Compiled = Callable[..., Sequence[Any]]

SEVERAL_BATCHES = (
    "the model runs on batches of different sizes in one function: each has a prefix tree of its own (padded to one "
    "size and concatenated, they would share what their rows have in common)"
)

DENSE_LAYER = (
    "tokens are mixed after the last attention, so that the layers from this line on run for all sequences, and share "
    "nothing"
)

BUG = "a check of the compiler on itself failed, which is a bug of dta_compile"

preparations.install()
patches.avoid()
encoder_calls.stand_in()
encoder_modules.stand_in()
dense_calls.warn(has_graphs=lambda compiler: records.of(compiler).graphs > 0)


def dta(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one graph for `torch.compile(..., backend="dta", options={...})`; see `dta_compile.options.Options`.

    Our errors are raised by the compiled call itself with their own type, because Dynamo would wrap them here.
    """
    try:
        if mode is not None:
            raise OptionError("torch.compile's mode has no meaning here", expected="options", got=f"mode={mode!r}")
        parsed = Options.parse(options)
        if parsed.is_over_ranks:
            Group(parsed.mesh)
    except OptionError as error:
        return Refused(error)
    if calls := refused_calls(module):  # even with fallback="dense": these are wrong densely as well
        return Refused(_refusal_by(calls[0]))
    graph = classify(module)
    ranks, record = Ranks(graph.local.group if graph.local else None), records.current()
    record.note_graph(graph)
    if graph.kind is Kind.PLAIN:
        return _plain(graph.module, graph.note, logging.WARNING if graph.training else logging.INFO)
    if graph.kind is Kind.REFUSED:
        assert graph.refusal is not None
        return _refused(graph.refusal, graph.module, parsed, ranks)
    if graph.encoded and parsed.is_over_ranks:
        return _raising(_IMAGES_OVER_RANKS, parsed, ranks)
    if graph.given and parsed.is_over_ranks:
        return _raising(_EMBEDDINGS_OVER_RANKS, parsed, ranks)
    try:
        started = time.perf_counter()
        executable, captured = _compiled(graph, parsed)
        seconds = time.perf_counter() - started
        if FOUND in executable.seconds:
            seconds = sum(executable.seconds.values())  # the self-check gets as much time as after passes
        engine = Engine(executable, captured, parsed, seconds, ranks)
    except GraphWithoutAttention as plain:
        if plain.log is None and graph.refusal is not None and graph.training:
            return _refused(graph.refusal, graph.module, parsed, ranks)
        plain_run = _plain(graph.module, plain.log)
        return plain_run if plain.log is None else beside_trees(plain_run, parsed, ranks)
    except ContractError as broken:
        return _refused(_bug(broken), graph.module, parsed, ranks)
    except RefusalError as refusal:
        if graph.refusal is not None and not graph.training:  # may be attention written out with a KV cache of its own
            return _plain(graph.module, str(refusal))
        return _refused(refusal, graph.module, parsed, ranks)
    trace_artifact("dta_capture", lambda: capture_report(executable))
    if engine.rest is not None:
        record.log_once(SEVERAL_BATCHES)
    if executable.dense_layer is not None:
        record.log_once(f"{DENSE_LAYER}: {executable.dense_layer}", logging.WARNING)
    record.engines.append(engine)
    run: Compiled = records.recorded(engine)
    if graph.given:

        def note_unshared() -> None:
            record.log_once(UNSHARED, logging.WARNING)
            engine.note(UNSHARED, 0.0, 1)

        run = functools.partial(graph.given.call, run, note_unshared)
    for part in reversed(graph.encoded):
        run = functools.partial(part.call, run, engine.note, parsed.memory_budget)
    for cut in (graph.local, graph.written):
        run = functools.partial(cut.call, run) if cut else run
    return _called(run, reads_all=False)


def _called(run: Compiled, reads_all: bool = True) -> Compiled:
    """Return what Dynamo calls: its outputs keep gathered parameters, and modes that the trace went through are off."""
    return without_function_modes()(keeping(run, reads_all))


_IMAGES_OVER_RANKS = RefusalError(
    "features of images and other media belong to the rank that encoded them",
    expected="text alone, with one tree over the ranks of options={'mesh': ...}",
    got="a model that is given images, sounds or videos",
    hint="compile without the mesh: each rank then runs a tree of its own (dta_compile.distributed.scatter)",
)


_EMBEDDINGS_OVER_RANKS = RefusalError(
    "embeddings that are given with a gradient belong to the rank that has them",
    expected="ids, or embeddings without a gradient, with one tree over the ranks of options={'mesh': ...}",
    got="embeddings with a gradient",
    hint="embed ids inside of the compiled function, or compile without the mesh, for a tree of each rank's own",
)


def _refusal_by(call: fx.Node) -> RefusalError:
    _, what, expected, got, hint = map(str, call.args)
    return RefusalError(what, where=where(call), expected=expected, got=got, hint=hint)


def _bug(broken: ContractError) -> RefusalError:
    return RefusalError(
        BUG,
        where="the compiler's passes, not your code",
        expected="what its passes promise one another",
        got=str(broken),
        hint="please report the model; options={'fallback': 'dense'} runs it without sharing until this is mended",
    )


def _compiled(graph: Captured, options: Options) -> tuple[Executable, fx.GraphModule]:
    """Run the passes; return the executable and the rewritten graph that the self-check compares it with."""
    program: Program | None = None
    try:
        with _autograd_of_our_own():
            captured = graph.module
            for cut in (graph.written, graph.local, *graph.encoded, graph.given):
                captured = cut.module if cut else captured
            refuse_final_states(captured)
            module = with_our_attention(without_flex_attention(captured))
            if (env := shape_env_of(module)) is not None:
                unite_symbols(env)
            program = Program(module, graph.training, options.codegen, graph.own_symbols)
            if graph.local:  # process groups cannot go to the program cache
                return seal(run_passes(program, skip=options.skip_passes)), module
            return analysed(program, options), module
    except FinalRefusal:
        raise
    except (RefusalError, GraphWithoutAttention):
        if selects_rows(graph.module.graph if program is None or program.module is None else program.graph):
            restarts.trace_again_without_selections()  # then Dynamo breaks the graph there, as for any other backend
        raise
    except AmbiguousAxes as ambiguous:
        if graph.own_symbols and ambiguous.refusal is not None and ambiguous.length is not None:
            return _for_one_length(graph, module, options, ambiguous.refusal, ambiguous.length), module
        sizes.trace_again_without_duck_shapes(already=graph.own_symbols)


def _for_one_length(
    graph: Captured, module: fx.GraphModule, options: Options, why: RefusalError, length: int
) -> Executable:
    """Compile a graph that Dynamo's guards restrict to one number of tokens; raise `why` if that is impossible."""
    env = shape_env_of(module)
    assert env is not None  # sizes were symbolic until the graph specialised one
    try:
        with _autograd_of_our_own(), symbol_of_length(env, length) as size:
            program = Program(module, graph.training, options.codegen, graph.own_symbols, length=size)
            program = run_passes(program, skip=options.skip_passes)
            if not expression(size).free_symbols:  # a pass specialised the size
                raise why
            records.current().note_length(length, why.where)
            return seal(program)
    except AmbiguousAxes as ambiguous:
        raise ambiguous.refusal or why from None


def _plain(module: fx.GraphModule, note: str | None, level: int = logging.INFO) -> Compiled:
    if note:
        records.current().as_captured.append(note)
        records.current().log_once(note, level)
    return _called(as_captured(module))


def _refused(refusal: RefusalError, module: fx.GraphModule, options: Options, ranks: Ranks) -> Compiled:
    error = records.with_graph_break(refusal, module)
    if options.fallback == "dense":
        logger.warning("dta: running densely, as fallback='dense' says: %s", error)
        return _called(as_captured(module))
    return _raising(error, options, ranks)


def _raising(error: DTAError, options: Options, ranks: Ranks) -> Compiled:
    """Return what raises an error, on all ranks of one tree if others have a program."""
    return beside_trees(Refused(error), options, ranks, error) if options.is_over_ranks else Refused(error)


@contextlib.contextmanager
def _autograd_of_our_own() -> Iterator[None]:
    """Keep the caller's anomaly detection and saved-tensor hooks (checkpointing) off the autograd graphs of passes."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
    with hooks, torch.autograd.set_detect_anomaly(False):
        yield


class Refused:
    """Compiled callable for a graph that cannot run over a tree: every call raises the error."""

    def __init__(self, error: DTAError) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error
