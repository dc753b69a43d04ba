"""What the backend has Dynamo do differently: symbolic sizes, graph breaks, and which graphs count for its limits."""

from __future__ import annotations

import collections
import contextlib
import gc
import inspect
import logging
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from dta_compile.attributes import attribute_set
from dta_compile.capture.regions.guards import add_guard, guards_of_global_hooks, guards_of_hooks
from dta_compile.capture.regions.repeated_layers import traced_once
from dta_compile.capture.skipped_functions import note_failure, note_trace
from dta_compile.errors import OptionError, RefusalError
from dta_compile.integrations import tracing
from dta_compile.integrations.checkpoint_flags import CheckpointFlags
from dta_compile.integrations.fully_shard import Sharded
from dta_compile.options import Options
from dta_compile.passes.program import output_node
from dta_compile.passes.symbols import expression, hint
from dta_compile.torch_compat import as_wrapper, frames, wrap_once
from dta_compile.torch_compat.dynamo import (
    BackendCompilerFailed,
    CompileContext,
    DeletedGuardManagerWrapper,
    InstructionTranslator,
    NumpyTensorSource,
    OutputGraph,
    RestartAnalysis,
    ShortenTraceback,
    TensorifyScalarRestartAnalysis,
    UnspecializeRestartAnalysis,
    builder,
    cache_entries_of,
    callback_handler,
    get_hook_for_recompile_user_context,
    has_same_objects,
    maybe_mark_dynamic,
    register_hook_for_recompile_user_context,
    utils,
)
from dta_compile.torch_compat.dynamo import config as dynamo_config
from dta_compile.torch_compat.sizes import SymT, symbol_is_type
from dta_compile.torch_compat.sizes import config as symbolic_shape_config
from dta_compile.torch_compat.tensors import unset_fake_temporarily

MARKED = "_dta_marked_dynamic"
SELECTIONS = "capture_dynamic_output_shape_ops"
# Former values of `use_duck_shape`, if the running trace has a symbol for every dimension.
_duck_shapes_before: list[bool] = []
# Ids of running compilations whose graphs end where rows are selected by a condition.
_without_selections: set[Any] = set()
ASKED = "dta_requires_grad"  # in the meta of a node of a computed value: `requires_grad_()` was called
# Ids of running compilations whose graphs end at conditions on what is selected.
_without_branches: set[Any] = set()
# Ids of running compilations whose graphs end at `requires_grad_()` of a computed value.
_without_requires_grad: set[Any] = set()
# Ids of running compilations whose layers cannot be traced once for all copies.
_without_regions: set[Any] = set()
# Setting of Dynamo: functions whose calls it leaves out.
IGNORED = "ignore_logging_functions"
MESSAGES = (
    warnings.warn,
    *(logging.Logger.debug, logging.Logger.info, logging.Logger.warning, logging.Logger.error, logging.Logger.critical),
    *(logging.Logger.exception, logging.Logger.log, logging.Logger.isEnabledFor),
)
# The latest function that Dynamo could not trace: its compiler, and the first reason.
_given_up: list[tuple[Any, str]] = []
# The latest graph break, unless Dynamo could not trace a function since: what a refusal of a later graph names.
last_break: list[str] = []
# Ids of running compilations of functions that Dynamo could not trace before.
_has_given_up: set[Any] = set()
# Ids of compilations whose graphs do not count towards Dynamo's recompile limit.
_uncounted: set[Any] = set()


