"""Metamorphic relations: changes of a call, its options or the model's state whose effect on gradients is known.

A relation turns a call into others whose gradients sum up to those of the first. Which of them a program obeys is
asked of eager: one that reads a row's number is not the same when rows are permuted. What eager obeys, the compiled
program has to obey, with the executable that it has by then, so that plans and caches of earlier calls are tested too.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Call = dict[str, Any]
Values = dict[str, torch.Tensor]  # outputs and gradients by name


@dataclasses.dataclass(frozen=True)
class Weighted:
    """A call and what its outputs are multiplied with; those of weight None have no part in the loss."""

    call: Call
    weights: tuple[torch.Tensor | None, ...]


@dataclasses.dataclass(frozen=True)
class Relation:
    """Calls whose gradients sum up to those of one call."""

    name: str
    calls: tuple[Weighted, ...]


@dataclasses.dataclass(frozen=True)
class Change:
    """Something done to a model between two calls, which the second one has to see."""

    name: str
    apply: Callable[[torch.nn.Module], object]


def weigh(outputs: tuple[torch.Tensor, ...], masks: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Random weights of what counts in every differentiable output."""
    found: list[torch.Tensor | None] = []
    for index, (output, mask) in enumerate(zip(outputs, masks, strict=True)):
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(index))
        if mask is not None:
            weights = torch.where(mask.reshape(*mask.shape, *(1,) * (output.dim() - mask.dim())), weights, 0)
        found.append(weights if output.requires_grad else None)
    return tuple(found)


def gradients(function: Any, model: torch.nn.Module, calls: tuple[Weighted, ...]) -> Values:
    """The gradients of all calls together; a weighted sum of the outputs is the loss."""
    model.zero_grad()
    for one in calls:
        outputs = function(**one.call)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = zip(outputs, one.weights, strict=True)
        # What has no weight may be anything, NaN as well: it is taken away, not multiplied with 0.
        terms = [(torch.where(w != 0, out, 0) * w).sum() for out, w in pairs if w is not None]
        if terms:
            sum(terms).backward()
    found = {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relations(base: Weighted, seed: int) -> Iterator[Relation]:
    """The relations that the shapes of a call allow."""
    chance, (rows, _) = random.Random(seed), _sizes(base.call)
    order = chance.sample(range(rows), rows)
    twice = chance.sample([*range(rows), *range(rows)], 2 * rows)
    cut = chance.randint(1, max(rows - 1, 1))
    yield Relation("rows permuted", (_of_rows(base, order),))
    yield Relation("rows twice, with half the weight", (_of_rows(base, twice, 0.5),))
    if rows > 1:
        yield Relation("rows over two calls", (_of_rows(base, order[:cut]), _of_rows(base, order[cut:])))
        yield Relation("a row a call", tuple(_of_rows(base, [row]) for row in range(rows)))
    if base.call.keys() & {"pairs", "additive"}:
        return  # what padding sees is theirs to say
    yield Relation("more padding", (_padded(base, chance.randint(1, 3), right=True),))
    yield Relation("more padding in front", (_padded(base, chance.randint(1, 3), right=False),))
    if rows % 2 == 0 and "segments" in base.call:
        yield Relation("two rows packed into one", (_packed(base),))


def changes(seed: int) -> list[Change]:
    """What happens to models between calls, in an order of its own."""
    chance = random.Random(seed)
    every = [
        Change("weights change in place", lambda model: _each(model, lambda p: p.mul_(1.25))),
        Change("weights are loaded", lambda model: model.load_state_dict(_scaled(model.state_dict(), 0.75))),
        Change("a parameter's data is another tensor", lambda model: _with_new_data(chance.choice(_trained(model)))),
        Change("a parameter is another one", lambda model: _with_new_parameter(model, chance)),
        Change("evaluation mode", lambda model: model.eval()),
        Change("training mode", lambda model: model.train()),
        Change("a parameter is frozen", lambda model: chance.choice(_trained(model)).requires_grad_(False)),
        Change("all parameters are trained", lambda model: model.requires_grad_(True)),
        Change("a hook doubles an output", lambda model: _hooked(model, chance)),
        Change("buffers change in place", lambda model: _with_other_buffers(model)),
    ]
    return chance.sample(every, len(every))


def _sizes(call: Call) -> tuple[int, int]:
    ids = call["ids"] if "ids" in call else call["codes"]
    return ids.shape[0], ids.shape[1]


def _of_rows(base: Weighted, rows: list[int], factor: float = 1.0) -> Weighted:
    """Some rows of a call, in this order."""
    count, index = _sizes(base.call)[0], torch.tensor(rows)

    def chosen(value: Any) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == count
        return value[index] if has_rows else value

    weights = tuple(None if w is None else chosen(w) * factor for w in base.weights)
    return Weighted({name: chosen(value) for name, value in base.call.items()}, weights)


FILLERS = {"labels": -100}


def _padded(base: Weighted, by: int, right: bool) -> Weighted:
    """With so many further tokens, which are padding, of no weight."""
    rows, _ = _sizes(base.call)

    def longer(value: Any, filler: int = 0) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[0] != rows:
            return value
        return F.pad(value, (*(0, 0) * (value.dim() - 2), *((0, by) if right else (by, 0))), value=filler)

    call = {name: longer(value, FILLERS.get(name, 0)) for name, value in base.call.items()}
    return Weighted(call, tuple(None if w is None else longer(w) for w in base.weights))


def _packed(base: Weighted) -> Weighted:
    """Every two rows behind one another in one, with other segments in the second."""
    rows, _ = _sizes(base.call)

    def joined(value: Any, name: str = "") -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != rows:
            return value
        first, second = value[0::2], value[1::2]
        if value.dim() == 1:
            return first  # one value a row: the second row's is lost, which eager's answer tells
        if name == "segments":
            second = torch.where(second > 0, second + first.amax(1, keepdim=True), 0)
        return torch.cat([first, second], 1)

    call = {name: joined(value, name) for name, value in base.call.items()}
    return Weighted(call, tuple(None if w is None else joined(w) for w in base.weights))


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _each(model: torch.nn.Module, change: Callable[[torch.Tensor], object]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            change(parameter)


def _scaled(state: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {name: value * factor if value.is_floating_point() else value for name, value in state.items()}


def _with_new_data(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.flip(0) * 1.125


def _with_new_parameter(model: torch.nn.Module, chance: random.Random) -> None:
    named = [(owner, name) for owner in model.modules() for name, _ in owner.named_parameters(recurse=False)]
    owner, name = chance.choice(named)
    old = getattr(owner, name)
    setattr(owner, name, torch.nn.Parameter(old.detach() * 0.875, requires_grad=old.requires_grad))


def _hooked(model: torch.nn.Module, chance: random.Random) -> None:
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    if linear:
        chance.choice(linear).register_forward_hook(lambda module, inputs, output: output * 2)


def _with_other_buffers(model: torch.nn.Module) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(1.5)
        elif buffer.dim() == 1:
            buffer.copy_(buffer.flip(0))
