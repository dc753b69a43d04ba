"""Proof by evaluation that an attention mask is causal (within a window, up to padding), on small concrete cases.

Under `torch.compile`, models build an explicit `[B, 1, S, S]` mask from `arange`, `cumsum` and integer inputs. Such a
mask subgraph is a pure function of sizes and a few `[B, S]` inputs, so it is run on cases that tell the supported
classes apart: several batch and token sizes, right, left and broken padding, shifted positions, sizes past any window.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.layouts import expression, through_copies
from dta_compile.passes.program import Layout, MaskClass, Mixed, Program, ancestors, where

# Windows up to this size are tried at their real size; larger ones with the constant replaced by small ones, because a
# case past the window needs a mask of its square.
LARGEST_TRIED_WINDOW = 600
SMALL_WINDOWS = (3, 5, 8)
ROLES = ("irrelevant", "positions", "valid")


@dataclasses.dataclass(frozen=True)
class Case:
    """One concrete evaluation: sizes, and the real tokens and positions of every row."""

    batch: int
    tokens: int
    valid: torch.Tensor  # bool [B, S]
    positions: torch.Tensor  # int64 [B, S], consecutive along each row


class MaskProof:
    """Classifies one mask node of a program (`classify`), or explains why it is none of the supported classes."""

    def __init__(self, program: Program, mask: fx.Node) -> None:
        self.program, self.mask = program, mask
        nodes = ancestors([mask])
        self.where = where(mask)
        if nodes & program.parameter_dependent:
            raise self._refusal("a bias computed from parameters", "add no learned bias to the attention scores")
        self._use_inputs([node for node in program.placeholders if node in nodes])
        self._refuse_ready_made_masks()

    def _use_inputs(self, inputs: list[fx.Node]) -> None:
        """Take the mask as a function of these values."""
        self.inputs = inputs
        self.row_inputs = [node for node in inputs if self._is_per_token(node)]
        nodes = ancestors([self.mask], stop=lambda node: node in inputs)
        self.module, self.constants = _extract(self.program, nodes, inputs, self.mask)

    def classify(self) -> MaskClass:
        """The class of the mask; raises `RefusalError` if no class fits all cases.

        The mask is first taken as a function of the call's inputs, then of the conditions on single tokens that the
        model derives from them (`ids != padding_id`).
        """
        failure = self._class_over_inputs()
        if isinstance(failure, str) and (conditions := self._conditions()):
            self._use_inputs(conditions)
            found = self._class_over_inputs()
            failure = failure if isinstance(found, str) else found
        if isinstance(failure, str):
            raise self._refusal(failure, "use a causal mask, a sliding window, and padding from one mask")
        return failure

    def _conditions(self) -> list[fx.Node]:
        """Boolean `[B, S]` values that the mask reads, and the inputs that it reads otherwise."""
        nodes = ancestors([self.mask])
        conditions = {
            through_copies(node)
            for node in nodes
            if node.op != "placeholder"
            and self._is_per_token(node)
            and node.meta["val"].dim() == 2
            and node.meta["val"].dtype is torch.bool
        }
        read = ancestors([self.mask], stop=lambda node: node in conditions)
        outermost = [node for node in self.program.graph.nodes if node in conditions & read]
        return outermost and [node for node in self.program.placeholders if node in read] + outermost

    def _class_over_inputs(self) -> MaskClass | str:
        """The class that fits all cases for some roles of the inputs, or why none does."""
        failure = f"a mask that depends on {len(self.row_inputs)} inputs"
        rows = self.row_inputs if len(self.row_inputs) <= 4 else None
        for roles in itertools.product(ROLES, repeat=len(rows)) if rows is not None else ():
            if roles.count("valid") > 1:
                continue
            outcome = self._window_for(dict(zip(self.row_inputs, roles, strict=True)))
            if isinstance(outcome, str):
                failure = outcome
                continue
            return MaskClass(
                window=outcome[0],
                valid=next((n for n, role in zip(self.row_inputs, roles, strict=True) if role == "valid"), None),
                positions=tuple(n for n, role in zip(self.row_inputs, roles, strict=True) if role == "positions"),
            )
        return failure

    def _window_for(self, roles: dict[fx.Node, str]) -> tuple[int | None] | str:
        """`(window,)` if every case fits one window (None: unbounded) under these roles, else what went wrong."""
        constants = sorted(self.constants)
        small = [c for c in constants if c <= LARGEST_TRIED_WINDOW]
        large = [c for c in constants if c > LARGEST_TRIED_WINDOW]
        found = self._common_window(roles, [7, 13, *(c + 5 for c in small)], {})
        if isinstance(found, str) or found[0] is not None:
            return found
        for constant in large:
            replaced = [self._common_window(roles, [w + 5, 2 * w + 3], {constant: w}) for w in SMALL_WINDOWS]
            widths = [outcome if isinstance(outcome, str) else outcome[0] for outcome in replaced]
            offsets = {w - s for w, s in zip(widths, SMALL_WINDOWS, strict=True) if isinstance(w, int)}
            if any(isinstance(width, str) for width in widths):
                return next(width for width in widths if isinstance(width, str))
            if any(width is None for width in widths):
                if not all(width is None for width in widths):
                    return f"what the constant {constant} does to the mask is unclear"
                continue
            if len(offsets) != 1:
                return f"what the constant {constant} does to the mask is unclear"
            return (constant + offsets.pop(),)
        return (None,)

    def _common_window(
        self, roles: dict[fx.Node, str], token_sizes: list[int], constants: dict[int, int]
    ) -> tuple[int | None] | str:
        """`(window,)` if the cases of all sizes agree on one window (None: no size shows one), else what went wrong."""
        padded = "valid" in roles.values()
        windows: dict[int, int | None] = {}
        for tokens in token_sizes:
            unpadded, *others = _cases(tokens, self._batch_size())
            windows[tokens] = _reach(self._evaluate(unpadded, roles, constants), tokens)
            for case in (unpadded, *others):
                problem = _difference(self._evaluate(case, roles, constants), case, padded, windows[tokens])
                if problem:
                    return problem
        found = {window for window in windows.values() if window is not None}
        if len(found) > 1 or any(w is None and tokens > min(found) for tokens, w in windows.items() if found):
            return f"the window differs between sizes: {windows}"
        return (found.pop() if found else None,)

    def _evaluate(self, case: Case, roles: dict[fx.Node, str], constants: dict[int, int]) -> torch.Tensor:
        """Allowed pairs, bool `[B or 1, S, S]`; raises if the mask holds anything but allowed and forbidden."""
        symbols = self._bind_symbols(case)
        arguments = [self._argument(node, case, roles.get(node), symbols) for node in self.inputs]
        module = self.module if not constants else _with_constants(self.module, constants)
        with torch.no_grad(), torch._C._DisableAutocast():
            values = module(*arguments)
        values = values[(None,) * (4 - values.dim())]  # masks broadcast to [batch, heads, queries, keys]
        if values.shape[1] != 1:
            raise self._refusal(
                "a mask that differs between heads (ALiBi, relative bias)", "use rotary or learned positions"
            )
        values = values[:, 0]
        if values.dtype is torch.bool:
            return values
        forbidden = values <= -1e4
        if not bool((forbidden | (values == 0)).all()):
            raise self._refusal("an additive bias with values other than 0 and -inf", "use a boolean or 0/-inf mask")
        return ~forbidden

    def _argument(self, node: fx.Node, case: Case, role: str | None, symbols: dict[sympy.Symbol, int]) -> Any:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return int(expression(value).subs(symbols)) if isinstance(value, torch.SymInt) else value
        shape = [int(expression(size).subs(symbols)) for size in value.shape]
        if role == "valid":
            return _fit(case.valid, shape).to(value.dtype)
        if role == "positions":
            return _fit(case.positions, shape).to(value.dtype)
        return self._arbitrary(shape, case.tokens).to(value.dtype)

    def _arbitrary(self, shape: list[int], seed: int) -> torch.Tensor:
        """Integers that hit every constant of the mask graph often: a padding id must not pass for irrelevant."""
        generator = torch.Generator().manual_seed(seed)
        special = torch.tensor(sorted({-100, -1, 0, 1, *self.constants, *(-c for c in self.constants)}))
        values = torch.randint(0, 50, shape, generator=generator)
        chosen = special[torch.randint(0, len(special), shape, generator=generator)]
        return torch.where(torch.rand(shape, generator=generator) < 0.5, chosen, values)

    def _bind_symbols(self, case: Case) -> dict[sympy.Symbol, int]:
        """Numbers for all size symbols such that the batch and token sizes come out as the case says."""
        program = self.program
        symbols: dict[sympy.Symbol, int] = {}
        if program.batch is not None and program.batch.free_symbols:
            symbols[next(iter(program.batch.free_symbols))] = case.batch
        assert program.tokens is not None
        parts = sorted(program.tokens.free_symbols, key=str)
        for part in parts[1:]:
            symbols[part] = 2
        rest = sympy.solve(program.tokens.subs(symbols) - case.tokens, parts[0])
        symbols[parts[0]] = int(rest[0])
        for node in self.inputs:
            value = node.meta["val"]
            shape = value.shape if isinstance(value, torch.Tensor) else [value]
            for symbol in {
                s for size in shape if isinstance(size, torch.SymInt) for s in expression(size).free_symbols
            }:
                symbols.setdefault(symbol, 4)
        return symbols

    def _batch_size(self) -> int:
        """Sequences of a case: some, or as many as the graph is traced for (one, if it has no batch axis)."""
        batch = self.program.batch
        if batch is None:
            return 1
        return 4 if batch.free_symbols else int(batch)

    def _is_per_token(self, node: fx.Node) -> bool:
        value = self.program.values[node]
        return isinstance(value, Layout) and value.token_dim is not None

    def _refuse_ready_made_masks(self) -> None:
        for node in self.inputs:
            if isinstance(self.program.values[node], Mixed):
                raise self._refusal(
                    "a mask over pairs of tokens given as an input", "pass a [batch, tokens] padding mask instead"
                )

    def _refusal(self, got: str, hint: str) -> RefusalError:
        return RefusalError(
            "this attention mask cannot be proven causal",
            where=self.where,
            expected="causal, or causal within a sliding window, with padding from one [batch, tokens] mask",
            got=got,
            hint=hint,
        )


def _extract(
    program: Program, nodes: set[fx.Node], inputs: list[fx.Node], mask: fx.Node
) -> tuple[fx.GraphModule, set[int]]:
    """The subgraph that computes the mask, on the CPU like the cases, and integers in it that could be a window."""
    cpu = torch.device("cpu")

    def on_cpu(arg: Any) -> Any:
        return cpu if isinstance(arg, torch.device) else arg

    graph, copies = fx.Graph(), {}
    constants: set[int] = set()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in program.graph.nodes:
        if node in nodes and node not in copies:
            copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
            copy.args, copy.kwargs = (fx.node.map_aggregate(given, on_cpu) for given in (copy.args, copy.kwargs))
            constants |= {abs(c) for c in _constants(program, node) if 1 < abs(c) < 2**31}
    graph.output(copies[mask])
    return fx.GraphModule(program.module, graph).cpu(), constants


def _constants(program: Program, node: fx.Node) -> Iterator[int]:
    """Integers among a node's arguments, or in the small tensor that it stands for."""
    if node.op != "get_attr":
        yield from _integers(node.args)
        return
    value = getattr(program.module, str(node.target), None)
    if isinstance(value, torch.Tensor) and value.numel() <= 16 and not value.is_floating_point():
        yield from value.flatten().tolist()


