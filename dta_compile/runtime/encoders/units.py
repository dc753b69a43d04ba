"""Divide the tensor arguments of an encoder's method into units: images, tiles, videos or clips."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dta_compile.runtime.encoders.distinct_media import distinct

Tensors = tuple[torch.Tensor, ...]
Sizes = Sequence[Sequence[int] | None]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tensor arguments of a call as a batch of units.

    Attributes:
        tensors: arguments of the method, in which units can be selected.
        sizes: by argument, the rows of each unit along dimension 0; None for an argument that all units share.
        count: the number of units.
    """

    tensors: Tensors
    sizes: Sizes
    count: int

    @property
    def rows(self) -> Sequence[int]:
        """The rows of each unit in the first argument that has some."""
        return next(sizes for sizes in self.sizes if sizes is not None)

    def unit(self, index: int) -> Tensors:
        """Return the parts of all arguments that belong to a unit, as views."""
        parts = []
        for tensor, sizes in zip(self.tensors, self.sizes, strict=True):
            start = 0 if sizes is None else sum(sizes[:index])
            parts.append(tensor if sizes is None else tensor[start : start + sizes[index]])
        return tuple(parts)

    def selected(self, units: Sequence[int]) -> Tensors:
        """Return the arguments of a call over some of the units."""
        if len(units) == self.count:
            return self.tensors
        parts = zip(*(self.unit(index) for index in units), strict=True)
        return tuple(
            part[0] if sizes is None else torch.cat(part) for part, sizes in zip(parts, self.sizes, strict=True)
        )

    def kinds(self) -> tuple[list[int], list[int]]:
        """Return the first unit of each kind of equal content, and by unit its kind: see `distinct`."""
        own = [(number, sizes) for number, sizes in enumerate(self.sizes) if sizes is not None]
        of_size: dict[tuple[int, ...], list[int]] = {}
        for index in range(self.count):
            of_size.setdefault(tuple(sizes[index] for _, sizes in own), []).append(index)
        leaders = list(range(self.count))
        for units in of_size.values():
            selected = self.selected(units)
            values = [selected[number].unflatten(0, (len(units), sizes[units[0]])) for number, sizes in own]
            first, kinds = distinct(values)
            for index, kind in zip(units, kinds, strict=True):
                leaders[index] = units[first[kind]]
        firsts = list(dict.fromkeys(leaders))
        return firsts, [firsts.index(leader) for leader in leaders]


def batch_of(names: Sequence[str], tensors: Tensors, shared: Sequence[str], is_padded: bool) -> Batch | None:
    """Return the arguments of a method as a batch of units; None if units cannot be told apart.

    Args:
        names: name of the method's parameter for each tensor; empty for a tensor that it only passes on.
        shared: names of arguments that belong to all units.
        is_padded: images may be `[rows, images, 3, H, W]`, where rows with fewer images have zeros, which are left out.
    """
    own = {name: tensor for name, tensor in zip(names, tensors, strict=True) if name not in ("", *shared)}
    # A list of tensors has no common dimension of units, and a tensor that is only passed on may have any.
    is_list = len(own) != sum(name not in ("", *shared) for name in names)
    is_passed_on = any(tensor.dim() for name, tensor in zip(names, tensors, strict=True) if not name)
    # Equal tensors that require gradients have gradients of their own.
    is_shared = any(tensor.dim() == 0 or tensor.requires_grad for tensor in own.values())
    if not own or is_list or is_passed_on or is_shared:
        return None
    count, rows = len(next(iter(own.values()))), []
    grid = next((tensor for name, tensor in own.items() if name.endswith("grid_thw")), None)
    if grid is not None:
        count, rows = len(grid), grid.prod(-1).tolist()
    elif is_padded and own["pixel_values"].dim() == 5:
        if any(tensor.dim() < 3 for tensor in own.values()):
            return None  # what says which images are real, instead of zeros
        own = {name: tensor.flatten(0, 1)[:, None] for name, tensor in own.items()}
        is_image = own["pixel_values"].flatten(1).any(-1)
        own = {name: tensor[is_image] for name, tensor in own.items()}
        count = len(own["pixel_values"])
    sizes = {
        name: [1] * count if len(tensor) == count else rows if len(tensor) == sum(rows) else None
        for name, tensor in own.items()
    }
    if not count or None in sizes.values():
        return None
    values = tuple(own.get(name, tensor) for name, tensor in zip(names, tensors, strict=True))
    return Batch(values, [sizes.get(name) for name in names], count)