class _TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Restart Dynamo's trace from within a backend.

    The first base passes through Dynamo's backend wrapper. The second makes Dynamo forget where it tried graph breaks,
    because symbolic sizes add calls to the graph and so further instructions to try.
    """


def trace_again_with_symbolic_sizes(graph: fx.Graph) -> None:
    """Make Dynamo trace this call once more with symbolic batch and token sizes, unless it already has.

    Dynamo's first trace of a call is static, except for inputs that `_mark_at_hand` found. All dimensions of inputs
    that are no parameters or buffers are marked as dynamic, except for the last one of floats with more than two
    dimensions (features), unless the last two are equal (a bias over pairs of tokens). Sizes 0 and 1 stay specialised,
    as everywhere in torch.
    """
    data = [node for node in graph.nodes if node.op == "placeholder" and is_data(node)]
    marked = [_mark(node.meta["grapharg"].example, node.meta["example_value"]) for node in data]
    if not any(marked):
        marked = [_mark_rows(node, data) for node in graph.find_nodes(op="placeholder")]
    if any(marked):
        raise _TraceAgain("dta: trace with symbolic sizes")


def _mark(example: torch.Tensor, traced: torch.Tensor) -> bool:
    """Mark the dimensions of an input that are constants in its trace as dynamic; return whether that is new."""
    has_features = traced.is_floating_point() and traced.dim() > 2 and traced.shape[-2] != traced.shape[-1]
    counted = traced.dim() - 1 if has_features else traced.dim()
    fixed = [dim for dim in range(counted) if isinstance(traced.shape[dim], int) and traced.shape[dim] > 1]
    if not fixed or getattr(example, MARKED, False):
        return False
    maybe_mark_dynamic(example, fixed)
    setattr(example, MARKED, True)
    return True


def _mark_rows(node: fx.Node, data: Sequence[fx.Node]) -> bool:
    """Mark the rows of a leaf `[B, D]` or `[B]`, and the tokens of one `[B, S]`, as dynamic if the trace made as many
    rows or tokens of other inputs a constant. So it does for tensors that are held by submodules and their hooks.

    Both may be weights, whose sizes are constants; so is then the number of rows or tokens that they are combined with.
    """
    value, grapharg = node.meta.get("example_value"), node.meta.get("grapharg")
    if not isinstance(value, torch.Tensor) or grapharg is None or isinstance(grapharg.example, torch.nn.Parameter):
        return False
    if not (is_weight(value) or _is_held(grapharg)) or value.dim() == 0 or getattr(grapharg.example, MARKED, False):
        return False
    shapes = [other.meta["example_value"].shape for other in data if other.meta["example_value"].dim() > 1]
    sizes = enumerate(map(expression, value.shape[:2]))
    fixed = [dim for dim, size in sizes if size != 1 and size in [expression(shape[dim]) for shape in shapes]]
    if not fixed:
        return False
    maybe_mark_dynamic(grapharg.example, fixed)
    setattr(grapharg.example, MARKED, True)
    return True


def _mark_at_hand(translator: Any) -> None:
    """Mark tensor arguments of a function before its first trace, so that no second one is needed."""
    pending, seen = [*translator.f_locals.values()], set()
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and not is_weight(value):
                _mark(value, value)
        elif isinstance(value, (dict, collections.UserDict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if hasattr(value, "values") else value


@as_wrapper
def _with_marked_arrays(
    choose_sizes: Callable[..., Any], example: Any, translator: Any, source: Any, *args: Any, **kwargs: Any
) -> Any:
    """Mark numpy arrays whenever Dynamo chooses the sizes of an input, because each trace makes new tensors of them."""
    if isinstance(source, NumpyTensorSource) and frames.is_ours(translator.output.compiler_fn):
        _mark(example, example)
    return choose_sizes(example, translator, source, *args, **kwargs)


@as_wrapper
def _with_constants_of_modules(wrap: Callable[[Any, float], Any], self: Any, value: float) -> Any:
    """Make a float of a module, as an epsilon of a norm, a constant until it changes, as torch makes its integers.

    With `dynamic=True` it would be an input of the graph: several for each layer, which then cannot be traced once.
    """
    if not (frames.is_ours(self.tx.output.compiler_fn) and self.source.guard_source.is_unspecialized_nn_module()):
        return wrap(self, value)
    with dynamo_config.patch(assume_static_by_default=True):
        return wrap(self, value)


wrap_once(builder, "_automatic_dynamic", _with_marked_arrays)
wrap_once(builder.VariableBuilder, "wrap_symfloat", _with_constants_of_modules)


def allow_one_more_graph() -> None:
    """Keep the graph being compiled from counting towards Dynamo's recompile limit in later compilations.

    Past that limit (8 graphs per function) Dynamo runs the function eagerly with only a warning, which would be a dense
    run while training. The limit is soon reached: every transformers model is called through the wrapper function of
    one decorator, so that policy, reference model and each kind of generation step share these 8 graphs. Runaway
    recompilation has our own warning (`records.Record.note_graph`).

    Dynamo's cap of 256 graphs per function is raised when it is near, since it also counts graphs that are gone.
    """
    if _leave_out_uncounted not in (get_hook_for_recompile_user_context() or ()):
        register_hook_for_recompile_user_context(_leave_out_uncounted)  # again after `torch._dynamo.reset()`
    here = CompileContext.current_compile_id()
    _uncounted.add(here)
    if here is not None and (here.frame_compile_id or 0) + 1 >= dynamo_config.accumulated_recompile_limit:
        dynamo_config.accumulated_recompile_limit += 1


def _leave_out_uncounted() -> str:
    """Subtract graphs for the tree from the counts that Dynamo is about to compare; return a line for Dynamo's log.

    Dynamo counts the graphs of all backends for a function, and compares before it calls a backend. The only place to
    correct the count is a hook in between, which Dynamo calls in every compilation of every backend.
    """
    compilation = frames.running_compilation()
    assert compilation is not None
    size, frame, code = (compilation[name] for name in ("cache_size", "frame", "code"))
    entries = compilation.get("cache_entries") or cache_entries_of(code)  # the latter for torch 2.11
    left_out = [entry for entry in entries if _is_uncounted(entry)]
    same_objects = frame is not None and sum(has_same_objects(frame, entry) for entry in left_out)
    size.num_cache_entries_with_same_id_matched_objs -= same_objects
    size.num_cache_entries -= len(left_out)
    if hasattr(size, "total_cache_entries_all_regions"):
        size.total_cache_entries_all_regions -= len(left_out)
    return f"dta_compile: {len(left_out)} graphs over a prefix tree are not counted"


def _is_uncounted(entry: Any) -> bool:
    """Return whether a cache entry is not to count. Checks the backend, too, since `reset()` restarts compile ids."""
    if isinstance(entry.guard_manager, _Dropped):
        return True
    return entry.compile_id in _uncounted and frames.is_ours(entry.backend)


def trace_again_without_duck_shapes(already: bool) -> NoReturn:
    """Make Dynamo trace once more with a size symbol of its own for every dimension.

    Dimensions that are equal at the first call share a symbol by default (duck shaping), so that B = S would leave the
    axes ambiguous. Raises `RefusalError` if this trace is `already` such a one.
    """
    if already:
        raise RefusalError(
            "the batch axis and the token axis cannot be told apart",
            expected="different symbols for batch and token sizes",
            got="one symbol for both",
            hint="pass dynamic=True to torch.compile, or make the first call with different sizes",
        )
    if _restore_duck_shape not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_restore_duck_shape)  # in case the trace fails
    _duck_shapes_before.append(symbolic_shape_config.use_duck_shape)
    symbolic_shape_config.use_duck_shape = False
    raise TensorifyScalarRestartAnalysis("dta: trace with a symbol for every dimension")


def restore_duck_shapes() -> bool:
    """Undo `trace_again_without_duck_shapes` after its trace; return whether dimensions have symbols of their own."""
    without = not symbolic_shape_config.use_duck_shape
    _restore_duck_shape()
    return without


def _restore_duck_shape(*_: Any) -> None:
    """Restore `use_duck_shape`; Dynamo also calls this at the end of every compilation."""
    if _duck_shapes_before:
        symbolic_shape_config.use_duck_shape = _duck_shapes_before.pop()


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
    here, compiler = CompileContext.current_compile_id(), arguments.get("compiler_fn")
    if is_traced_by_us := frames.is_ours(compiler):
        _options_of(compiler)
    self._dta_selects = not was_on and here not in _without_selections and is_traced_by_us
    with dynamo_config.patch({SELECTIONS: was_on or self._dta_selects}):
        build(self, *args, **kwargs)


wrap_once(OutputGraph, "__init__", _with_selections)


def traces_selections(output_graph: Any) -> bool:
    """Whether a trace of ours has sizes that depend on data, which Dynamo has not been set to allow."""
    return bool(getattr(output_graph, "_dta_selects", False))


def trace_again_without_selections() -> None:
    """Make Dynamo trace once more with its own setting, breaking the graph where rows are selected by a condition."""
    _trace_without_selections(frames.calling(OutputGraph))


def _trace_without_selections(output_graph: Any) -> None:
    if traces_selections(output_graph):
        _trace_again_without(_without_selections, "selections of rows")


def takes_branches(output_graph: Any) -> bool:
    """Whether a trace takes branches that the model skips where nothing is selected (`selected_branches`)."""
    return traces_selections(output_graph) and CompileContext.current_compile_id() not in _without_branches


def trace_without_branches() -> NoReturn:
    """Make Dynamo trace once more, ending the graph at conditions on what is selected."""
    _trace_again_without(_without_branches, "branches over selected rows")


def traces_requires_grad(output_graph: Any) -> bool:
    """Whether a trace goes on at `requires_grad_()` of a computed value, which then gets no gradient of its own."""
    is_ours = frames.is_ours(output_graph.compiler_fn)
    return is_ours and CompileContext.current_compile_id() not in _without_requires_grad


def trace_again_if_a_leaf_is_returned(graph: fx.Graph) -> None:
    """Make Dynamo trace once more if a value is returned that was asked to require a gradient: its own may be read."""
    if any(ASKED in node.meta for node in output_node(graph).all_input_nodes):
        _trace_again_without(_without_requires_grad, "requires_grad_() of computed values")


def trace_again_with(what: str) -> NoReturn:
    """Make Dynamo trace once more after a change of ours, which `what` names."""
    raise _TraceAgain(f"dta: trace with {what}")


def _trace_again_without(compilations: set[Any], what: str) -> NoReturn:
    """Add the running compilation to a set until it ends, and make Dynamo trace once more."""
    if _clear_ids not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_clear_ids)
    compilations.add(CompileContext.current_compile_id())
    raise _TraceAgain(f"dta: trace without {what}")


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
    _mark_at_hand(self)
    note_trace(self.f_code)
    here = CompileContext.current_compile_id()
    repeated = () if here in _without_regions else modules
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
                _trace_again_without(_without_regions, "regions")
            note_failure(self.f_code)
            if here not in _has_given_up and "No ops traced" not in str(error):  # else there is nothing to compile
                _has_given_up.add(here)
                last_break.clear()
                _given_up[:] = [(self.output.compiler_fn, cause(error) + _hooked(modules, str(error)))]
                if _clear_ids not in callback_handler.end_callbacks:
                    callback_handler.register_end_callback(_clear_ids)
            sizes = getattr(self.output.shape_env, "var_to_range", ())
            if any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in sizes):
                _trace_without_selections(self.output)
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
    return dynamo_config.patch({IGNORED: {*getattr(dynamo_config, IGNORED), *MESSAGES}})


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


wrap_once(InstructionTranslator, "run", _with_preparations)
wrap_once(utils, "get_optimize_ddp_mode", _without_buckets)


def modules_at_hand(translator: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules that the function to be traced can name.

    These are arguments (also in `*args` and `**kwargs`), free and global variables, owners of methods, and attributes
    of other objects that the function reads.
    """
    names = translator.f_code.co_names
    named = [translator.f_globals[name] for name in names if name in translator.f_globals]
    arguments = [*translator.f_locals.values()]
    packed = [value for value in arguments if type(value) in (tuple, dict)]
    arguments += [part for value in packed for part in (value.values() if isinstance(value, dict) else value)]
    for value in (*arguments, *frames.contents_of(translator.closure), *named):
        owner = value.__self__ if isinstance(value, types.MethodType) else value
        is_other = not isinstance(owner, (torch.nn.Module, types.ModuleType, type))
        attributes = [frames.own_attributes(owner).get(name) for name in names] if is_other else []
        for part in (owner, *attributes):
            if isinstance(part, torch.nn.Module) and "_modules" in vars(part):  # else its constructor is still running
                yield part


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


