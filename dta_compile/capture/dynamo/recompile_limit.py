"""Which graphs count for Dynamo's limit of graphs for a function, and how those that are dropped are forgotten."""

from __future__ import annotations

import types
from typing import Any

from dta_compile.torch_compat import frames
from dta_compile.torch_compat.dynamo import (
    CompileContext,
    DeletedGuardManagerWrapper,
    cache_entries_of,
    get_hook_for_recompile_user_context,
    has_same_objects,
    register_hook_for_recompile_user_context,
)
from dta_compile.torch_compat.dynamo import config as dynamo_config

# Ids of compilations whose graphs do not count towards Dynamo's recompile limit.
_uncounted: set[Any] = set()


def allow_one_more_graph() -> None:
    """Keep the graph being compiled from counting towards Dynamo's recompile limit in later compilations.

    Past that limit (8 graphs per function) Dynamo runs the function eagerly with only a warning, which would be a dense
    run while training. The limit is soon reached: every transformers model is called through the wrapper function of
    one decorator, so that policy, reference model and each kind of generation step share these 8 graphs. Runaway
    recompilation has our own warning (`records.Record.note_graph`).

    Dynamo's cap of 256 graphs per function is raised when it is near, since it also counts graphs that are gone.
    """
    if _leave_out_uncounted not in (get_hook_for_recompile_user_context() or ()):
        register_hook_for_recompile_user_context(_leave_out_uncounted)  # again after `torch._dynamo.reset()`
    here = CompileContext.current_compile_id()
    _uncounted.add(here)
    if here is not None and (here.frame_compile_id or 0) + 1 >= dynamo_config.accumulated_recompile_limit:
        dynamo_config.accumulated_recompile_limit += 1


def _leave_out_uncounted() -> str:
    """Subtract graphs for the tree from the counts that Dynamo is about to compare; return a line for Dynamo's log.

    Dynamo counts the graphs of all backends for a function, and compares before it calls a backend. The only place to
    correct the count is a hook in between, which Dynamo calls in every compilation of every backend.
    """
    compilation = frames.running_compilation()
    assert compilation is not None
    size, frame, code = (compilation[name] for name in ("cache_size", "frame", "code"))
    entries = compilation.get("cache_entries") or cache_entries_of(code)  # the latter for torch 2.11
    left_out = [entry for entry in entries if _is_uncounted(entry)]
    same_objects = frame is not None and sum(has_same_objects(frame, entry) for entry in left_out)
    size.num_cache_entries_with_same_id_matched_objs -= same_objects
    size.num_cache_entries -= len(left_out)
    if hasattr(size, "total_cache_entries_all_regions"):
        size.total_cache_entries_all_regions -= len(left_out)
    return f"dta_compile: {len(left_out)} graphs over a prefix tree are not counted"


def _is_uncounted(entry: Any) -> bool:
    """Return whether a cache entry is not to count. Checks the backend, too, since `reset()` restarts compile ids."""
    if isinstance(entry.guard_manager, _Dropped):
        return True
    return entry.compile_id in _uncounted and frames.is_ours(entry.backend)


class _Dropped(DeletedGuardManagerWrapper):
    """Replaces the guards of a compilation that we dropped, so that Dynamo never evaluates it again."""


def forget(code: types.CodeType, compile_id: Any) -> None:
    """Drop Dynamo's cache entry of our compilation, as Dynamo does when an object of a guard is gone."""
    for entry in cache_entries_of(code):
        state = entry.guard_manager.extra_state
        # By identity, since `reset()` restarts compile ids.
        if entry.compile_id is compile_id and frames.is_ours(entry.backend) and state is not None:
            state.invalidate(entry, _Dropped("its callable is gone"))
