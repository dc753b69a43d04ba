"""Smaller programs that fail in the same way: every part is replaced by the plainest one, if it still fails then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.fuzz.batches import Batch
from tests.fuzz.grammar import PLAIN, PLAIN_LAYER
from tests.fuzz.program import Program, verdict


def minimised(
    program: Program,
    kind: str,
    attempts: int = 60,
    judge: Callable[[Program], tuple[str, str]] = verdict,
) -> Program:
    """The smallest program found that comes to the same kind of verdict, in so many attempts."""
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(program):
            if not attempts:
                return program
            attempts -= 1
            if judge(smaller)[0] == kind:
                program, improved = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    change = dataclasses.replace
    for index in range(len(program.layers)):
        if len(program.layers) > 1:
            yield change(program, layers=program.layers[:index] + program.layers[index + 1 :])
    for name, plain in PLAIN.items():
        if getattr(program, name) != plain:
            yield change(program, **{name: plain})
    for index, layer in enumerate(program.layers):
        for name, plain in PLAIN_LAYER.items():
            if getattr(layer, name) == plain:
                continue
            parts = getattr(layer, name) if plain == () else ()
            fewer = [parts[:n] + parts[n + 1 :] for n in range(len(parts)) if len(parts) > 1]
            for choice in [plain, *fewer]:
                layers = list(program.layers)
                layers[index] = change(layer, **{name: choice})
                yield change(program, layers=tuple(layers))
    if len(program.batches) > 1:
        yield from (change(program, batches=(batch,)) for batch in program.batches)
    for index, batch in enumerate(program.batches):
        for smaller in _smaller_batches(batch):
            batches = list(program.batches)
            batches[index] = smaller
            yield change(program, batches=tuple(batches))


def _smaller_batches(batch: Batch) -> Iterator[Batch]:
    if batch.format != "full":
        yield dataclasses.replace(batch, format="full")
    if (batch.rows, batch.tokens) != (2, 3):
        yield dataclasses.replace(batch, rows=2, tokens=3)
