"""The rules of the token axis against torch's own samples (OpInfo) of every operator.

What a rule calls token-wise has to commute with permuting and dropping tokens and sequences: the operator on picked
tokens gives the picked tokens of its result, along the axes that the rule says, whatever labels its operands have.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dta_compile.executable.layouts import Axis, Flat, Frame, Layout, flat
from dta_compile.passes.axes.layouts import Arguments, MixesTokens, Rule
from dta_compile.passes.axes.tokenwise_operators import TOKEN_RULES, rule_for
from dta_compile.passes.graphs.operators import TAKE_A_SHAPE

pytest.importorskip("expecttest", reason="torch's own samples need it")
from torch.testing._internal.common_methods_invocations import op_db

aten = torch.ops.aten
SAMPLES_PER_INFO, CALLS_PER_OPERATOR, LABELLINGS_PER_CALL = 8, 6, 90
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)


# Operators with a rule that none of torch's samples calls (polynomials of or with a number aside).
WITHOUT_SAMPLES = {
    f"aten.{name}"
    for name in [
        "__lshift__.Scalar",
        "__lshift__.Tensor",
        "__rshift__.Scalar",
        "__rshift__.Tensor",
        "_fused_rms_norm.default",
        "bitwise_and.Scalar",
        "bitwise_and.Scalar_Tensor",
        "bitwise_left_shift.Scalar_Tensor",
        "bitwise_left_shift.Tensor_Scalar",
        "bitwise_or.Scalar",
        "bitwise_or.Scalar_Tensor",
        "bitwise_right_shift.Scalar_Tensor",
        "bitwise_right_shift.Tensor_Scalar",
        "bitwise_xor.Scalar",
        "bitwise_xor.Scalar_Tensor",
        "clamp_max.default",
        "contiguous.default",
        "copy.default",
        "copysign.Scalar",
        "div.Scalar_mode",
        "fill.Tensor",
        "fmod.Scalar",
        "gelu_backward.default",
        "gt.Scalar",
        "lift_fresh_copy.default",
        "logit_backward.default",
        "pow.Scalar",
        "real.default",
        "remainder.Scalar_Tensor",
        "reshape.default",
        "resolve_conj.default",
        "scatter.value",
        "sigmoid_backward.default",
        "special_xlog1py.other_scalar",
        "special_xlog1py.self_scalar",
        "special_zeta.other_scalar",
        "special_zeta.self_scalar",
        "tanh_backward.default",
        "threshold_backward.default",
        "xlogy.Scalar_Other",
        "xlogy.Scalar_Self",
        "zero.default",
    ]
}
# Operators whose samples have nothing but features by their rule: kernels wider than a token, all dimensions taken.
NEVER_TOKEN_WISE = {
    "aten.all.dim",
    "aten.amin.default",
    "aten.any.dim",
    "aten.convolution.default",
    "aten.diagonal.default",
    "aten.ge.Scalar",
    "aten.slice_scatter.default",
}


ANY_AXIS = [
    *Axis,
    *(
        flat(factors)
        for n in (2, 3)
        for factors in (
            (Axis.TOKEN, n),
            (n, Axis.TOKEN),
            (Axis.BATCH, n),
            (Axis.BATCH, Axis.TOKEN, n),
            (Axis.BATCH, n, Axis.TOKEN),
        )
    ),
]


@dataclasses.dataclass
class Call:
    """One call of an ATen operator, with its arguments and results."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def signature(self) -> str:
        """Calls of one signature show the same of a rule."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return str([(one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in leaves])


class _Recorder(TorchDispatchMode):
    """Collects calls of operators with a rule, a few of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, dict[str, Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if rule_for(func) is not None and _is_recorded(func):
            known = self.calls.setdefault(func, {})
            call = Call(func, args, kwargs, result)
            if len(known) < CALLS_PER_OPERATOR and call.signature not in known and _is_small(call):
                known[call.signature] = Call(func, *pytree.tree_map(_copy, (args, kwargs, result)))
        return result


def _is_recorded(target: Any) -> bool:
    """Functions that are not taken apart into others before they are called."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return not target._schema.is_mutable and not composite


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_small(call: Call) -> bool:
    tensors = [one for one in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(one, torch.Tensor)]
    axes = [size for one in tensors for size in one.shape if size > 1]
    return bool(axes) and all(0 < one.numel() <= 4000 for one in tensors)


def _recorded() -> dict[Any, dict[str, Call]]:
    torch.manual_seed(0)
    recorder = _Recorder()
    # Samples seed all devices time and again, which formats a stack trace for every device that is not there.
    seed_cpu = mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed)
    with warnings.catch_warnings(), torch.no_grad(), seed_cpu:
        warnings.simplefilter("ignore")
        for info in op_db:
            dtype = next((one for one in DTYPES if one in info.dtypes), None)
            if dtype is None:
                continue
            for sample in itertools.islice(info.sample_inputs("cpu", dtype), SAMPLES_PER_INFO):
                with recorder:
                    try:
                        info.op(sample.input, *sample.args, **sample.kwargs)
                    except Exception:
                        continue
    return recorder.calls


class _Case:
    """A call as a node of a graph, with labels on the dimensions of its operands."""

    def __init__(self, call: Call) -> None:
        self.call, graph, self.tensors = call, fx.Graph(), dict[fx.Node, torch.Tensor]()

        def placeholder(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            node = graph.placeholder(f"operand_{len(self.tensors)}")
            node.meta["val"] = self.tensors[node] = leaf
            return node

        args, kwargs = pytree.tree_map(placeholder, (call.args, call.kwargs))
        self.node = graph.call_function(call.target, args, kwargs)
        self.node.meta["val"] = call.result
        self.first = next(iter(self.tensors))

    def check(self, rule: Rule, layouts: dict[fx.Node, Layout], sizes: Sizes, dense: Callable[[fx.Node], bool]) -> bool:
        """Whether the rule calls the operator token-wise with these layouts; fails if that is wrong."""
        arguments = Arguments(layouts, dense)
        try:
            found = rule(self.node, arguments)
        except MixesTokens:
            return False
        if _is_window(self.node, arguments) or self.call.target is aten.empty_like.default:
            return True  # chunks skip the first, and the second has no values
        results = self.call.result if isinstance(found, tuple) else (self.call.result,)
        expected = [sizes.picked(one, layout) for one, layout in zip(results, _tuple(found), strict=True)]
        args, kwargs = fx.map_arg(
            (self.node.args, self.node.kwargs), lambda node: sizes.picked(self.tensors[node], arguments[node])
        )
        if self.call.target in TAKE_A_SHAPE:
            args = (args[0], expected[0].shape)
        actual = self.call.target(*args, **kwargs)
        for mine, theirs in zip(_tuple(actual), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12, equal_nan=True)
        return True


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many sequences and tokens there are, and which of them stay, in which order."""

    batch: int
    tokens: int

    def picked(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The entries of the sequences and tokens that stay."""
        assert len(layout.dims) == value.dim()
        rows, columns = (torch.arange(size).roll(1)[: max(2, size - 1)] for size in (self.batch, self.tokens))
        columns = columns.flip(0)
        chosen = {Axis.BATCH: rows, Axis.TOKEN: columns}
        for dim, axis in enumerate(layout.dims):
            if axis is not None:
                assert value.shape[dim] == self.entries(axis), f"{axis} of size {value.shape[dim]}"
                index = torch.zeros(1, dtype=torch.int64)
                for factor in _factors(axis):
                    own = torch.arange(factor) if isinstance(factor, int) else chosen[factor]
                    index = (index[:, None] * self.entries(factor) + own).reshape(-1)
                value = value.index_select(dim, index)
        return value

    def entries(self, axis: Axis | Flat | int) -> int:
        known = {Axis.BATCH: self.batch, Axis.TOKEN: self.tokens}
        return math.prod(one if isinstance(one, int) else known[one] for one in _factors(axis))

    def layouts(self, value: torch.Tensor) -> list[Layout]:
        """All ways to label the dimensions of a value, no axis twice."""
        options = [[None, *(axis for axis in ANY_AXIS if self.entries(axis) == size)] for size in value.shape]
        frame = Frame(sympy.Integer(0), sympy.Integer(self.tokens))
        found = []
        for dims in itertools.product(*options):
            axes = [axis for axis in dims if axis is not None]
            of_tokens = sum(axis.is_over_tokens for axis in axes)
            is_flat = any(isinstance(axis, Flat) for axis in axes)
            if of_tokens < 2 and sum(a.is_over_sequences for a in axes) < 2 and of_tokens >= is_flat:
                found.append(Layout(dims, frame if any(a.is_over_tokens for a in axes) else None))
        return found


def _factors(axis: Axis | Flat | int) -> tuple[Axis | int, ...]:
    flattened = {Axis.ROWS: (Axis.BATCH, Axis.TOKEN), Axis.TOKEN_ROWS: (Axis.TOKEN, Axis.BATCH)}
    return axis.factors if isinstance(axis, Flat) else flattened.get(axis, (axis,))


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _is_window(node: fx.Node, arguments: Arguments) -> bool:
    dim = node.args[1] if len(node.args) > 1 else 0
    return node.target is aten.slice.Tensor and arguments[node.args[0]].dims[dim] is not None


def _sizes_to_try(tensors: list[torch.Tensor]) -> Iterator[Sizes]:
    """Numbers of sequences and tokens that the dimensions of the operands show."""
    shown = sorted({size for one in tensors for size in one.shape if 2 <= size <= 60})
    for batch, tokens in itertools.product(shown, shown):
        yield Sizes(batch, tokens)
    for rows in shown:
        batch = next((n for n in range(2, rows) if rows % n == 0 and rows // n > 1), None)
        if batch:
            yield Sizes(batch, rows // batch)


def _labellings(case: _Case, seed: int) -> Iterator[tuple[dict[fx.Node, Layout], Sizes]]:
    """Some ways to label the operands, at least one of them; the first layout of each has no labels."""
    tensors, generator = list(case.tensors.values()), random.Random(seed)
    every = [(sizes, [sizes.layouts(one) for one in tensors]) for sizes in _sizes_to_try(tensors)]
    for _ in range(LABELLINGS_PER_CALL if every else 0):
        sizes, options = generator.choice(every)
        layouts = [generator.choice(some) if generator.random() < 0.6 else some[0] for some in options]
        if any(layout.labelled for layout in layouts):
            yield dict(zip(case.tensors, layouts, strict=True)), sizes


@pytest.fixture(scope="module")
def recorded() -> dict[Any, dict[str, Call]]:
    with ThreadPoolExecutor(1) as thread:  # every sample looks at the whole stack, which is deep under pytest
        return thread.submit(_recorded).result()


def test_what_a_rule_calls_token_wise_commutes_with_picking_tokens(recorded: dict[Any, dict[str, Call]]) -> None:
    wrong: dict[str, str] = {}
    accepted: set[str] = set()
    for target, calls in recorded.items():
        rule = rule_for(target)
        assert rule is not None
        for seed, call in enumerate(calls.values()):
            case = _Case(call)
            for number, (layouts, sizes) in enumerate(_labellings(case, seed)):
                dense = (lambda node: False) if number % 2 else (lambda node, case=case: node is not case.first)
                try:
                    accepted |= {str(target)} if case.check(rule, layouts, sizes, dense) else set()
                except Exception as error:
                    labels = [str(layout) for layout in layouts.values()]
                    wrong.setdefault(str(target), f"{labels} {sizes} {call.signature}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert {str(target) for target in recorded} - accepted == NEVER_TOKEN_WISE


def test_operators_without_samples(recorded: dict[Any, dict[str, Call]]) -> None:
    packets = [getattr(aten, name) for name in dir(aten)]
    overloads = [
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    ]
    elementwise = [one for one in overloads if rule_for(one) is not None and _is_recorded(one)]
    known = {str(target) for target in [*TOKEN_RULES, *elementwise] if getattr(target, "namespace", "") == "aten"}
    missing = known - {str(target) for target in recorded}
    polynomials = {name for name in missing if "_polynomial_" in name and name.endswith("_scalar")}
    assert missing - polynomials == WITHOUT_SAMPLES
