"""Records of compiled callables: lead from a compiled function to its engines and latest plan.

`backend.py` files every engine with the callable that is being compiled; `api.py` looks it up.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from torch import fx

from dta_compile.capture.dynamo import breaks, recompile_limit, running, sizes
from dta_compile.classify import Captured
from dta_compile.errors import OptionError, RefusalError
from dta_compile.plan import Plan
from dta_compile.runtime.engine import Engine
from dta_compile.torch_compat import frames

logger = logging.getLogger("dta_compile")

_ATTRIBUTE = "_dta_record"
MANY_GRAPHS = 10
MOST_LENGTHS = 8
MOST_ABANDONED = 2  # engines kept although all callables that used them are gone
REMOVE = "remove the graph break (torch.compile(..., fullgraph=True) points at it)"
# Parts of the messages of graph breaks where Python code reads numbers out of tensors.
OF_NUMBERS = ("data-dependent", "data dependent", "item()", "tolist", "numpy", "could not guard")
NUMBERS = (
    f"{REMOVE}: Python code cannot depend on what tensors hold. In a mixture of experts, loop over all of them, as in"
    " `for e in range(E)`, drop the `if` around an expert without tokens, which adds nothing, and select its tokens by"
    " a condition instead of by .item(), .tolist() or .numpy(). For the sequences of a packed row, in place of a loop"
    " over them, pass position_ids or a mask that compares their numbers"
)
# Where torch breaks the graph at a module, by parts of its messages.
OF_RECURRENCES = ("rnn, gru, or lstm",)
RECURRENCES = (
    "nn.RNN, nn.GRU and nn.LSTM are recurrences with steps that are not linear in the state, and break the graph:"
    " before the last attention, call dta_compile.linear_recurrence (minGRU), linear_attention, gated_delta_rule,"
    " selective_scan or short_convolution instead; after it, they run as they are"
)
OF_HOOKS = ("backwards hooks",)
HOOKS = (
    "a module called there has a backward hook (register_full_backward_hook or register_full_backward_pre_hook),"
    " at which torch breaks the graph: remove it, and register hooks on parameters instead, or on what the compiled"
    " function returns"
)
HINTS = ((OF_NUMBERS, NUMBERS), (OF_RECURRENCES, RECURRENCES), (OF_HOOKS, HOOKS))


@dataclasses.dataclass
class Record:
    """Engines, plan and log lines of one `torch.compile(..., backend="dta")`.

    Attributes:
        engines: engines of its graphs that run over a tree, oldest first.
        logged: lines that have been logged already.
        plan: plan of the latest call that ran over a tree.
        as_captured: reasons why graphs run as captured, without sharing between rows.
        graphs: number of captured graphs with attention, including those that run as captured.
        lengths: numbers of tokens that have a program of their own because their graphs hold for one length only.
    """

    engines: list[Engine] = dataclasses.field(default_factory=list)
    logged: set[str] = dataclasses.field(default_factory=set)
    plan: Plan | None = None
    as_captured: list[str] = dataclasses.field(default_factory=list)
    graphs: int = 0
    lengths: set[int] = dataclasses.field(default_factory=set)

    def __reduce__(self) -> tuple[type[Record], tuple[()]]:
        """Copy and pickle as an empty record, because a copied or unpickled callable is compiled anew."""
        return Record, ()

    def note_graph(self, graph: Captured) -> None:
        """Note the graph break that ends a new graph; count it if it has attention, and warn about too many of them.

        Training, scoring and generation together need fewer than `MANY_GRAPHS`.
        """
        if graph.graph_break is not None:
            breaks.last_break[:] = [graph.graph_break]
        if not graph.has_attention:
            return
        self.graphs += 1
        if self.graphs == MANY_GRAPHS:
            logger.warning(
                "dta: %d graphs were captured for one compiled callable, each taking seconds: TORCH_LOGS=recompiles "
                "says why",
                self.graphs,
            )

    def note_length(self, length: int, line: str) -> None:
        """Note a number of tokens that needs a program of its own because of the user's `line`.

        Raises `RefusalError` beyond `MOST_LENGTHS` of them.
        """
        if length not in self.lengths and len(self.lengths) == MOST_LENGTHS:
            raise RefusalError(
                f"this model needs a compilation for every number of tokens, and has had {MOST_LENGTHS}",
                where=line,
                expected=f"at most {MOST_LENGTHS} lengths: {', '.join(map(str, sorted(self.lengths)))}",
                got=f"{length} tokens",
                hint="pad batches to a few lengths (multiples of 1,024, say), or let Python not depend on the number: "
                "all tokens at once instead of slices of so many, tables for the longest sequence so far instead of "
                "the latest",
            )
        self.lengths.add(length)
        self.log_once(
            f"a graph holds for one number of tokens because of {line}: every length (up to {MOST_LENGTHS}) is "
            "compiled by itself, and takes as long as the first",
            logging.WARNING,
        )

    def log_once(self, line: str, level: int = logging.INFO) -> None:
        """Log a line the first time only, since a callable has many graphs (half a dozen for generation alone)."""
        if line not in self.logged:
            self.logged.add(line)
            logger.log(level, "dta: %s", line)


def current() -> Record:
    """Return the record of the callable being compiled (a new one if Dynamo runs without torch.compile)."""
    return _of_wrapper(frames.current_compile_wrapper())


class _Users:
    """Compiled callables that share an engine: equal ones reuse the code that Dynamo compiled for one of them.

    Dynamo keeps compiled code as long as the function's code object lives. So an engine is dropped once all its
    callables are gone, except for the latest few: a model that is created anew reuses those.
    """

    abandoned: ClassVar[collections.deque[_Users]] = collections.deque()

    def __init__(self) -> None:
        self.compilation = running.compiling()
        self.records: list[Record] = []
        self.alive: set[int] = set()

    def add(self, record: Record) -> None:
        """Add a callable, whose call is running now."""
        self._is_wanted()
        self.records.append(record)
        context = frames.calling_context()
        if context is not None and self.compilation is not None:
            self.alive.add(id(context))
            weakref.finalize(context, self.remove, id(context)).atexit = False

    def remove(self, context: int) -> None:
        """Remove a callable that is gone; after the last one, drop the engines that have been unused for longest."""
        self.alive.discard(context)
        if self.alive:
            return
        self._is_wanted()
        self.abandoned.append(self)
        while len(self.abandoned) > MOST_ABANDONED:
            oldest = self.abandoned.popleft()
            for record in oldest.records:
                record.engines.clear()
                record.plan = None
            if oldest.compilation is not None:
                recompile_limit.forget(*oldest.compilation)

    def _is_wanted(self) -> None:
        with contextlib.suppress(ValueError):
            self.abandoned.remove(self)


def recorded(engine: Engine) -> Callable[..., tuple[Any, ...]]:
    """Wrap an engine in a function that stores each call's plan in the record of the callable that was called."""
    users = _Users()
    users.add(current())

    def run(*args: Any) -> tuple[Any, ...]:
        before = engine.last_plan
        try:
            return engine(*args)
        finally:
            if engine.last_plan is not before:
                record = _of_wrapper(frames.calling_wrapper())
                record.plan = engine.last_plan
                if engine not in record.engines:
                    record.engines.append(engine)
                    users.add(record)

    return run


