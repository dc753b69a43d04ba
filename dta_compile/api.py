"""Public functions that take a compiled callable: `last_plan`, `explain` and `streaming_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from dta_compile import records
from dta_compile.errors import OptionError, RefusalError
from dta_compile.explanation import Explanation, explain_engine
from dta_compile.plan import Plan
from dta_compile.runtime import streaming
from dta_compile.runtime.engine import Engine
from dta_compile.runtime.interception import Intercepted, intercept
from dta_compile.torch_compat import frames


def last_plan(compiled: Any) -> Plan:
    """Return the plan of the latest call of a compiled function or module.

    A call with several batches has a plan for each; this is the one of the first batch, with a note for each other one.

    Args:
        compiled: the result of `torch.compile(..., backend="dta")`, or a module after `.compile(backend="dta")`.

    Raises:
        OptionError: `compiled` is not compiled, or has made no call over a tree yet.
    """
    record = records.of(compiled)
    plan = record.plan
    for engine in record.engines:
        engine.collect_times(wait=True)
    if plan is None:
        raise OptionError(
            "no plan yet",
            expected="a call of the compiled function that ran over a tree",
            got=record.as_captured[-1] if record.as_captured else "no call with attention that ran",
            hint="dta_compile.explain says why a call does not run over a tree"
            if record.as_captured or record.graphs
            else "call it first; dta_compile.explain says why a call would not run over a tree",
        )
    _note_further_batches(plan, next((engine.rest for engine in record.engines if engine.last_plan is plan), None))
    return plan


def _note_further_batches(plan: Plan, engine: Engine | None) -> None:
    """Note in the plan of a call's first batch the trees of the others, which engines behind the first one run."""
    number, notes = 2, plan.estimates.notes
    while engine is not None and engine.last_plan is not None:
        stats = engine.last_plan.stats
        counts = f"{stats.sequences:,} sequences, {stats.tokens:,} tokens, {stats.tree_tokens:,} to run"
        note = f"batch {number} of the call has a tree of its own: {counts}"
        notes += [note] if note not in notes else []
        number, engine = number + 1, engine.rest


def streaming_step(
    compiled: Any, loss_fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """Run forward and backward in one pass for a loss that is a sum over sequences (paper Algorithms 2 and 3).

    Each sequence's loss is evaluated when its last token is on the stack. Chunks that no other sequence needs then go
    backward at once, so that outputs never exist for the whole batch. Gradients are added to `.grad`, as by
    `backward()`.

    Args:
        compiled: a compiled function or module whose outputs have the batch axis in front.
        loss_fn: called as `loss_fn(row, *outputs)` for every row of the batch, where `outputs` are the rows `[S, ...]`
            of the tensors that the compiled callable returns, in its order (None, numbers and a KV cache object are
            left out); returns a scalar. Rows of the tensors, not batches of one: `[S, ...]`.
        *args, **kwargs: arguments of the call.

    Returns:
        The detached losses, one a row.

    Raises:
        RefusalError: the compiled function mixes sequences, so that its outputs do not exist row by row.
    """
    if not torch.is_grad_enabled():
        raise OptionError("streaming_step trains", expected="gradients enabled", got="torch.no_grad()")
    return streaming.step(compiled, loss_fn, args, kwargs, log=records.of(compiled).log_once)


def explain(fn: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Report how the backend compiles and plans a call, without running the token region; print the result.

    Args:
        fn: a function or module, compiled (then its options count) or not.
        *args, **kwargs: arguments of the call to explain.

    Returns:
        The regions, attention layers with their mask class, prefix-key inputs, frontier tensors with bytes and a plan
        summary; for a refused call the reason with the user's line.
    """
    compiled = torch.compile(frames.uncompiled(fn), backend=_explain_backend, options=_options_of_own_tree(fn))
    with intercept(_leave_with_explanation):
        try:
            compiled(*args, **kwargs)
        except _Explained as explained:
            return explained.explanation
        except RefusalError as error:
            return Explanation(f"refused: {error}", refusal=error)
    reasons = records.of(compiled).as_captured or ["no graph with scaled_dot_product_attention was captured"]
    return Explanation(f"the call runs as it is, and rows share nothing: {'; '.join(dict.fromkeys(reasons))}")


class _Explained(BaseException):
    """Carry an explanation out of the call that it is about. No `Exception`, so that user code does not catch it."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__()
        self.explanation = explanation


def _leave_with_explanation(engine: Intercepted, args: Sequence[Any]) -> NoReturn:
    raise _Explained(explain_engine(engine, args))


def _options_of_own_tree(fn: Any) -> dict[str, Any]:
    """Return the options of a compiled callable for a tree of this process alone, with refusals that are raised."""
    wrapper = frames.compile_wrapper_of(fn)
    given = dict(wrapper.kwargs.get("options") or {}) if wrapper is not None and frames.is_ours(fn) else {}
    if given.get("strategy") == "one_tree":
        given["strategy"] = "auto"
    return {**given, "mesh": None, "fallback": "raise"}


def _explain_backend(module: Any, example_inputs: Any, options: dict[str, Any]) -> Any:
    from dta_compile.backend import dta

    return dta(module, example_inputs, options=options)
