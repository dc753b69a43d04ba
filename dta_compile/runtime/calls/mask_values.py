"""The values that masks of a call are made of, and checks that they are what proofs of masks take for granted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import sympy
import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.layers import AttentionLayer, MixerLayer, RecurrentLayer
from dta_compile.executable.masks import MaskProgram
from dta_compile.proofs.mask_class import BOUND
from dta_compile.proofs.terms import Entry, Evaluation, Leaf, Term, shown, subterms

BINARY_HINT = "pass a mask of zeros and ones, or compare (mask > 0) before you use it"


def mask_of(layer: MixerLayer) -> MaskProgram | None:
    """Return the mask of a layer, if it has one."""
    return layer.mask if isinstance(layer, (AttentionLayer, RecurrentLayer)) else None


def number_of_call(
    number: Callable[[sympy.Expr], int | float],
    dense: Mapping[str, torch.Tensor],
    items: Mapping[sympy.Symbol, Leaf],
    expr: sympy.Expr,
) -> int | float:
    """Evaluate an expression: symbols in `items` are read from tensors (which synchronises), others by `number`."""
    if expr in items:
        return dense[items[expr].name].item()
    read = {symbol: dense[items[symbol].name].item() for symbol in expr.free_symbols & items.keys()}
    return number(expr.subs(read))


class MaskValues:
    """Values of the terms of a call's masks."""

    def __init__(
        self,
        layers: Sequence[MixerLayer],
        dense: Mapping[str, torch.Tensor],
        number: Callable[[sympy.Expr], int | float],
        shape: tuple[int, int],
    ) -> None:
        self.layers, self.dense, self.shape = layers, dict(dense), shape
        masks = [mask for layer in layers if (mask := mask_of(layer)) is not None]
        items = {symbol: leaf for mask in masks for symbol, leaf in mask.items.items()}
        self.number = functools.partial(number_of_call, number, dense, items)

    @functools.cached_property
    def evaluate(self) -> Evaluation:
        """Return what evaluates terms."""
        batch, tokens = self.shape
        read = (self.dense[leaf.name] for layer in self.layers for leaf in layer.leaves)
        device = next((value.device for value in read if value.dim()), torch.device("cpu"))
        rows, keys = (torch.arange(size, device=device) for size in (batch, tokens))
        return Evaluation(self.dense, self.number, {"row": rows[:, None], "key": keys[None]})

    def value(self, term: Term) -> torch.Tensor:
        """Evaluate a term over row and key to `[B, S]`."""
        with torch.no_grad():
            return torch.as_tensor(self.evaluate(term)).expand(self.shape)

    def require_bounded(self, term: Term) -> None:
        """Raise `RuntimeContractError` unless arithmetic with a term cannot overflow."""
        values = self.value(term)
        expected = f"between {-BOUND} and {BOUND}, so that no arithmetic with it overflows"
        self.require(term, (values >= -BOUND) & (values <= BOUND), expected, "pass smaller numbers")

    def require(self, term: Term, holds: torch.Tensor, expected: str, hint: str = BINARY_HINT) -> None:
        """Raise `RuntimeContractError` unless bool `[B, S]` `holds` everywhere."""
        if bool(holds.all()):
            return
        row, column = (int(number) for number in (~holds).nonzero()[0])
        raise RuntimeContractError(
            "a mask is made of other numbers than its proof takes for granted",
            where=self.inputs(term),
            expected=f"{shown(term)} to be {expected}",
            got=f"{self.value(term)[row, column].item()} at row {row}, token {column}",
            hint=hint,
        )

    def inputs(self, term: Term) -> str:
        """Name the inputs of the call that a term reads, for errors."""
        inputs = {name for entry in subterms(term) if isinstance(entry, Entry) for name in entry.leaf.inputs}
        return "input " + ", ".join(name for _, name in sorted(inputs)) if inputs else ""
