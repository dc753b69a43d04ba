"""What a method that makes features returns: where its output has them, and in which form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Fields of a method's output that hold features, and whether the items of the outermost list are levels, not units.
FIELDS = (("pooler_output", False), ("deepstack_features", True))
HIDDEN = "last_hidden_state"  # holds the features of encoders of sounds, alone or as "pooler_output"
UNREAD = (HIDDEN, "hidden_states", "attentions")  # ends of names of what models do not read beside features


@dataclasses.dataclass(frozen=True)
class Form:
    """What a method returns, without the numbers.

    Attributes:
        returned: class of the output.
        fields: by name of a field with features, its form (`form_of`).
        widths: by feature tensor `[n, D]`, its D, dtype and device.
        modules: names of the outermost submodules that the method calls.
        weights: names of the model's parameters that the method reads otherwise.
        has_others: a field is neither features nor the mask of those that are used (Ovis 2: vectors of other tokens).
    """

    returned: type
    fields: tuple[tuple[str, Any], ...]
    widths: tuple[tuple[int, torch.dtype, torch.device], ...]
    modules: tuple[str, ...]
    weights: tuple[str, ...]
    has_others: bool

    @property
    def is_selected(self) -> bool:
        """Whether a mask of the output says which features there are."""
        return any(form[0] == "masked" for _, form in self.fields)

    @property
    def per_entry(self) -> int:
        """Features per entry that are a dimension of the output (`[units, T, D]`), else 1."""
        return self.fields[0][1][1] or 1 if self.fields and self.fields[0][1][0] == "tensor" else 1


def form_of(value: Any, has_levels: bool) -> Any:
    """Return the form of features.

    That of a tensor `[units, T, D]` is `("tensor", T)`, of a tensor `[n, D]` `("tensor", 0)`, of a list of one tensor
    per unit `("list",)` or `("tuple",)`; a list of levels is followed by the forms of these. Features that a mask of
    the output selects are `("masked", its name)`, the mask is `("mask",)`: they are returned without the others. A
    mask `[units, T]` of which all is returned is `("entries", T)`.
    """
    if isinstance(value, torch.Tensor):
        return ("tensor", value.shape[1] if value.dim() == 3 else 0)
    if isinstance(value, (list, tuple)):
        name = "list" if isinstance(value, list) else "tuple"
        if not has_levels and all(isinstance(item, torch.Tensor) for item in value):
            return (name,)
        return (name, *(form_of(item, has_levels=False) for item in value))
    return ("constant", value)


def with_mask(fields: tuple[tuple[str, Any], ...], output: Any, selects: bool) -> tuple[tuple[str, Any], ...]:
    """Return the fields with that of a mask `[units, T]` of features `[units, T, D]`, if the output has one.

    Args:
        selects: return the features for which it is true, and no others.
    """
    of_units = {getattr(output, name).shape[:-1] for name, form in fields if form[0] == "tensor" and form[1]}
    others = output.items() if isinstance(output, Mapping) and len(of_units) == 1 else ()
    masks = [name for name, value in others if is_of_integers(value) and value.shape in of_units]
    if len(masks) != 1 or output[masks[0]].dtype is not torch.bool or any(form[0] != "tensor" for _, form in fields):
        return fields
    if not selects:
        return (*fields, (masks[0], ("entries", output[masks[0]].shape[1])))
    return (*((name, ("masked", masks[0])) for name, _ in fields), (masks[0], ("mask",)))


def is_of_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def features_in(output: Any, fields: tuple[tuple[str, Any], ...]) -> Iterator[torch.Tensor]:
    """Yield the features of all units in a method's output, as `[n, D]`."""
    for name, form in fields:
        value = getattr(output, name)
        if form[0] == "masked":
            yield value[getattr(output, form[1]).to(value.device)]
        elif form[0] == "mask":
            yield value[value][:, None]
        elif form[0] == "entries":
            yield value.reshape(-1, 1)
        else:
            yield from _leaves(value, form)


def _leaves(value: Any, form: Any) -> Iterator[torch.Tensor]:
    if form[0] == "tensor":
        yield value.reshape(-1, value.shape[-1])
    elif form[0] != "constant" and len(form) == 1:
        yield torch.cat([item.reshape(-1, item.shape[-1]) for item in value])
    elif form[0] != "constant":
        for item, inner in zip(value, form[1:], strict=True):
            yield from _leaves(item, inner)
