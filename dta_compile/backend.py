"""The torch.compile backend: from Dynamo's graph to a callable, one named call per stage."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dta_compile import records
from dta_compile.capture import dynamo
from dta_compile.capture.as_captured import as_captured
from dta_compile.capture.generation import mixer_calls, uses_kv_cache
from dta_compile.capture.written_out import trains_parameters, written_out_attention
from dta_compile.errors import DTAError, OptionError, RefusalError
from dta_compile.options import Options
from dta_compile.passes import GraphWithoutAttention, Program, run_passes
from dta_compile.passes.program import AmbiguousAxes
from dta_compile.runtime.engine import Engine

logger = logging.getLogger("dta_compile")

Compiled = Callable[..., Sequence[Any]]

GENERATION = (
    "a call without gradients reads or returns a KV cache, as generation does: such calls run as captured "
    "(for scoring over the prefix tree, pass use_cache=False)"
)

SEVERAL_BATCHES = (
    "the model runs on batches of different sizes in one function: each has a prefix tree of its own (padded to one "
    "size and concatenated, they would share what their rows have in common)"
)

NO_ATTENTION = (
    "a graph that trains parameters has no scaled_dot_product_attention: it runs as captured, and rows share nothing "
    "(state-space, recurrent and convolutional models do not run over a prefix tree)"
)


def dta(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Backend of `torch.compile(..., backend="dta", options={...})`; see `dta_compile.options.Options`.

    Errors of ours are raised by the call itself, typed, not wrapped by Dynamo.
    """
    try:
        if mode is not None:
            raise OptionError("torch.compile's mode has no meaning here", expected="options", got=f"mode={mode!r}")
        parsed = Options.parse(options)
    except OptionError as error:
        return Refused(error)
    own_symbols = dynamo.restore_duck_shapes()
    records.note_graph_break(dynamo.graph_break(module))
    if not any(mixer_calls(module)):
        return without_attention(module, parsed)
    dynamo.trace_again_with_symbolic_sizes(module.graph)
    return compile_graph(module, parsed, own_symbols)


def without_attention(module: fx.GraphModule, options: Options) -> Compiled:
    """The graph as it is, unless what it trains is attention in another spelling."""
    if not _is_training(module):
        return as_captured(module)
    error = written_out_attention(module)
    if error is not None:
        return _refused(error, module, options)
    if trains_parameters(module):
        records.current().log_once(NO_ATTENTION)
    return as_captured(module)


def compile_graph(module: fx.GraphModule, options: Options, own_symbols: bool = False) -> Compiled:
    """An engine for a captured graph, or what runs in its place; `own_symbols`: traced without duck shapes."""
    dynamo.allow_one_more_graph()
    record = records.current()
    record.count_graph()
    try:
        training = _is_training(module)
        if not training and uses_kv_cache(module):
            raise GraphWithoutAttention(GENERATION)
        started = time.perf_counter()
        program = _analyse(module, training, options.codegen, own_symbols)
        engine = Engine(program, options, compile_seconds=time.perf_counter() - started)
        record.engines.append(engine)
        if engine.rest is not None:
            record.log_once(SEVERAL_BATCHES)
        return records.recorded(engine)
    except GraphWithoutAttention as plain:
        if plain.log:
            record.log_once(plain.log)
        return as_captured(module)
    except RefusalError as refusal:
        return _refused(refusal, module, options)


def _refused(refusal: RefusalError, module: fx.GraphModule, options: Options) -> Compiled:
    error = records.with_graph_break(refusal)
    if options.fallback == "dense":
        logger.warning("dta: running densely, as fallback='dense' says: %s", error)
        return as_captured(module)
    return Refused(error)


def _analyse(module: fx.GraphModule, training: bool, codegen: str, own_symbols: bool) -> Program:
    if sharded := dynamo.sharded_part(module):
        raise RefusalError(
            "a part of the model is sharded while it runs: per-layer sharding, tensor, context and pipeline parallelism"
            " are not supported",
            expected="all parameters on every rank for the length of a step",
            got=sharded,
            hint="use DDP, or one fully_shard(module, reshard_after_forward=False) around what is compiled",
        )
    dynamo.unify_equal_sizes(module.graph)
    try:
        with _autograd_of_our_own():
            return run_passes(Program(module, training, codegen, own_symbols))
    except AmbiguousAxes as ambiguous:
        if own_symbols and ambiguous.refusal is not None:
            raise ambiguous.refusal from None
        dynamo.trace_again_without_duck_shapes(already=own_symbols)


@contextlib.contextmanager
def _autograd_of_our_own() -> Iterator[None]:
    """Anomaly detection and the hooks of a checkpoint around a call are not for what passes differentiate."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
    with hooks, torch.autograd.set_detect_anomaly(False):
        yield


class Refused:
    """Stands for a graph that cannot be run over a tree: every call raises the error."""

    def __init__(self, error: DTAError) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error


def _is_training(module: fx.GraphModule) -> bool:
    inputs = (node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder")
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)