def _integers(args: Any) -> Iterator[int]:
    if isinstance(args, (tuple, list)):
        for arg in args:
            yield from _integers(arg)
    elif isinstance(args, int) and not isinstance(args, bool):
        yield args


def _with_constants(module: fx.GraphModule, constants: dict[int, int]) -> fx.GraphModule:
    """A copy of the mask graph with some integer constants replaced (of either sign)."""

    def replace(arg: Any) -> Any:
        if isinstance(arg, int) and not isinstance(arg, bool) and abs(arg) in constants:
            return constants[abs(arg)] * (1 if arg > 0 else -1)
        return arg

    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.op != "placeholder":
            copies[node].args = fx.node.map_aggregate(copies[node].args, replace)
    return fx.GraphModule(module, graph)


def _fit(rows: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """`[B, S]` cut or repeated to an input's own shape (a batch of one, or a part of the tokens)."""
    return rows[: shape[0], -shape[1] :] if len(shape) == 2 else rows[0, -shape[0] :]


def _cases(tokens: int, batch: int) -> Iterator[Case]:
    """Cases of one size: no padding (first), right padding, left padding, padding anywhere."""
    columns = torch.arange(tokens)
    generator = np.random.default_rng(tokens)
    lengths = torch.from_numpy(generator.integers(1, tokens, size=(batch, 1)))
    holes = torch.from_numpy(generator.random((batch, tokens)) < 0.7)
    offsets = torch.from_numpy(generator.integers(0, 5, size=(batch, 1)))
    everything = torch.ones(batch, tokens, dtype=torch.bool)
    # Positions from 0 on, too: else a padding mask would pass for positions, which are never 0.
    for valid, first in (
        (everything, 0),
        (columns < lengths, offsets),
        (columns >= tokens - lengths, 0),
        (holes, offsets),
    ):
        yield Case(batch, tokens, valid, first + columns.expand(batch, tokens))


def _distance(tokens: int) -> torch.Tensor:
    """Query position minus key position, `[S, S]`."""
    return torch.arange(tokens)[:, None] - torch.arange(tokens)[None]


def _reach(allowed: torch.Tensor, tokens: int) -> int | None:
    """The window that an unpadded mask shows: its farthest allowed distance plus one, None if nothing is cut off."""
    window = int(torch.where(allowed, _distance(tokens), -1).amax()) + 1
    return window if 0 < window < tokens else None


def _difference(allowed: torch.Tensor, case: Case, padded: bool, window: int | None) -> str | None:
    """What distinguishes the allowed pairs (of real queries) from the class, or None if they are the same."""
    distance = _distance(case.tokens)
    valid = case.valid if padded else torch.ones_like(case.valid)
    queries = valid[:, :, None]
    allowed = allowed.expand(case.batch, case.tokens, case.tokens) & queries
    if bool((allowed & (distance < 0)).any()):
        return "a mask that lets tokens attend to later ones"
    expected = valid[:, None, :] & queries & (distance >= 0)
    if window is not None:
        expected &= distance < window
    if not torch.equal(allowed, expected):
        return "a mask that hides earlier tokens in another way than padding or a sliding window"
    return None
