"""Interpret values computed from an LM head's logits: scaled logits, log-probs, probabilities, and their products.

`Reading` follows the uses of a linear layer to the reductions over the vocabulary at which all of them must end:
entries gathered by labels, log-sum-exps, expectations, sums, the largest entries. If a value of the vocabulary's
size has any other use, there are no reductions, and the pass `lm_head` leaves the layer as it is.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dta_compile.passes.graphs.arguments import argument, dim_of
from dta_compile.passes.graphs.nodes import is_float
from dta_compile.passes.graphs.operators import CASTS, COPIES, KEEP_ORDER, PRODUCTS, QUOTIENTS, TRANSPOSITIONS, aten

Step = tuple[bool, Any]
CAST = {"dtype", "device", "layout", "memory_format"}  # keywords that change numbers at most by rounding


class Kind(enum.Enum):
    """Functions of the logits."""

    LOGITS = "z"
    LOG_PROBS = "log p"
    PROBS = "p"
    PROBS_LOG_PROBS = "p log p"
    PROBS_LOGITS = "p z"
    LOG_RATIO = "log p - x"  # x and w: such values of another linear layer
    FROM = "p (log p - x)"
    TO = "w (log p - x)"
    WEIGHTED_PROBS = "p x"
    WEIGHTED_LOG_PROBS = "w log p"
    LOGSUMEXP = "log sum exp z"  # the only kind without a vocabulary dimension


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Bias and steps from the linear layer's output to logits z; a step is a division (True) or a product (False).

    Attributes:
        outer: steps after a tanh, which follows `steps`, as in a soft cap; None: there is no tanh.
    """

    bias: fx.Node | None = None
    steps: tuple[Step, ...] = ()
    outer: tuple[Step, ...] | None = None

    def then(self, divides: bool, by: Any) -> Scaling:
        """Return the scaling with one more step."""
        if self.outer is None:
            return dataclasses.replace(self, steps=(*self.steps, (divides, by)))
        return dataclasses.replace(self, outer=(*self.outer, (divides, by)))

    @property
    def scales(self) -> list[Any]:
        """Return the numbers and nodes of all steps."""
        return [by for _, by in (*self.steps, *(self.outer or ()))]


