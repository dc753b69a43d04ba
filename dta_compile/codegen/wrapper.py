"""wrapper: of the module that inductor writes around its kernels, what a call needs.

Importing the whole module takes more than a second in a process that compiles nothing: it imports inductor's lowerings,
and asks for the compiler's flags to find kernels by them. A call needs a function of a few lines and the kernels, whose
files are known once they were loaded.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Container, Iterator


def needed(text: str, name: str, known: Container[str] = ()) -> tuple[str, list[str]]:
    """The statements of a module that make up `name`, and the names these use that are neither theirs nor built in.

    Names in `known` are taken as given.
    """
    statements = ast.parse(text).body
    makers: dict[str, list[int]] = {}
    for position, statement in enumerate(statements):
        for bound in _bound(statement):
            makers.setdefault(bound, []).append(position)
    pending, found, free = [name], set[int](), list[str]()
    seen = set(pending)
    while pending:
        wanted = pending.pop()
        positions = makers.get(wanted, []) if wanted not in known else []
        if not positions and not hasattr(builtins, wanted):
            free.append(wanted)
        for position in set(positions) - found:
            used = [one for one in _used(statements[position]) if one not in seen]
            pending += used
            seen.update(used)
        found.update(positions)
    kept = ast.Module([statements[position] for position in sorted(found)], type_ignores=[])
    return ast.unparse(kept), sorted(free)


def kernels(text: str, maker: str) -> list[str]:
    """The names that a module gives to what a method `maker` returns."""
    return [
        bound
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        if isinstance(statement.value.func, ast.Attribute) and statement.value.func.attr == maker
        for bound in _bound(statement)
    ]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module gives a meaning."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
    else:
        yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_stored(node))


def _used(statement: ast.stmt) -> list[str]:
    """The names that a statement reads and has not bound within functions of its own."""
    local = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        local |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_stored(node)}
    names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return list(dict.fromkeys(name for name in names if name not in local))


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