def given_up() -> str | None:
    """Return why and where Dynamo gave up on a caller of the function being compiled, for example at a break in a loop.

    The functions that the caller calls are then compiled one by one, for the same compiled callable.
    """
    here = getattr(frames.calling(OutputGraph), "compiler_fn", None)
    return next((reason for compiler, reason in _given_up if compiler is here), None)


def cause(error: BaseException) -> str:
    """Return the reason why Dynamo cannot trace a function, with the user's line."""
    while error.__cause__ is not None and getattr(error.__cause__, "real_stack", None):
        error = error.__cause__
    return _with_line(_reason(str(error)), getattr(error, "real_stack", None))


def _clear_ids(*_: Any) -> None:
    """Clear ids at the end of every compilation, where Dynamo calls this, because `reset()` restarts them."""
    _without_selections.clear()
    _without_branches.clear()
    _without_requires_grad.clear()
    _without_regions.clear()
    _has_given_up.clear()


def unify_equal_sizes(graph: fx.Graph) -> None:
    """Unify the symbols of batch and token sizes that are equal in this call, under a guard of Dynamo's.

    Dynamo gives every input its own symbols until an operation proves two of them equal, which `gather` never does.
    """
    known: dict[int, list[Any]] = {0: [], 1: []}  # distinct sizes by dimension; several if there are several batches
    data = [node for node in graph.find_nodes(op="placeholder") if is_data(node) and node.users]
    values = [node.meta["example_value"] for node in data]
    of_tokens = {_hints(value) for value in values if value.dim() == 2 and not value.is_floating_point()}
    for value in values:
        # Positions in several axes are [axes, B, S], whatever their number.
        has_axes = value.dim() == 3 and _hints(value)[1:] in of_tokens and _hints(value)[:2] not in of_tokens
        for dim, size in enumerate(value.shape[1:] if has_axes else value.shape[:2]):
            if isinstance(size, torch.SymInt) and value.dim() > 1 and not value.requires_grad:  # else maybe a weight
                same = next((other for other in known[dim] if hint(other) == hint(size)), None)
                if same is None:
                    known[dim].append(size)
                else:
                    bool(same == size)  # adds a guard: a call where they differ is traced anew


