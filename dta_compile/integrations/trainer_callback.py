"""`DTACallback`: the one line for trainers of transformers and TRL, and a warning where their batches lose sharing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainerCallback

from dta_compile.plan import PrefixTree

logger = logging.getLogger("dta_compile")

# Batches that share so much less than their rows would together are worth a warning.
LOST = 1.25
# Rows that share so little have nothing to gain, however they are batched.
NOTHING = 1.1


class DTACallback(TrainerCallback):  # type: ignore[misc]
    """Compiles the trainer's model when training begins, and says once if the trainer's batches lose sharing.

        trainer = GRPOTrainer(model, ..., callbacks=[DTACallback()])

    A model that is compiled already, or a part of it, is left as it is and watched. The rows of the first generation
    batch (GRPO) or of the first optimizer step are compared: what they share batch by batch, and what they would share
    in one. After that nothing is watched any more.

    TRL pads prompts on the left, and transformers then counts positions by column, so that prompts of different lengths
    have no token in common. Rotary positions mean the same when they are shifted: models that have them are called with
    positions that begin at the first token of each row, as generation counts them.

    Args:
        options: of `torch.compile(..., backend="dta", options=...)`.

    Attributes:
        now, possible: compression over the prefix trees of the batches, and over one tree of all their rows; None
            before they were compared.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self.now: float | None = None
        self.possible: float | None = None
        self._batches: list[list[NDArray[np.int64]]] = []
        self._watches = False
        self._compiled: torch.nn.Module | None = None
        self._call: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compile the model in place, unless something of it is."""
        compiled = next((module for module in model.modules() if module._compiled_call_impl is not None), None)
        if compiled is None:
            model.compile(backend="dta", **({} if self.options is None else {"options": dict(self.options)}))
            compiled = model
        self._watches = self.now is None
        self._enter(compiled)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two batches of an optimizer step."""
        self._compare_if_due(args)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an optimizer step."""
        self._compare_if_due(args)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model compiled, and nothing else."""
        if self._compiled is not None:
            self._compiled._compiled_call_impl = self._call
        self._compiled = self._call = None
        self._batches, self._watches = [], False

    def _enter(self, module: torch.nn.Module) -> None:
        """Stand before the compiled module: hooks of it would be a part of its graph."""
        shifts = positions_are_relative(module)

        def call_aligned(*args: Any, **kwargs: Any) -> Any:
            if self._watches and module.training and torch.is_grad_enabled():
                self._batches.append(_sequences(*args, **kwargs))
            return call(*args, **(with_positions(kwargs) if shifts else kwargs))

        # A cell of the function, by which `last_plan` finds what was compiled.
        call: Any = module._compiled_call_impl
        self._compiled, self._call = module, call
        module._compiled_call_impl = call_aligned

    def _compare_if_due(self, args: Any) -> None:
        per_generation = getattr(args, "steps_per_generation", None) or 1
        if not self._watches or len(self._batches) < max(args.gradient_accumulation_steps, per_generation):
            return
        self.now, self.possible = compressions(self._batches)
        batches = len(self._batches)
        self._batches, self._watches = [], False
        if self.possible >= LOST * self.now:
            logger.warning(
                "dta: the %d batches of this step have C %.2f, all their rows in one batch would have C %.2f: %s",
                *(batches, self.now, self.possible, _advice(args)),
            )
        elif self.possible < NOTHING:
            logger.warning(
                "dta: the rows of this step share next to nothing (C %.2f): let rows with common prefixes follow one "
                "another, and the trainer keep their order (train_sampling_strategy='sequential')",
                self.possible,
            )


def with_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of padded rows, with positions `[B, S]` that count the tokens of each row; others, and
    calls that continue a cache, as they are."""
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if inputs.get("position_ids") is not None or not isinstance(mask, torch.Tensor) or ids is None:
        return inputs
    if mask.shape != ids.shape or inputs.get("past_key_values") is not None:
        return inputs
    return {**inputs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def positions_are_relative(model: torch.nn.Module) -> bool:
    """Whether a model uses positions for rotations alone, whose products depend on differences only.

    Llama 4, Ministral 3 and Mistral 4 also scale queries by how far from the first position they are.
    """
    text = getattr(model.config, "get_text_config", lambda: model.config)() if hasattr(model, "config") else None
    rope = getattr(text, "rope_parameters", None) or {}
    scales = getattr(text, "attn_temperature_tuning", None) or rope.get("llama_4_scaling_beta")
    return not scales and any(name.endswith("rotary_emb") for name, _ in model.named_modules())


def compressions(batches: Sequence[Sequence[Any]]) -> tuple[float, float]:
    """Compression of several batches of token sequences, each over its own prefix tree and all of them over one."""
    together = [sequence for batch in batches for sequence in batch]
    tokens = sum(len(sequence) for sequence in together)
    apart = sum(PrefixTree.build(batch).num_rows for batch in batches)
    return tokens / max(apart, 1), tokens / max(PrefixTree.build(together).num_rows, 1)


def _advice(args: Any) -> str:
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if not hasattr(args, "num_generations"):
        return (
            f"per_device_train_batch_size={rows} and gradient_accumulation_steps=1 make the same update from one batch"
        )
    steps = args.steps_per_generation
    same = "the same update" if steps == args.gradient_accumulation_steps else "one update of a generation batch"
    rows = args.per_device_train_batch_size * steps
    return (
        "TRL shuffles the rows of a generation batch before it splits them, which cuts groups apart; "
        f"per_device_train_batch_size={rows}, steps_per_generation=1 and gradient_accumulation_steps=1 make {same} "
        f"from one batch (keep it a multiple of num_generations={args.num_generations})"
    )


def _sequences(
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **others: Any,
) -> list[NDArray[np.int64]]:
    """The sequences of a call: rows without padding, or what lies between positions of zero in packed rows."""
    if input_ids is None:
        return []
    found: list[NDArray[np.int64]] = []
    for i, row in enumerate(input_ids.cpu().numpy()):
        if attention_mask is not None:
            found.append(row[attention_mask[i].cpu().numpy() > 0])
        elif position_ids is not None:
            starts = np.flatnonzero(position_ids[i % len(position_ids)].cpu().numpy() == 0)
            found += np.split(row, starts[starts > 0])
        else:
            found.append(row)
    return found