@dataclasses.dataclass(frozen=True)
class Meaning:
    """A value as `factor` times `kind` of logits with a `scaling`.

    Attributes:
        detached: no gradient flows through it.
        rounded: it was cast to fewer digits, or computed in 16 bits, so that entries may have become equal.
    """

    kind: Kind
    scaling: Scaling = Scaling()
    factor: float = 1.0
    detached: bool = False
    rounded: bool = False


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A node that reduces a value over the vocabulary; `labels` are the indices of a gather."""

    node: fx.Node
    meaning: Meaning
    labels: fx.Node | None = None


class Reading:
    """Meanings of all values computed from the logits of one linear layer.

    Args:
        linear: the layer's output, `[rows, V]`.
        trained: nodes that depend on trained parameters, which scales must not.

    Attributes:
        reductions: the reductions that all uses end at, in graph order; empty if the logits have another use.
    """

    def __init__(self, linear: fx.Node, trained: set[fx.Node]) -> None:
        self.trained, self.vocabulary, self.dtype = trained, linear.meta["val"].shape[1], linear.meta["val"].dtype
        self.meanings: dict[fx.Node, Meaning] = {}
        self.reductions: list[Reduction] = []
        bias = linear.args[0] if linear.target is aten.addmm.default else None
        if bias is not None and self._sizes(bias) != [str(self.vocabulary)]:
            return
        self.meanings[linear] = Meaning(Kind.LOGITS, Scaling(bias))
        node = linear.next
        while node.op != "root":
            known = [self.meanings[arg] for arg in node.all_input_nodes if arg in self.meanings]
            if known and not self._read(node) and any(meaning.kind is not Kind.LOGSUMEXP for meaning in known):
                self.reductions = []
                return
            node = node.next

    def vocabulary_dim(self, node: fx.Node) -> int:
        """Return the dimension of a value that runs over the vocabulary."""
        sizes = node.meta["val"].shape
        return next(dim for dim, size in enumerate(sizes) if isinstance(size, int) and size == self.vocabulary)

    def _read(self, node: fx.Node) -> bool:
        rule = READING_RULES.get(node.target)
        result = rule(self, node) if rule is not None and not (node.kwargs.keys() - CAST) else None
        if isinstance(result, Reduction):
            self.reductions.append(result)
            if node.target is aten.logsumexp.default:
                self.meanings[node] = dataclasses.replace(result.meaning, kind=Kind.LOGSUMEXP)
        elif result is not None:
            is_computed = result.kind is not Kind.LOGITS or result.scaling.scales or result.scaling.outer is not None
            is_rounded = bool(is_computed) and node.meta["val"].dtype.itemsize < 4
            self.meanings[node] = dataclasses.replace(result, rounded=result.rounded or is_rounded)
        return result is not None

    # Rules: the meaning of a node, given the meanings of its arguments; None if it is unknown.

    def _copy(self, node: fx.Node) -> Meaning | None:
        value, source = node.meta["val"], node.args[0].meta["val"]
        if not value.is_floating_point() or value.device != source.device:
            return None
        meaning = self.meanings[node.args[0]]
        detached = meaning.detached or node.target is aten.detach.default
        rounded = meaning.rounded or torch.finfo(value.dtype).eps > torch.finfo(source.dtype).eps
        return dataclasses.replace(meaning, detached=detached, rounded=rounded)

    def _reshape(self, node: fx.Node) -> Meaning | None:
        """Keep the meaning if a reshape only adds or removes dimensions of size one."""
        before, after = self._long_dims(node.args[0]), self._long_dims(node)
        return self.meanings[node.args[0]] if before == after else None

    def _transpose(self, node: fx.Node) -> Meaning | None:
        return self.meanings[node.args[0]]

    def _negate(self, node: fx.Node) -> Meaning | None:
        return self._scaled(node.args[0], False, -1.0)

    def _divide(self, node: fx.Node) -> Meaning | None:
        value, by = node.args
        return self._scaled(value, True, by) if value in self.meanings and by not in self.meanings else None

    def _multiply(self, node: fx.Node) -> Meaning | None:
        left, right = node.args
        if left in self.meanings and right in self.meanings:
            return self._product(node)
        value, by = (left, right) if left in self.meanings else (right, left)
        if isinstance(by, fx.Node) and self._sizes(by) == self._sizes(value):
            meaning = self.meanings[value]
            kind = WEIGHTED.get(meaning.kind) if meaning.factor == 1 or meaning.kind is Kind.LOG_RATIO else None
            return dataclasses.replace(meaning, kind=kind) if kind is not None else None
        return self._scaled(value, False, by)

    def _product(self, node: fx.Node) -> Meaning | None:
        left, right = (self.meanings[arg] for arg in node.args)
        if left.kind is not Kind.PROBS:
            left, right = right, left
        kinds = {Kind.LOG_PROBS: Kind.PROBS_LOG_PROBS, Kind.LOGITS: Kind.PROBS_LOGITS, Kind.LOG_RATIO: Kind.FROM}
        if left.kind is not Kind.PROBS or right.kind not in kinds or not _of_same_logits(node, left, right):
            return None
        joined = dataclasses.replace(left, kind=kinds[right.kind], factor=left.factor * right.factor)
        return dataclasses.replace(joined, detached=left.detached or right.detached)

    def _scaled(self, value: fx.Node, divides: bool, by: Any) -> Meaning | None:
        meaning = self.meanings[value]
        if meaning.kind is Kind.LOGITS:
            scaling = meaning.scaling.then(divides, by)
            return dataclasses.replace(meaning, scaling=scaling) if self._is_scale(value, by) else None
        if not _is_number(by):
            return None
        return dataclasses.replace(meaning, factor=meaning.factor / by if divides else meaning.factor * by)

    def _tanh(self, node: fx.Node) -> Meaning | None:
        meaning = self.meanings[node.args[0]]
        if meaning.kind is not Kind.LOGITS or meaning.scaling.outer is not None:
            return None
        return dataclasses.replace(meaning, scaling=dataclasses.replace(meaning.scaling, outer=()))

    def _is_scale(self, value: fx.Node, by: Any) -> bool:
        """Return whether `by` is a number other than zero, or a tensor without gradient that has one number per row, or
        one for all."""
        if not isinstance(by, fx.Node):
            return _is_number(by)
        scale = by.meta["val"]
        return by not in self.trained and scale.is_floating_point() and self._is_per_row(value, by)

    def _is_per_row(self, value: fx.Node, other: fx.Node) -> bool:
        """Return whether `other` broadcasts to `value` with one number per row, or one for all."""
        shape, sizes = self._sizes(value), self._sizes(other)
        shape[self.vocabulary_dim(value)] = "1"
        missing = len(shape) - len(sizes)
        sizes = ["1"] * missing + sizes
        return missing >= 0 and all(size in ("1", whole) for size, whole in zip(sizes, shape, strict=True))

    def _add(self, node: fx.Node) -> Meaning | None:
        """Read a sum that directly follows the linear layer as logits with a bias."""
        left, right = node.args
        value, bias = (left, right) if left in self.meanings else (right, left)
        meaning = self.meanings[value]
        first = meaning == Meaning(Kind.LOGITS)
        if not first or not isinstance(bias, fx.Node) or tuple(bias.meta["val"].shape) != (self.vocabulary,):
            return None
        last = self.vocabulary_dim(value) == value.meta["val"].dim() - 1
        unchanged = self.dtype == value.meta["val"].dtype == bias.meta["val"].dtype == node.meta["val"].dtype
        return dataclasses.replace(meaning, scaling=Scaling(bias)) if last and unchanged else None

    def _subtract(self, node: fx.Node) -> Meaning | None:
        """Read `z - logsumexp(z)` as log-probs, and log-probs less those of another layer as a ratio."""
        left, right = node.args
        if (left in self.meanings) != (right in self.meanings):
            own, other, sign = (left, right, 1) if left in self.meanings else (right, left, -1)
            meaning = self.meanings[own]
            is_whole = isinstance(other, fx.Node) and self._sizes(own) == self._sizes(other)
            fits = is_whole and meaning.kind is Kind.LOG_PROBS and meaning.factor == 1
            return dataclasses.replace(meaning, kind=Kind.LOG_RATIO, factor=sign) if fits else None
        value, normaliser = (self.meanings.get(arg) for arg in node.args)
        if value is None or normaliser is None or not _of_same_logits(node, value, normaliser):
            return None
        is_log_prob = value.kind is Kind.LOGITS and normaliser.kind is Kind.LOGSUMEXP and normaliser.factor == 1
        fits = is_log_prob and self._is_per_row(*node.args)
        detached = value.detached or normaliser.detached
        return dataclasses.replace(value, kind=Kind.LOG_PROBS, detached=detached) if fits else None

    def _softmax(self, node: fx.Node) -> Meaning | None:
        meaning = self.meanings[node.args[0]]
        normalised = meaning.kind is Kind.LOG_PROBS and meaning.factor == 1
        return self._of_logits(node, Kind.PROBS) if meaning.kind is Kind.LOGITS or normalised else None

    def _log_softmax(self, node: fx.Node) -> Meaning | None:
        return self._of_logits(node, Kind.LOG_PROBS) if self._kind(node) is Kind.LOGITS else None

    def _of_logits(self, node: fx.Node, kind: Kind) -> Meaning | None:
        over = self._is_over_vocabulary(node.args[0], [node.args[1]])
        return dataclasses.replace(self.meanings[node.args[0]], kind=kind) if over else None

    def _exponential(self, node: fx.Node) -> Meaning | None:
        meaning = self.meanings[node.args[0]]
        is_log = meaning.kind is Kind.LOG_PROBS and meaning.factor == 1
        return dataclasses.replace(meaning, kind=Kind.PROBS) if is_log else None

    def _gather(self, node: fx.Node) -> Reduction | None:
        source, dim, labels = node.args[:3]
        if self._kind(node) not in GATHERED or labels in self.meanings:
            return None
        shape, picked = self._sizes(source), self._sizes(labels)
        if not self._is_over_vocabulary(source, [dim]) or not isinstance(labels.meta["val"].shape[dim], int):
            return None
        shape[dim] = picked[dim]
        return Reduction(node, self.meanings[source], labels) if shape == picked else None

    def _reduced(self, node: fx.Node) -> Reduction | None:
        over = self._kind(node) in REDUCED[node.target] and self._is_over_vocabulary(*node.args[:2])
        return Reduction(node, self.meanings[node.args[0]]) if over and is_float(node) else None

    def _largest(self, node: fx.Node) -> Reduction | None:
        """Read the argmax of log-probs or probabilities as that of the logits."""
        meaning, dims = self.meanings[node.args[0]], node.args[1:2]
        over = (
            self._rises(node.args[0])
            and isinstance(dims[0] if dims else None, int)
            and self._is_over_vocabulary(node.args[0], [*dims])
        )
        return Reduction(node, meaning) if over else None

    def _top(self, node: fx.Node) -> Reduction | None:
        """Read their largest entries as those of the logits, whose values are gathered by index."""
        meaning, is_largest = self.meanings[node.args[0]], argument(node, "largest") is not False
        fits = (
            self._rises(node.args[0])
            and is_largest
            and isinstance(node.args[1], int)
            and self._is_over_vocabulary(node.args[0], [dim_of(node)])
        )
        return Reduction(node, meaning) if fits else None

    def _rises(self, value: fx.Node) -> bool:
        """Return whether a value rises with the logits, entry by entry, and none became equal."""
        meaning = self.meanings[value]
        return meaning.kind in GATHERED and meaning.factor > 0 and not meaning.rounded

    def _kind(self, node: fx.Node) -> Kind | None:
        meaning = self.meanings.get(node.args[0])
        return meaning.kind if meaning is not None else None

    def _is_over_vocabulary(self, value: fx.Node, dims: list[int]) -> bool:
        rank = value.meta["val"].dim()
        return [dim % rank for dim in dims or range(rank)] == [self.vocabulary_dim(value)]

    def _sizes(self, node: fx.Node) -> list[str]:
        """Return sizes as text: symbolic ones must not be compared by their hints."""
        return [str(size) for size in node.meta["val"].shape]

    def _long_dims(self, node: fx.Node) -> list[str]:
        return [size for size in self._sizes(node) if size != "1"]


def _is_number(by: Any) -> bool:
    return isinstance(by, (int, float)) and math.isfinite(by) and by != 0


def _of_same_logits(node: fx.Node, one: Meaning, other: Meaning) -> bool:
    """Return whether two operands are of the same scaled logits, and gradients flow to both or to neither."""
    without_gradient = all(user.target is aten.detach.default for user in node.users)
    return one.scaling == other.scaling and (one.detached == other.detached or without_gradient)


Rule = Callable[[Reading, fx.Node], Meaning | Reduction | None]

WEIGHTED = {Kind.PROBS: Kind.WEIGHTED_PROBS, Kind.LOG_PROBS: Kind.WEIGHTED_LOG_PROBS, Kind.LOG_RATIO: Kind.TO}
GATHERED = (Kind.LOGITS, Kind.LOG_PROBS, Kind.PROBS)  # rise with the logits, entry by entry
# By reduction, what it may reduce over the vocabulary.
REDUCED: dict[Any, tuple[Kind, ...]] = {
    aten.logsumexp.default: (Kind.LOGITS,),
    aten.sum.dim_IntList: (
        *(Kind.LOGITS, Kind.LOG_PROBS, Kind.PROBS_LOG_PROBS, Kind.PROBS_LOGITS),
        *(Kind.FROM, Kind.TO, Kind.WEIGHTED_PROBS, Kind.WEIGHTED_LOG_PROBS),
    ),
    aten.mean.dim: (Kind.LOGITS, Kind.LOG_PROBS),
}
TOPS = (aten.topk.default, aten.max.dim)  # become indices, by which the values are gathered
READING_RULES: dict[Any, Rule] = {
    **dict.fromkeys(COPIES | CASTS, Reading._copy),
    **dict.fromkeys(KEEP_ORDER, Reading._reshape),
    **dict.fromkeys(TRANSPOSITIONS, Reading._transpose),
    **dict.fromkeys(PRODUCTS, Reading._multiply),
    **dict.fromkeys(QUOTIENTS, Reading._divide),
    aten.neg.default: Reading._negate,
    aten.add.Tensor: Reading._add,
    aten.sub.Tensor: Reading._subtract,
    aten._softmax.default: Reading._softmax,
    aten._log_softmax.default: Reading._log_softmax,
    aten.exp.default: Reading._exponential,
    aten.tanh.default: Reading._tanh,
    aten.gather.default: Reading._gather,
    aten.argmax.default: Reading._largest,
    **dict.fromkeys(TOPS, Reading._top),
    **dict.fromkeys(REDUCED, Reading._reduced),
}