def _hints(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(hint, value.shape))


def is_data(node: fx.Node) -> bool:
    """Return whether a node is a tensor input but no parameter, buffer or other weight."""
    value, grapharg = node.meta.get("example_value"), node.meta.get("grapharg")
    if not isinstance(value, torch.Tensor) or grapharg is None or is_weight(value):
        return False
    return not _names(_path(grapharg)) & {"_parameters", "_buffers", "_modules"}


def _is_held(grapharg: Any) -> bool:
    """Return whether a tensor is reached by way of a module and is no parameter or buffer."""
    container, *_ = _path(grapharg).rpartition("[")
    return "_modules" in _names(container) and not container.endswith(("._parameters", "._buffers"))


def _path(grapharg: Any) -> str:
    """Return the expression by which an input is reached from the arguments of the traced function."""
    name = grapharg.source.name
    return name() if callable(name) else str(name)


def _names(path: str) -> set[str]:
    """Return the whole names in an expression: `L['rollout_buffers']` holds no `_buffers`."""
    return set(re.findall(r"\w+", path))


def is_weight(value: Any) -> bool:
    """Return whether an input is a parameter, or a leaf with a gradient that has the rank of one."""
    if isinstance(value, torch.nn.Parameter):
        return True
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf and value.dim() <= 2


