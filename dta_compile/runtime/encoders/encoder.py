"""Methods that make features of pixels (`get_image_features`), run once per distinct *unit* of a batch.

They run under ordinary autograd on each distinct unit (image, tile, video, clip). What they compute is not proven: the
first call in each training mode is compared with calls on each unit alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dta_compile.errors import RefusalError
from dta_compile.integrations import checkpoint_flags
from dta_compile.runtime.encoders.distinct_media import Kept, dependence
from dta_compile.runtime.encoders.method_calls import Arguments, MethodCall, call_of
from dta_compile.runtime.encoders.outputs import FIELDS, HIDDEN, UNREAD, Form, features_in, form_of, with_mask
from dta_compile.runtime.encoders.trial import Trial, WeightReads, is_batch_norm, modules_called
from dta_compile.runtime.encoders.units import Batch, Tensors, batch_of
from dta_compile.runtime.measure.budget import default_budget

# Largest difference between a unit's features computed alone and with other units, in relation to their norm.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class Encoder(MethodCall):
    """A method of a model that makes features of images (or videos, or sounds), with its constant arguments.

    Attributes:
        units, runs, groups: how many units the last call of `distinct` had, how many of them ran, in how many groups.
        kept_bytes: about the activations of the last call that are kept at a time.
        is_trained: whether a parameter that makes features requires a gradient, wherever it belongs; as of `learn`.
        refusal: why the method cannot run once per distinct unit, known after `learn`.
        shared: names of arguments that belong to all units.
        selects: a mask in the output says which features there are; else all are returned, and the mask.
    """

    shared: tuple[str, ...] = ()
    selects = True

    def __init__(self, module: nn.Module, method: Callable[..., Any], arguments: Arguments) -> None:
        super().__init__(module, method, arguments)
        self.units = self.runs = self.groups = 0
        self.kept_bytes = 0.0
        self.is_trained = False
        self.refusal: RefusalError | None = None
        self._form: Form | None = None
        self._one_by_one = False  # since the method does not say which features are of which unit
        self._bytes_per_row: float | None = None  # that autograd keeps, by rows of the first argument
        # By training modes and floats, such as the `p` of dropout, of the modules that the method calls: kinds of units
        # that were compared, up to 2.
        self._looked_at: dict[tuple[tuple[float, ...], ...], int] = {}

    @property
    def form(self) -> Form:
        """What the method returns, known after `learn`."""
        assert self._form is not None
        return self._form

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Encode all units.

        Args:
            tensors: the tensor arguments of the method, in order.

        Returns:
            `[n, D]` each: features of all units, then features of further levels (DeepStack).
        """
        return self._features(tensors)[0] if self.form.fields else (tensors[0].new_zeros(0, 1),)

    def distinct(self, *tensors: torch.Tensor, budget: int | None = None) -> tuple[Tensors, torch.Tensor]:
        """Encode each distinct unit once; arguments as in a call.

        If the activations of all would need more than `budget` bytes (None: by the free memory), units are encoded in
        groups that need no more or have one unit, and again in the backward.

        Returns:
            the features of distinct units in the order of their first occurrence, and int64 `[n]`: the row among them
            of each feature of the whole batch.

        Raises:
            RefusalError: features of a unit are random, or depend on other units.
        """
        if self._form is None:
            self.learn(tensors)
        batch = self._batch(tensors)
        first, kinds = batch.kinds() if batch is not None else ([0], [0])
        self._look(tensors, batch, first, kinds)
        if batch is None:
            with checkpoint_flags.shown(self._modules()):
                features, _ = self._features(tensors)
            self.units = self.runs = self.groups = 1
            return features, torch.arange(len(features[0]), device=features[0].device)
        features, lengths = self._in_groups(batch, self._grouped(batch, first, budget))
        rows = torch.arange(len(features[0])).split(lengths)
        self.units, self.runs = batch.count, len(first)
        return features, torch.cat([rows[kind] for kind in kinds]).to(features[0].device)

    @property
    def note(self) -> str:
        """What the last call of `distinct` ran."""
        again = f" in {self.groups} groups, and again in the backward" if self.groups > 1 else ""
        return f"{self.name}: {self.units} images (or other media), {self.runs} different and encoded{again}"

    def learn(self, tensors: Sequence[torch.Tensor]) -> None:
        """Run the method once without gradients to see what it returns, and which modules and parameters it uses."""
        with modules_called(self.module) as called, Trial(self.module) as trial, WeightReads() as reads:
            output = self.run(tensors)
        values = [(name, getattr(output, name, None), has_levels) for name, has_levels in FIELDS]
        hidden = getattr(output, HIDDEN, None)
        if hidden is values[0][1] or all(value is None for _, value, _ in values):
            values.append((HIDDEN, hidden, False))
        fields = tuple((name, form_of(value, has_levels)) for name, value, has_levels in values if value is not None)
        outermost = [name for name in called if not any(name.startswith(f"{other}.") for other in called)]
        fields = with_mask(fields, output, self.selects)
        widths = tuple((leaf.shape[-1], leaf.dtype, leaf.device) for leaf in features_in(output, fields))
        # All weights of modules that are called, since kernels that are no operators read them unseen.
        inside = {id(weight): weight for name in outermost for weight in self.module.get_submodule(name).parameters()}
        others = reads.weights.keys() - inside.keys()
        named = self.module.named_parameters(remove_duplicate=False)
        weights = tuple(name for name, weight in named if id(weight) in others)
        self.is_trained = any(weight.requires_grad for weight in (reads.weights | inside).values())
        known = dict(fields)
        items = output.items() if isinstance(output, Mapping) else ()
        left = (value for name, value in items if name not in known and not name.endswith(UNREAD))
        has_others = any(isinstance(value, torch.Tensor) for value in left)
        self._form = Form(type(output), fields, widths, tuple(outermost), weights, has_others)
        self._one_by_one = bool(fields) and fields[0][1] == ("tensor", 0)
        self._bytes_per_row = None
        self.refusal = self._refusal_of(trial, self._modules())

    def _features(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, list[int]]:
        """Run the method; return its features, and how many of them each entry of its output has."""
        output = self.run(tensors)
        (name, form), *_ = self.form.fields
        entries = getattr(output, form[1] if form[0] == "masked" else name)
        lengths = [int(entry.sum()) if form[0] == "masked" else entry.numel() // entry.shape[-1] for entry in entries]
        return tuple(features_in(output, self.form.fields)), lengths

    def _of_units(self, batch: Batch, units: Sequence[int]) -> tuple[Tensors, list[int]]:
        """Encode some of the units; return their features, and how many of them each unit has."""
        if not self._one_by_one:
            features, lengths = self._features(batch.selected(units))
            if len(lengths) == len(units):
                return features, lengths
            self._one_by_one = True
        alone = [self._features(batch.selected([unit]))[0] for unit in units]
        return tuple(map(torch.cat, zip(*alone, strict=True))), [len(features[0]) for features in alone]

    def _grouped(self, batch: Batch, units: Sequence[int], budget: int | None) -> list[list[int]]:
        self.kept_bytes = 0.0
        if not (torch.is_grad_enabled() and self.is_trained) or self._is_checkpointed():
            return [list(units)]
        if self._bytes_per_row is None:
            with (kept_of_unit := Kept(self.module.parameters())):
                self._of_units(batch, units[:1])
            self._bytes_per_row = kept_of_unit.bytes / batch.rows[units[0]]
        most = default_budget(self.form.widths[0][2]) if budget is None else budget
        groups: list[list[int]] = [[]]
        kept = 0.0
        for unit in units:
            size = self._bytes_per_row * batch.rows[unit]
            if groups[-1] and kept + size > most:
                groups, kept = [*groups, []], 0.0
            groups[-1].append(unit)
            kept += size
            self.kept_bytes = max(self.kept_bytes, kept)
        return groups

    def _is_checkpointed(self) -> bool:
        with checkpoint_flags.shown(self._modules()):
            parts = (part for module in self._modules() for part in module.modules())
            return any(getattr(part, checkpoint_flags.FLAG, False) for part in parts)

    def _in_groups(self, batch: Batch, groups: list[list[int]]) -> tuple[Tensors, list[int]]:
        def encode(units: list[int]) -> tuple[Tensors, list[int]]:
            with checkpoint_flags.shown(self._modules()):
                return self._of_units(batch, units)

        self.groups = len(groups)
        if len(groups) == 1:
            return encode(groups[0])
        of_groups = [checkpoint(encode, units, use_reentrant=False, preserve_rng_state=False) for units in groups]
        features = tuple(map(torch.cat, zip(*(made for made, _ in of_groups), strict=True)))
        return features, [length for _, lengths in of_groups for length in lengths]

    def _modules(self) -> list[nn.Module]:
        return [self.module.get_submodule(name) for name in self.form.modules]

    def _batch(self, tensors: Tensors) -> Batch | None:
        is_padded = "pixel_attention_mask" in inspect.signature(self.method).parameters
        return batch_of(self.names(), tensors, self.shared, is_padded)

    def _look(self, tensors: Tensors, batch: Batch | None, first: Sequence[int], kinds: Sequence[int]) -> None:
        """Check that features are not random, and that units do not depend on each other.

        This is done for the first call with these settings, and for the first one with several kinds of units.
        """
        parts = (self.module, *(part for module in self._modules() for part in module.modules()))
        mode = tuple(tuple(x for x in vars(part).values() if isinstance(x, (bool, float))) for part in parts)
        if min(len(first), 2) <= self._looked_at.get(mode, 0):
            return
        with Trial(self.module) as trial:
            together, lengths = self._features(tensors)
        if refusal := self._refusal_of(trial, self._modules()):
            raise refusal
        if batch is not None:
            self._one_by_one |= len(lengths) != batch.count
            self._compare(batch, together, first, kinds)
        self._looked_at[mode] = min(len(first), 2)

    def _compare(self, batch: Batch, together: Tensors, first: Sequence[int], kinds: Sequence[int]) -> None:
        """Compare features of all units with those of every distinct unit alone."""
        with torch.no_grad():
            alone = [self._of_units(batch, [unit])[0] for unit in first]
        for level, features in enumerate(together):
            own = torch.cat([alone[kind][level] for kind in kinds])
            if own.shape != features.shape or not _is_close(own, features, TOLERANCES.get(features.dtype, 0.0)):
                raise dependence(self.name, "other features of an image alone than of all images")

    def _refusal_of(self, trial: Trial, modules: Sequence[nn.Module]) -> RefusalError | None:
        parts = [part for module in modules for part in module.modules()]
        if any(part.training and is_batch_norm(part) for part in parts):
            return dependence(self.name, "batch norm in training mode, which reads all images of a batch")
        if trial.written:
            return dependence(self.name, f"buffer {trial.written}, which all images of a batch are written to at once")
        return dependence(self.name, "random numbers (dropout)") if trial.is_random else None


def _is_close(features: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return whether features are equal where any is infinite, and close by their norm elsewhere; NaN counts as 0."""
    features, expected = (value.double().nan_to_num(0, torch.inf, -torch.inf) for value in (features, expected))
    is_finite = features.isfinite() & expected.isfinite()
    if not bool(((features == expected) | is_finite).all()):
        return False
    features, expected = (value.where(is_finite, 0) for value in (features, expected))
    return bool(torch.linalg.vector_norm(features - expected) <= tolerance * torch.linalg.vector_norm(expected))


def encoder_of(handle: int) -> Encoder:
    """Return the encoder that a handle of this process stands for."""
    return call_of(Encoder, handle)
