"""A drawn decoder as a value: parts of source text, put together to a script that runs on its own."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import linecache
import re
import sys
import textwrap
from types import ModuleType
from typing import Any

from tests.fuzz import oracle
from tests.fuzz.batches import Batch

ARGUMENTS = tuple(Batch(1, 2, "full", 0).arguments())


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of `forward`; `$` in its text is a number of its own, for names.

    Attributes:
        code: statements.
        init: statements of `__init__`.
        mixes: whether tokens see later ones, other rows, or keys that are no prefix: a refusal is right.
    """

    code: str
    init: str = ""
    mixes: bool = False


@dataclasses.dataclass(frozen=True)
class Mask(Part):
    """Defines `m`, or nothing where attention is called with `is_causal`.

    Attributes:
        attend: the arguments of the attention call.
        real: an expression for the real tokens, empty where nothing is padding.
        function: called for all attention instead of what layers drew.
    """

    attend: str = "is_causal=True"
    real: str = ""
    function: str = ""


@dataclasses.dataclass(frozen=True)
class Positions(Part):
    """Adds to `x`, or defines `cos` and `sin` for queries and keys."""

    rotary: bool = False


@dataclasses.dataclass(frozen=True)
class Layer:
    """Operators, attention (projection, product, way back to `[B, S, D]`), operators."""

    before: tuple[Part, ...]
    project: Part
    attend: Part
    merge: Part
    after: tuple[Part, ...] = ()

    def parts(self, rotary: bool) -> list[Part]:
        turn = [Part("q, k = rotate(q, cos, sin), rotate(k, cos, sin)")] if rotary else []
        return [*self.before, self.project, *turn, self.attend, self.merge, *self.after]


@dataclasses.dataclass(frozen=True)
class Finish(Part):
    """From `x` or `logits` to what is returned; `seen` says which part of every output counts."""

    seen: tuple[str, ...] = ("real",)


@dataclasses.dataclass(frozen=True)
class Program:
    """One draw of the grammar."""

    embedding: Part
    positions: Positions
    mask: Mask
    layers: tuple[Layer, ...]
    head: Part
    finish: Finish
    batches: tuple[Batch, ...]
    frozen: str = ""
    pad_dtype: str = "torch.int64"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def parts(self) -> list[Part]:
        """In order."""
        layers = [part for layer in self.layers for part in layer.parts(self.positions.rotary)]
        return [self.embedding, self.positions, self.mask, *layers, self.head, self.finish]

    @property
    def mixes(self) -> bool:
        """Whether no tree can share its tokens, so that a refusal is right."""
        return any(part.mixes for part in self.parts)

    def source(self) -> str:
        """The whole script: model, calls, and the oracle, which runs when it is a main program."""
        parts = self.parts
        code, init = ([_numbered(getattr(p, k), n) for n, p in enumerate(parts)] for k in ("code", "init"))
        if self.mask.function:
            drawn = r"F\.scaled_dot_product_attention\(|SPELLINGS\[\S+\]\(|biased\(.+?\)\("
            code = [re.sub(drawn, f"{self.mask.function}(", line) for line in code]
        if self.mask.function == "dta_compile.attention":
            code = [line.replace(", enable_gqa=True", "") for line in code]
        code = [line.replace("SEEN_BY", self.mask.attend) for line in code]
        real = self.mask.real or "torch.ones_like(ids, dtype=torch.bool)"
        if any(re.search(r"\breal\b", text) for text in code):
            code.insert(0, f"real = {real}")
        codes = any(_uses(text, "codes") for text in code)
        start = "ids = codes[..., 0]" if codes else ""
        known = [a for a in ARGUMENTS if (a in ("ids", "codes") and (a == "codes") == codes)]
        taken = known + [a for a in ARGUMENTS[2:] if any(_uses(text, a) for text in [*code, real])]
        counted = ", ".join("None" if seen == "whole" else f"({seen})" for seen in self.finish.seen)
        return _SCRIPT.format(
            init=_indented(init, self.frozen),
            arguments=", ".join(taken),
            forward=_indented([start, "B, S = ids.shape"], *code),
            seen="\n".join(f"    {line}" for line in (start, f"real = {real}", f"return ({counted},)") if line),
            calls="".join(f"    {_call(batch, taken, self.pad_dtype)},\n" for batch in self.batches),
            options=dict(self.options),
            oracle=inspect.getsource(oracle).split("from __future__ import annotations\n")[1].strip(),
        )


def load(source: str) -> ModuleType:
    """The script as a module whose lines tracebacks and error messages can quote."""
    name = f"drawn_{hashlib.sha1(source.encode()).hexdigest()[:10]}"
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module  # Dynamo imports what its functions are defined in
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def verdict(program: Program) -> tuple[str, str]:
    """Runs it."""
    module = load(program.source())
    return oracle.judge(module.Model, module.seen, module.CALLS, module.OPTIONS)


def _numbered(text: str, number: int) -> str:
    return text.replace("$", str(number))


def _uses(text: str, name: str) -> bool:
    return re.search(rf"(?<![.\w]){name}\b", text) is not None


def _indented(*blocks: Any) -> str:
    lines = [line for block in blocks for line in ([block] if isinstance(block, str) else block) if line]
    return textwrap.indent("\n".join(textwrap.dedent(line).strip("\n") for line in lines), " " * 8) or "        pass"


def _call(batch: Batch, names: list[str], pad_dtype: str) -> str:
    def text(value: Any, dtype: str) -> str:
        return f"torch.tensor({value!r}, dtype={dtype.replace('$pad', pad_dtype)})" if dtype else repr(value)

    values = batch.arguments()
    return "dict(" + ", ".join(f"{name}={text(*values[name])}" for name in names) + ")"


_SCRIPT = '''\
"""A program drawn by tests/fuzz. Run it: it prints the verdict on itself."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from torch.nn.attention import flex_attention as flex

import dta_compile
from tests.support.spellings import SPELLINGS, biased

flex._validate_device = lambda *_: None  # torch refuses gradients on CPUs, which it computes
D, H, V, LONGEST = 8, 2, 13, 40


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
{init}

    def forward(self, {arguments}):
{forward}


def seen({arguments}):
{seen}


CALLS = [
{calls}]
OPTIONS = {options}

# The oracle, as in tests/fuzz/oracle.py.

{oracle}


if __name__ == "__main__":
    print(*judge(Model, seen, CALLS, OPTIONS), sep=": ")
'''