def graph_break(module: fx.GraphModule) -> str | None:
    """Return the reason of the graph break that ends a graph, with the user's line; None without a break."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    root, text = getattr(frames.calling(OutputGraph), "root_tx", None), str(reason.reason)
    return _with_line(_reason(text), reason.user_stack) + _hooked(modules_at_hand(root) if root else (), text)


def _hooked(modules: Iterable[torch.nn.Module], reason: str) -> str:
    """Name the modules with backward hooks, if these are the reason why Dynamo cannot trace a function."""
    named = {module: name for root in modules for name, module in root.named_modules() if name}
    hooked = [f"{named[m]} ({type(m).__name__})" for m in named if m._backward_hooks or m._backward_pre_hooks]
    names = ", ".join(hooked) or "all modules (torch.nn.modules.module.register_module_full_backward_hook)"
    return f"; backward hooks are on {names}" if "backwards hooks" in reason else ""


def _reason(text: str) -> str:
    """Return the first line of a message of Dynamo's, with the reason that its explanation may give."""
    first, *others = text.strip().splitlines() or [""]
    _, _, why = next((line for line in others if line.lstrip().startswith("Explanation:")), "").partition("Reason: ")
    return f"{first}: {why.partition('. ')[0].rstrip('.')}" if why and why not in first else first


