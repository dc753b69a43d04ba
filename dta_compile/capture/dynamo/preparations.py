"""What is done before, while and after Dynamo traces a function for this backend."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dta_compile.capture.dynamo import restarts
from dta_compile.capture.dynamo.breaks import note_given_up
from dta_compile.capture.dynamo.running import modules_at_hand
from dta_compile.capture.dynamo.sizes import mark_at_hand
from dta_compile.capture.dynamo.skipped_functions import note_failure, note_trace
from dta_compile.capture.regions.guards import add_guard, guards_of_global_hooks, guards_of_hooks
from dta_compile.capture.regions.repeated_layers import traced_once
from dta_compile.errors import OptionError
from dta_compile.integrations.checkpoint_flags import CheckpointFlags
from dta_compile.integrations.fully_shard import Sharded
from dta_compile.options import Options
from dta_compile.torch_compat import as_wrapper, frames, wrap_once
from dta_compile.torch_compat.dynamo import (
    BackendCompilerFailed,
    InstructionTranslator,
    OutputGraph,
    RestartAnalysis,
    ShortenTraceback,
    utils,
)
from dta_compile.torch_compat.dynamo import config as dynamo_config
from dta_compile.torch_compat.sizes import SymT, symbol_is_type

SELECTIONS = "capture_dynamic_output_shape_ops"  # setting of Dynamo: sizes may depend on data
IGNORED = "ignore_logging_functions"  # setting of Dynamo: functions whose calls it leaves out
# Beginnings of names of methods that log, also of those that packages add (transformers' `warning_once`).
LOGS = ("debug", "info", "warn", "error", "critical", "exception", "log")


class _BadOption(ShortenTraceback):
    """Carries an `OptionError` through Dynamo, which raises the result of `remove_dynamo_frames` instead."""

    def __init__(self, error: OptionError) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> Any:
        """Return the error for the call to raise."""
        return self.error


def _options_of(compiler: Any) -> Options:
    """Parse the options of a compiled callable; raise on bad ones before the trace, which takes long."""
    try:
        return Options.parse(frames.compile_wrapper_of(compiler).kwargs.get("options"))  # type: ignore[union-attr]
    except OptionError as error:
        raise _BadOption(error) from None


@as_wrapper
def _with_selections(build: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Enable sizes that depend on data in the constructor of Dynamo's `OutputGraph`, for this backend.

    Without them Dynamo breaks the graph where rows are selected by a condition, such as the tokens of an expert, and
    gives up on a function that does so in a loop before any backend is called. Only the constructor reads the setting.
    """
    arguments = inspect.signature(build).bind(self, *args, **kwargs).arguments
    was_on = arguments.get("one_graph", False) or getattr(dynamo_config, SELECTIONS)
    compiler = arguments.get("compiler_fn")
    if is_traced_by_us := frames.is_ours(compiler):
        _options_of(compiler)
    self._dta_selects = is_traced_by_us and not was_on and not restarts.is_noted(restarts.SELECTIONS)
    with dynamo_config.patch({SELECTIONS: was_on or self._dta_selects}):
        build(self, *args, **kwargs)


@as_wrapper
def _with_preparations(run: Callable[[Any], None], self: Any) -> None:
    """Wrap Dynamo's trace of a function with the preparations and retries for this backend.

    A trace that fails with regions, or on a size that depends on data, is repeated without them.
    """
    if not frames.is_ours(self.output.compiler_fn):
        return run(self)
    modules = list(modules_at_hand(self))
    _prepare(Sharded, modules)
    if _options_of(self.output.compiler_fn).fallback != "dense":  # dense runs need their checkpoints
        _prepare(CheckpointFlags, modules)
    mark_at_hand(self)
    note_trace(self.f_code)
    repeated = () if restarts.is_noted(restarts.REGIONS) else modules
    with _no_collections(), _ignoring_messages(), traced_once(repeated) as has_regions:
        if has_regions:  # layers that are traced once never hit this cache, which costs a tenth of the time
            self.output.fake_mode.cache_enabled = False
        try:
            run(self)
            _guard_hooks(self)
            if has_regions:  # guards there refer to parameters, which then could not be swapped until a collection
                self.output.tracing_context.hop_dispatch_set_cache.hop_cache_map.clear()
        except (RestartAnalysis, BackendCompilerFailed):
            raise
        except Exception as error:
            if has_regions:
                restarts.trace_again_without(restarts.REGIONS)
            note_failure(self.f_code)
            note_given_up(self.output.compiler_fn, error, modules)
            sizes = getattr(self.output.shape_env, "var_to_range", ())
            if any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in sizes):
                restarts.trace_again_without_selections(self.output)
            raise


@as_wrapper
def _without_buckets(mode: Callable[[], str]) -> str:
    """Wrap Dynamo's choice of how to compile a module of DDP: by default it cuts the graph at the bounds of buckets.

    Our graphs stay whole. In a sweep of stages each layer hands out its gradients as it is done, so that buckets are
    reduced while layers below go backward.
    """
    chosen, wrapper = mode(), frames.calling(frames.CatchErrorsWrapper)
    if chosen != "ddp_optimizer" or wrapper is None:
        return chosen
    compiler: Any = wrapper._torchdynamo_orig_backend
    return "no_optimization" if frames.is_ours(compiler._torchdynamo_orig_backend) else chosen


def _guard_hooks(tx: Any) -> None:
    """Guard that modules get no hooks later, since by default Dynamo reads hooks only while it traces."""
    if of_modules := [*guards_of_hooks(tx.output.guards)]:
        for guard in (*of_modules, *guards_of_global_hooks(tx)):
            add_guard(tx.output.guards, guard)


def _ignoring_messages() -> contextlib.AbstractContextManager[Any]:
    """Leave warnings and log lines of the model out of a trace, since Dynamo would end the graph there."""
    if not hasattr(dynamo_config, IGNORED):  # a torch that cannot
        return contextlib.nullcontext()
    methods = {method for name, method in vars(logging.Logger).items() if name.startswith(LOGS) and callable(method)}
    messages = {warnings.warn, logging.Logger.isEnabledFor, *methods}
    return dynamo_config.patch({IGNORED: {*getattr(dynamo_config, IGNORED), *messages}})


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Disable garbage collection during a trace, a tenth of its time, since few objects die before its end.

    The remaining objects are then moved to the oldest generation by freezing and unfreezing; otherwise they would soon
    be traversed twice more.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.collect(1)
            if not gc.get_freeze_count():  # unfreezing would undo a freeze of the user's
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _prepare(kind: type[Sharded | CheckpointFlags], modules: Iterable[torch.nn.Module]) -> None:
    """Have the compiled callable that is running prepare its modules now and whenever it is entered."""
    hooks_of_call = frames.hooks_of_running_call()
    if hooks_of_call is None:  # driven without torch.compile
        return
    hooks, exits = hooks_of_call
    prepare = next((hook for hook in hooks if isinstance(hook, kind)), None) or kind()
    if prepare.add(modules):
        if prepare not in hooks:
            hooks.append(prepare)
        exits.append(prepare())


def install() -> None:
    """Have Dynamo prepare its traces for this backend; other backends are left alone."""
    wrap_once(OutputGraph, "__init__", _with_selections)
    wrap_once(InstructionTranslator, "run", _with_preparations)
    wrap_once(utils, "get_optimize_ddp_mode", _without_buckets)
