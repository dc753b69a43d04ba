"""Every error that the package raises, and every warning, has a heading in docs/troubleshooting.md.

Texts are read off the source: the first argument of an error, whatever stands for it. Where it is a parameter of a
function, callers of that function are asked, and so on.
"""

import ast
import collections
import functools
import itertools
import re
from pathlib import Path

import pytest

from dta_compile import errors

ROOT = Path(__file__).parents[1]
PAGE = "docs/troubleshooting.md"
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
GAP = "…"
# Functions that raise texts from elsewhere: of argparse, of an operator in a graph, of another rank.
ELSEWHERE = {"error", "_refusal_by", "_refused", "from_first", "mixing_refusal"}
# What carries a text, and where among its arguments.
CARRIES = {"REFUSED": 1, "Advice": 1}


class Source(ast.NodeVisitor):
    """What is called, and what functions are, by name."""

    def __init__(self, package):
        self.calls, self.functions = collections.defaultdict(list), collections.defaultdict(list)
        self.errors, self.module, self.scopes = set(ERRORS), {}, []
        for path in sorted(package.rglob("*.py")):
            self.module = {}
            self.visit(ast.parse(path.read_text()))

    def visit_ClassDef(self, node):
        if any(getattr(base, "id", None) in self.errors for base in node.bases):
            self.errors.add(node.name)
        self.inside(node)

    def visit_FunctionDef(self, node):
        self.functions[node.name].append(node)
        self.inside(node)

    def inside(self, node):
        self.scopes.append(node)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node):
        if not self.scopes and isinstance(node.targets[0], ast.Name):
            self.module[node.targets[0].id] = node.value
        self.generic_visit(node)

    def visit_Call(self, node):
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        self.calls[name].append((node, tuple(self.scopes), self.module))
        self.generic_visit(node)

    def texts(self, node, scopes, module):
        """The texts that an expression may be; a gap for what is only known at run time."""
        again = functools.partial(self.texts, scopes=scopes, module=module)
        match node:
            case ast.Constant(value=str(text)):
                return {text}
            case ast.JoinedStr(values=parts):
                return joined(again(part) for part in parts)
            case ast.FormattedValue():
                return {GAP}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return joined((again(left), again(right)))
            case ast.IfExp(body=one, orelse=other):
                return again(one) | again(other)
            case ast.Tuple(elts=[first, *_]):
                return again(first)
            case ast.Name(id=name):
                return self.named(name, scopes, module)
        return {GAP}

    def named(self, name, scopes, module):
        for depth in range(len(scopes), 0, -1):
            scope = scopes[depth - 1]
            assigned = [value for target, value in assignments(scope) if target == name]
            if assigned:
                return set().union(*(self.texts(value, scopes[:depth], module) for value in assigned))
            if name in parameters(scope):
                return self.passed(name, scope, scopes[: depth - 1])
        return self.texts(module[name], (), module) if name in module else {GAP}

    def passed(self, name, function, around):
        """What callers of a function give for a parameter."""
        place = [one for one in parameters(function) if one not in ("self", "cls")].index(name)
        called = around[-1].name if function.name == "__init__" else function.name
        found = set()
        for call, scopes, module in self.calls[called]:
            given = {one.arg: one.value for one in call.keywords}.get(name)
            given = given if given is not None else next(iter(call.args[place : place + 1]), None)
            found |= self.texts(given, scopes, module) if given is not None else set()
        return found

    @functools.cached_property
    def raised(self):
        """(kind of error, text)"""
        places = [*((kind, 0) for kind in sorted(self.errors)), *CARRIES.items()]
        return [
            (kind, shown(text))
            for kind, place in places
            for call, scopes, module in self.calls[kind]
            if not ELSEWHERE & {scope.name for scope in scopes} and len(call.args) > place
            for text in self.texts(call.args[place], scopes, module)
        ]

    @functools.cached_property
    def warned(self):
        return [
            shown(re.sub(r"%[sd]|%\.\d+f", GAP, text).removeprefix("dta: "))
            for call, scopes, module in self.calls["warning"]
            for text in self.texts(call.args[0], scopes, module)
        ]


def joined(parts):
    return {"".join(one) for one in itertools.product(*parts)}


def parameters(scope):
    if not isinstance(scope, ast.FunctionDef):
        return []
    return [one.arg for one in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)]


@functools.cache
def assignments(scope):
    """(name, value) of the assignments of a function, also those of several names at once."""
    found = []
    for node in ast.walk(scope) if isinstance(scope, ast.FunctionDef) else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.append((node.targets[0].id, node.value))
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            names = (getattr(one, "id", None) for one in node.targets[0].elts)
            found += zip(names, node.value.elts, strict=False)
    return found


def shown(text):
    """As a heading has it: one line without marks."""
    return re.sub(rf"{GAP}(\s*{GAP})+", GAP, " ".join(text.split("\n")[0].split()).replace("`", ""))


@functools.cache
def headings():
    return {shown(line.lstrip("# ")) for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("##")}


SOURCE = Source(ROOT / "dta_compile")


@pytest.mark.parametrize("kind", sorted({*SOURCE.errors, *CARRIES}))
def test_errors_have_a_heading(kind):
    missing = {text for name, text in SOURCE.raised if name == kind} - headings()
    assert not missing, f"say in {PAGE} what to do about them"


def test_warnings_have_a_heading():
    def has_one(text):
        return any(text.startswith(heading) for heading in headings() if len(heading) > 20)

    assert not [text for text in SOURCE.warned if not has_one(text)], f"say in {PAGE} what they mean"


def test_headings_are_of_texts_that_there_are():
    """Nothing is left of errors that are no more."""
    texts = [*(text for _, text in SOURCE.raised), *SOURCE.warned]
    page = (ROOT / PAGE).read_text()
    listed = [shown(line[3:]) for line in page[page.index("\n## Warnings") :].splitlines() if line.startswith("### ")]
    assert len(texts) > 200
    assert not [heading for heading in listed if not any(text.startswith(heading) for text in texts)]