def _with_line(reason: str, stack: Any) -> str:
    """Return a reason with the user's line: the innermost one outside of torch."""
    line = next((line for line in reversed(stack or ()) if torch.nn.modules.__path__[0] not in line.filename), None)
    line = line or (stack[-1] if stack else None)
    return f"{reason} at {line.filename}:{line.lineno}: {line.line}" if line is not None else reason


def resumes_after_a_break() -> bool:
    """Return whether the graph being compiled continues the user's function after a graph break."""
    output_graph = frames.calling(OutputGraph)
    code = getattr(getattr(output_graph, "root_tx", None), "f_code", None)
    return code is not None and code.co_name.startswith("torch_dynamo_resume_in_")


def is_given_a_cache() -> bool:
    """Return whether the function being compiled was called with a KV cache of transformers, empty or not."""
    root = getattr(frames.calling(OutputGraph), "root_tx", None)
    pending = [*getattr(root, "f_locals", {}).values()]
    while pending:
        value = pending.pop()
        if hasattr(type(value), "get_seq_length"):
            return True
        if type(value) in (dict, list, tuple):
            pending += value.values() if isinstance(value, dict) else value
    return False


def _traces_for_this_backend() -> bool:
    translator = frames.calling(InstructionTranslator)
    return translator is not None and frames.is_ours(translator.output.compiler_fn)


tracing.answer_with(_traces_for_this_backend)


def graph_being_traced() -> fx.Graph:
    """Return the graph that the running trace adds nodes to."""
    return frames.calling(InstructionTranslator).output.graph  # type: ignore[union-attr]


def is_tracing() -> bool:
    """Return whether Dynamo traces, for whichever backend."""
    return frames.calling(InstructionTranslator) is not None


@torch.compiler.assume_constant_result
def is_in_nested_graph() -> bool:
    """Return whether the running trace is in a checkpoint, or another graph inside of the graph."""
    return len(frames.calling(InstructionTranslator).output.tracers) > 1  # type: ignore[union-attr]


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Run code while Dynamo traces as it runs without Dynamo: on real tensors, and not told that it is compiled."""
    with attribute_set(torch.compiler, "_is_compiling_flag", False), unset_fake_temporarily():
        yield


def examples(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values that tensors of the running trace have in the call that is being compiled."""
    graph = graph_being_traced()
    nodes = [node for node in graph.nodes if "example_value" in node.meta]
    values: dict[fx.Node, Any] = {}

    def value_of(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        if node.op == "placeholder":
            value = node.meta["grapharg"].example
            value = value if isinstance(value, torch.Tensor) else hint(value)
        elif node.op == "call_method":
            value = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            value = node.target(*args, **kwargs)
        values[node] = value
        return value

    with torch.no_grad():
        return [value_of(next(n for n in nodes if n.meta["example_value"] is tensor)) for tensor in tensors]


def compiling() -> tuple[types.CodeType, Any] | None:
    """Return the code of the function being compiled, and the id of the compilation."""
    translator = getattr(frames.calling(OutputGraph), "root_tx", None)
    return None if translator is None else (translator.f_code, CompileContext.current_compile_id())


class _Dropped(DeletedGuardManagerWrapper):
    """Replaces the guards of a compilation that we dropped, so that Dynamo never evaluates it again."""


def forget(code: types.CodeType, compile_id: Any) -> None:
    """Drop Dynamo's cache entry of our compilation, as Dynamo does when an object of a guard is gone."""
    for entry in cache_entries_of(code):
        state = entry.guard_manager.extra_state
        # By identity, since `reset()` restarts compile ids.
        if entry.compile_id is compile_id and frames.is_ours(entry.backend) and state is not None:
            state.invalidate(entry, _Dropped("its callable is gone"))