def of(compiled: Any) -> Record:
    """Return the record of a compiled function or module; raise `OptionError` for anything else."""
    wrapper = frames.compile_wrapper_of(compiled)
    if wrapper is None:
        raise OptionError(
            "not a compiled function or module",
            expected='the result of torch.compile(..., backend="dta"), or a module after .compile(backend="dta")',
            got=f"{type(compiled).__name__}",
        )
    return _of_wrapper(wrapper)


def _of_wrapper(wrapper: Any | None) -> Record:
    if wrapper is None:
        return Record()
    if not hasattr(wrapper, _ATTRIBUTE):
        setattr(wrapper, _ATTRIBUTE, Record())
    return getattr(wrapper, _ATTRIBUTE)  # type: ignore[no-any-return]


def with_graph_break(error: RefusalError, module: fx.GraphModule) -> RefusalError:
    """Return an error that names the graph break as the cause if one cut the model in two; else the error itself."""
    data = filter(sizes.is_data, module.graph.find_nodes(op="placeholder"))
    is_part = "requires a gradient" in error.got or any(node.meta["example_value"].requires_grad for node in data)
    resumes, given_up = breaks.resumes_after_a_break() or "___stack" in error.got, breaks.given_up()
    if not resumes and not (is_part and given_up):
        return error
    line = breaks.last_break[-1] if resumes and breaks.last_break else given_up if is_part else None
    reason = (line or "").lower()
    return RefusalError(
        "a graph break inside the model: what comes after it cannot run over the tree by itself",
        where=line or "TORCH_LOGS=graph_breaks shows the line",
        expected="one graph from token ids to the last attention layer",
        got=error.got or error.what,
        hint=next((hint for words, hint in HINTS if any(word in reason for word in words)), REMOVE),
    )
