"""Add guards of our own to those of a trace: that modules get no hooks later, and guards of layers that are copies.

Dynamo keeps the stack of the trace and of the user's code with each guard and formats both as it builds the guard, most
of the time that one takes. Guards added here have neither: the source of a guard names the module and its attribute.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from dta_compile.torch_compat.dynamo import AttrSource, DictGuardManager, GuardBuilder, GuardManagerType, Source

GLOBAL_HOOKS = tuple(name for name in vars(nn.modules.module) if name.startswith("_global_") and "_hooks" in name)
_NO_STACK = traceback.StackSummary()


def add_guard(guards: Any, guard: Any) -> None:
    """Add a guard to Dynamo's set of guards, without stacks."""
    guard.user_stack = _NO_STACK
    guards.add(guard, collect_debug_stack=False)


def is_of_hooks(guard: Any) -> bool:
    """Return whether a guard is Dynamo's of hooks that a module does not have, which by default does nothing."""
    return bool(guard.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT)


def guards_of_hooks(guards: Iterable[Any]) -> Iterator[Any]:
    """Yield a guard for each module of which the trace read hooks, that it has none."""
    names: dict[Source, dict[str, None]] = {}
    for guard in guards:
        if is_of_hooks(guard):
            hooks = guard.originating_source
            names.setdefault(hooks.base, {})[hooks.member] = None
    for module, members in names.items():
        yield module.make_guard(functools.partial(no_hooks, names=tuple(members)))


def guards_of_global_hooks(tx: Any) -> Iterator[Any]:
    """Yield guards of the numbers of hooks of all modules; Dynamo guards those hooks that it traces."""
    module = tx.import_source(nn.modules.module.__name__)
    for name in GLOBAL_HOOKS:
        yield AttrSource(module, name).make_guard(GuardBuilder.SEQUENCE_LENGTH)


def no_hooks(builder: Any, guard: Any, names: tuple[str, ...]) -> None:
    """Guard that attributes of a module are empty dicts, as a function that builds one guard of Dynamo's.

    Looks the module up once, unlike a guard for each attribute, of which a layer has nearly a hundred.
    """
    source, module = guard.originating_source, builder.get(guard)
    of_module = builder.get_guard_manager(guard).get_generic_dict_manager(
        source=f"{source.name}.__dict__",
        example_value=builder._get_generic_dict_manager_example_value(module.__dict__),
        guard_manager_enum=GuardManagerType.GUARD_MANAGER,
    )
    kind: Any = type(module)
    is_plain = kind.__getattribute__ is object.__getattribute__ and not isinstance(of_module, DictGuardManager)
    for name in names:
        hooks = module.__dict__.get(name)
        in_order = id(hooks) in builder.key_order_guarded_dict_ids
        if not is_plain or hooks is None or in_order or hasattr(kind, name):
            GuardBuilder.SEQUENCE_LENGTH(builder, AttrSource(source, name).make_guard(GuardBuilder.SEQUENCE_LENGTH))
            continue
        text = f"{source.name}.{name}"
        of_module.dict_getitem_manager(
            key=name, source=text, example_value=hooks, guard_manager_enum=GuardManagerType.GUARD_MANAGER
        ).add_dict_length_check_guard(0, [f"not {text}"], None)
