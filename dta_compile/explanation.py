"""Reports about a compiled call or graph, for `dta_compile.explain` and for the trace artifact of a capture."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from dta_compile.errors import PlanError, RefusalError
from dta_compile.executable.executable import ChunkInput, Executable, FrontierValue
from dta_compile.executable.layers import AttentionLayer
from dta_compile.executable.masks import MaskProgram
from dta_compile.ops.attention import OVER_CHOSEN
from dta_compile.plan import Plan
from dta_compile.program_cache.cache import FOUND
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.runtime.calls.planned_call import PlannedCall, plan_call
from dta_compile.runtime.interception import Intercepted


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Report of how a call is compiled; `print` it.

    Attributes:
        text: the report.
        refusal: the error that the call would raise, if it is refused.
        plan: the plan of the call, if it runs over a tree.
        regions: number of operators in the prologue, trunk, head and epilogue.
        attention: one line per group of equal attention layers, with their mask class.
        prefix_key: inputs by which prefixes are compared: equal values make two prefixes one.
        frontier: name, shape per token and bytes of the values that leave the token region.
    """

    text: str
    refusal: RefusalError | None = None
    plan: Plan | None = None
    regions: dict[str, int] = dataclasses.field(default_factory=dict)
    attention: tuple[str, ...] = ()
    prefix_key: tuple[str, ...] = ()
    frontier: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def to_html(self, path: str | PathLike[str], **known: Any) -> None:
        """Write the plan of the call as an HTML page, with the token ids of the call.

        Args:
            path: the file to write.
            known: further contents of the page, see `Plan.to_html`.

        Raises:
            PlanError: the call has no plan because it is refused or runs without a tree.
        """
        if self.plan is None:
            raise PlanError("nothing to draw: the call has no plan", got=self.text)
        self.plan.to_html(path, **known)


def explain_engine(engine: Intercepted, args: Sequence[Any]) -> Explanation:
    """Report a call over a tree: run its prologue and plan it, but do not run its token region."""
    executable = engine.executable
    mode = "transparent" if executable.training else "score"
    call = plan_call(engine.begin(args), mode, [not value.is_cache for value in executable.frontier])
    further = [line for rest in executable.further for line in _attention(rest, _masks(rest))]
    call.predict_peak()
    sections = _sections(executable, call.masks.classes, further, call.batch * call.tokens)
    text = f"{_listed(sections)}\n{call.plan}"
    plan = dataclasses.replace(call.plan, sequences=_token_ids(call))
    attention, prefix_key, frontier = (tuple(sections[title]) for title in ("attention", "prefix key", "frontier"))
    return Explanation(text, None, plan, dict(executable.regions), attention, prefix_key, frontier)


def capture_report(executable: Executable) -> str:
    """Report the results of the passes on a captured graph before any call: regions, mixers, prefix key, frontier."""
    return _listed(_sections(executable, _masks(executable)))


def _sections(
    executable: Executable,
    masks: Sequence[MaskClass | MaskProgram],
    further: Sequence[str] = (),
    positions: int | None = None,
) -> dict[str, Sequence[str]]:
    """Return the lines of a report by title, in order.

    Args:
        masks: mask of each attention layer.
        further: lines for batches of other sizes.
        positions: number of positions `B * S` of a call, if there is one.
    """
    saved = f"{executable.joint.saved_bytes_per_token:,.0f} bytes per kept token"
    return {
        "regions": [f"{name}: {count} operators" for name, count in executable.regions.items()],
        "attention": _attention(executable, masks),
        "other mixers": _other_mixers(executable),
        "prefix key": [*map(_input, executable.trunk_keys)],
        "head inputs": [*map(_input, executable.head_inputs)],
        "frontier": [_frontier(value, positions) for value in executable.frontier],
        "activations": [saved] if executable.training else [],
        "batches of other sizes, each with a tree of its own": further,
        "passes": [_cached_passes(executable)] if FOUND in executable.seconds else [],
    }


def _masks(executable: Executable) -> list[MaskClass | MaskProgram]:
    return [layer.mask or MaskClass() for layer in executable.attention]


def _cached_passes(executable: Executable) -> str:
    """Compare the seconds to read a cached program with those that its passes took in the process that ran them."""
    seconds = sum(time for name, time in executable.seconds.items() if name != FOUND)
    return f"{FOUND}, {executable.seconds[FOUND]:.2f} s in the place of {seconds:.2f} s"


def _listed(sections: Mapping[str, Sequence[str]]) -> str:
    lines = [line for title, items in sections.items() if items for line in (title, *(f"  {item}" for item in items))]
    return "\n".join(lines)


def _token_ids(call: PlannedCall) -> list[Any] | None:
    """Return the token ids of every sequence; None if positions are the only integers that the call has per token."""
    tokens, candidates = call.rows.tokens, []
    for item in call.executable.trunk_keys:
        dense = call.dense[item.slot]
        one_a_token = dense.numel() == call.batch * call.tokens
        if not item.is_input or dense.is_floating_point() or not one_a_token:
            continue
        values = call.codes(item).reshape(-1)[tokens.places]
        runs = [values[begin : begin + len(key)] for begin, key in zip(tokens.begins, tokens.keys, strict=True)]
        if not all((np.diff(run) == 1).all() for run in runs):
            candidates.append((len(np.unique(values)), runs))
    # Masks and segment numbers have fewer distinct values than ids, so the input with the most is the ids.
    return max(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _attention(executable: Executable, masks: Sequence[MaskClass | MaskProgram]) -> tuple[str, ...]:
    kinds = collections.Counter(
        f"{_over_chosen(layer)}{mask}{_read_at_every_call(layer)}; {layer.kv_heads} KV heads of {layer.key_dim}, "
        f"{str(layer.dtype).removeprefix('torch.')}"
        for layer, mask in zip(executable.attention, masks, strict=True)
    )
    return tuple(f"{count} layers: {kind}" for kind, count in kinds.items())


def _over_chosen(layer: AttentionLayer) -> str:
    """Name what chooses keys, or reads chosen ones."""
    return "" if layer.mixer in OVER_CHOSEN else f"{layer.mixer.name}, "


def _other_mixers(executable: Executable) -> list[str]:
    others = (layer.mixer.name for layer in executable.mixers if not isinstance(layer, AttentionLayer))
    return [f"{count} layers: {name}" for name, count in collections.Counter(others).items()]


def _read_at_every_call(layer: AttentionLayer) -> str:
    mask = layer.mask
    if mask is None or mask.constant is not None:
        return ""
    tensors = (*mask.scalars, *mask.tables, *mask.items.values())
    numbers = [str(number) for number in mask.numbers if not number.free_symbols <= mask.items.keys()]
    read = sorted({*numbers, *map(str, tensors)})
    return f" (with {', '.join(read)} of this call)"


def _input(item: ChunkInput) -> str:
    return f"{item.name} {item.layout}"


def _frontier(value: FrontierValue, positions: int | None = None) -> str:
    size = value.dtype.itemsize
    for feature in value.features:
        size *= feature
    kind = "KV cache" if value.is_cache else "differentiable" if value.differentiable else "no gradient"
    shape = "x".join(map(str, value.features)) or "scalar"
    dense = f", {size * positions:,} bytes dense" if positions is not None else f", {size:,} bytes a token"
    return f"{value.name}: {shape} per token{dense}, {kind}"
