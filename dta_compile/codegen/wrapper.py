"""Extract from inductor's wrapper module the statements that a call needs.

Importing the whole wrapper takes more than a second even in a process that compiles nothing: it imports inductor's
lowerings and queries the compiler's flags to look up kernels. A call needs a function of a few lines and the kernels,
whose files are known once they have been loaded.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Container, Iterator


def needed(text: str, name: str, known: Container[str] = ()) -> tuple[str, list[str]]:
    """Return the text of the statements that `name` depends on, and their free names, sorted.

    Names in `known` are free names; the statements that bind them are left out.
    """
    statements = ast.parse(text).body
    makers: dict[str, list[int]] = {}
    for position, statement in enumerate(statements):
        for bound in _bound(statement):
            makers.setdefault(bound, []).append(position)
    pending, chosen, free = [name], set[int](), list[str]()
    seen = set(pending)
    while pending:
        wanted = pending.pop()
        positions = makers.get(wanted, []) if wanted not in known else []
        if not positions and not hasattr(builtins, wanted):
            free.append(wanted)
        for position in set(positions) - chosen:
            used = [used_name for used_name in _used(statements[position]) if used_name not in seen]
            pending += used
            seen.update(used)
        chosen.update(positions)
    selected = ast.Module([statements[position] for position in sorted(chosen)], type_ignores=[])
    return ast.unparse(selected), sorted(free)


def kernels(text: str, maker: str) -> list[str]:
    """Return the names that a module assigns results of a method `maker` to."""
    return [
        bound
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        if isinstance(statement.value.func, ast.Attribute) and statement.value.func.attr == maker
        for bound in _bound(statement)
    ]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a module-level statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
    else:
        yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_stored(node))


def _used(statement: ast.stmt) -> list[str]:
    """Return the names that a statement reads, without those that are local to functions in it."""
    local = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        local |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_stored(node)}
    names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return list(dict.fromkeys(name for name in names if name not in local))


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
