"""Methods of multimodal models that captured graphs call before the tree, as they are.

A method that makes features of pixels (`get_image_features`) runs under ordinary autograd on each distinct *unit*
(image, tile, video, clip) of a batch. What it computes is not proven: its first call in each training mode is compared
with calls on each unit alone. `capture.encoder_calls` puts the calls into graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dta_compile.errors import RefusalError
from dta_compile.integrations import checkpoint_flags
from dta_compile.integrations.fully_shard import reading_gathered
from dta_compile.runtime.encoders import Kept, dependence, distinct
from dta_compile.runtime.measure.budget import default_budget
from dta_compile.torch_compat.tensors import TorchDispatchMode, tree_leaves

TENSOR = "<tensor>"  # stands for a tensor among the constant arguments of a method
# Largest difference between a unit's features computed alone and with other units, in relation to their norm.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# Fields of a method's output that hold features, and whether the items of the outermost list are levels, not units.
FIELDS = (("pooler_output", False), ("deepstack_features", True))
HIDDEN = "last_hidden_state"  # holds the features of encoders of sounds, alone or as "pooler_output"

Tensors = tuple[torch.Tensor, ...]
Sizes = Sequence[Sequence[int] | None]

_calls: dict[int, MethodCall] = {}
_handles = itertools.count()


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of a method, with `TENSOR` in the place of tensors; a list of tensors is a tuple of `TENSOR`."""

    positional: tuple[Any, ...]
    keyword: tuple[tuple[str, Any], ...]

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Put tensors in their places."""
        left = iter(tensors)
        positional = [_filled(value, left) for value in self.positional]
        return positional, {name: _filled(value, left) for name, value in self.keyword}


def _filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, tensors) for item in value)
    return next(tensors) if isinstance(value, str) and value == TENSOR else value


def _tensors_in(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_tensors_in, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensors_in, value))
    return int(isinstance(value, str) and value == TENSOR)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tensor arguments of a call as a batch of units.

    Attributes:
        tensors: arguments of the method, in which units can be selected.
        sizes: by argument, the rows of each unit along dimension 0; None for an argument that all units share.
        count: the number of units.
    """

    tensors: Tensors
    sizes: Sizes
    count: int

    @property
    def rows(self) -> Sequence[int]:
        """The rows of each unit in the first argument that has some."""
        return next(sizes for sizes in self.sizes if sizes is not None)

    def unit(self, index: int) -> Tensors:
        """Return the parts of all arguments that belong to a unit, as views."""
        parts = []
        for tensor, sizes in zip(self.tensors, self.sizes, strict=True):
            start = 0 if sizes is None else sum(sizes[:index])
            parts.append(tensor if sizes is None else tensor[start : start + sizes[index]])
        return tuple(parts)

    def selected(self, units: Sequence[int]) -> Tensors:
        """Return the arguments of a call over some of the units."""
        if len(units) == self.count:
            return self.tensors
        parts = zip(*(self.unit(index) for index in units), strict=True)
        return tuple(
            part[0] if sizes is None else torch.cat(part) for part, sizes in zip(parts, self.sizes, strict=True)
        )

    def kinds(self) -> tuple[list[int], list[int]]:
        """Return the first unit of each kind of equal content, and by unit its kind: see `distinct`."""
        own = [(number, sizes) for number, sizes in enumerate(self.sizes) if sizes is not None]
        of_size: dict[tuple[int, ...], list[int]] = {}
        for index in range(self.count):
            of_size.setdefault(tuple(sizes[index] for _, sizes in own), []).append(index)
        leaders = list(range(self.count))
        for units in of_size.values():
            selected = self.selected(units)
            values = [selected[number].unflatten(0, (len(units), sizes[units[0]])) for number, sizes in own]
            first, kinds = distinct(values)
            for index, kind in zip(units, kinds, strict=True):
                leaders[index] = units[first[kind]]
        found = list(dict.fromkeys(leaders))
        return found, [found.index(leader) for leader in leaders]


@dataclasses.dataclass(frozen=True)
class Form:
    """What a method returns, without the numbers.

    Attributes:
        returned: class of the output.
        fields: by name of a field with features, its form (`_form`).
        widths: by feature tensor `[n, D]`, its D, dtype and device.
        modules: names of the outermost submodules that the method calls.
        weights: names of the model's parameters that the method reads otherwise.
        has_others: a field is neither features nor the mask of those that are used.
    """

    returned: type
    fields: tuple[tuple[str, Any], ...]
    widths: tuple[tuple[int, torch.dtype, torch.device], ...]
    modules: tuple[str, ...]
    weights: tuple[str, ...]
    has_others: bool

    @property
    def per_entry(self) -> int:
        """Features per entry that are a dimension of the output (`[units, T, D]`), else 1."""
        return self.fields[0][1][1] or 1 if self.fields and self.fields[0][1][0] == "tensor" else 1


def _form(value: Any, has_levels: bool) -> Any:
    """Return the form of features.

    That of a tensor `[units, T, D]` is `("tensor", T)`, of a tensor `[n, D]` `("tensor", 0)`, of a list of one tensor
    per unit `("list",)` or `("tuple",)`; a list of levels is followed by the forms of these. Features that a mask of
    the output selects are `("masked", its name)`, the mask is `("mask",)`: they are returned without the others.
    """
    if isinstance(value, torch.Tensor):
        return ("tensor", value.shape[1] if value.dim() == 3 else 0)
    if isinstance(value, (list, tuple)):
        name = "list" if isinstance(value, list) else "tuple"
        if not has_levels and all(isinstance(item, torch.Tensor) for item in value):
            return (name,)
        return (name, *(_form(item, has_levels=False) for item in value))
    return ("constant", value)


def _with_mask(fields: tuple[tuple[str, Any], ...], output: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields with that of a mask `[units, T]` of features `[units, T, D]`, if the output has one."""
    of_units = {getattr(output, name).shape[:-1] for name, form in fields if form[0] == "tensor" and form[1]}
    others = output.items() if isinstance(output, Mapping) and len(of_units) == 1 else ()
    masks = [name for name, value in others if _is_of_integers(value) and value.shape in of_units]
    if len(masks) != 1 or output[masks[0]].dtype is not torch.bool or any(form[0] != "tensor" for _, form in fields):
        return fields
    return (*((name, ("masked", masks[0])) for name, _ in fields), (masks[0], ("mask",)))


def _is_of_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _features_in(output: Any, fields: tuple[tuple[str, Any], ...]) -> Iterator[torch.Tensor]:
    """Yield the features of all units in a method's output, as `[n, D]`."""
    for name, form in fields:
        value = getattr(output, name)
        if form[0] == "masked":
            yield value[getattr(output, form[1]).to(value.device)]
        elif form[0] == "mask":
            yield value[value][:, None]
        else:
            yield from _leaves(value, form)


def _leaves(value: Any, form: Any) -> Iterator[torch.Tensor]:
    if form[0] == "tensor":
        yield value.reshape(-1, value.shape[-1])
    elif form[0] != "constant" and len(form) == 1:
        yield torch.cat([item.reshape(-1, item.shape[-1]) for item in value])
    elif form[0] != "constant":
        for item, inner in zip(value, form[1:], strict=True):
            yield from _leaves(item, inner)


class MethodCall:
    """A call of a model's method in captured graphs, with its constant arguments.

    Attributes:
        handle: the number that stands for it in the graphs of this process.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any], arguments: Arguments) -> None:
        self.handle = next(_handles)
        self.method, self.arguments = method, arguments
        self.of = weakref.ref(module)
        _calls[self.handle] = self
        weakref.finalize(module, _calls.pop, self.handle, None)

    @property
    def module(self) -> nn.Module:
        """The model that the method belongs to."""
        module = self.of()
        assert module is not None
        return module

    @property
    def name(self) -> str:
        """The method's name, with its class."""
        return f"{type(self.module).__name__}.{self.method.__name__}"

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the method with its tensor arguments, in order."""
        positional, keyword = self.arguments.filled(tensors)
        with reading_gathered():
            return self.method(self.module, *positional, **keyword)


class Encoder(MethodCall):
    """A method of a model that makes features of images (or videos, or sounds), with its constant arguments.

    Attributes:
        units, runs, groups: how many units the last call of `distinct` had, how many of them ran, in how many groups.
        kept_bytes: about the activations of the last call that are kept at a time.
        is_trained: whether a parameter that makes features requires a gradient, wherever it belongs; as of `learn`.
        refusal: why the method cannot run once per distinct unit, known after `learn`.
        shared: names of arguments that belong to all units.
    """

    shared: tuple[str, ...] = ()

    def __init__(self, module: nn.Module, method: Callable[..., Any], arguments: Arguments) -> None:
        super().__init__(module, method, arguments)
        self.units = self.runs = self.groups = 0
        self.kept_bytes = 0.0
        self.is_trained = False
        self.refusal: RefusalError | None = None
        self._form: Form | None = None
        self._one_by_one = False  # since the method does not say which features are of which unit
        self._bytes_per_row: float | None = None  # that autograd keeps, by rows of the first argument
        # By training modes of the modules that the method calls: kinds of units that were compared, up to 2.
        self._looked_at: dict[tuple[bool, ...], int] = {}

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
        no_batch_norm, trial = _training_without_batch_norm(self.module), Trial(self.module)
        with no_batch_norm, _called(self.module) as called, trial, _Weights() as reads:
            output = self.run(tensors)
        values = [(name, getattr(output, name, None), has_levels) for name, has_levels in FIELDS]
        hidden = getattr(output, HIDDEN, None)
        if hidden is values[0][1] or all(value is None for _, value, _ in values):
            values.append((HIDDEN, hidden, False))
        fields = tuple((name, _form(value, has_levels)) for name, value, has_levels in values if value is not None)
        outermost = [name for name in called if not any(name.startswith(f"{other}.") for other in called)]
        fields = _with_mask(fields, output)
        widths = tuple((leaf.shape[-1], leaf.dtype, leaf.device) for leaf in _features_in(output, fields))
        # All weights of modules that are called, since kernels that are no operators read them unseen.
        inside = {id(weight): weight for name in outermost for weight in self.module.get_submodule(name).parameters()}
        others = reads.weights.keys() - inside.keys()
        named = self.module.named_parameters(remove_duplicate=False)
        weights = tuple(name for name, weight in named if id(weight) in others)
        self.is_trained = any(weight.requires_grad for weight in (reads.weights | inside).values())
        known = dict(fields)
        items = output.items() if isinstance(output, Mapping) else ()
        has_others = any(_is_of_integers(value) and name not in known for name, value in items)
        self._form = Form(type(output), fields, widths, tuple(outermost), weights, has_others)
        self._one_by_one = bool(fields) and fields[0][1] == ("tensor", 0)
        self._bytes_per_row = None
        self.refusal = self._refusal_of(trial.is_random, self._modules())

    def _features(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, list[int]]:
        """Run the method; return its features, and how many of them each entry of its output has."""
        output = self.run(tensors)
        (name, form), *_ = self.form.fields
        entries = getattr(output, form[1] if form[0] == "masked" else name)
        lengths = [int(entry.sum()) if form[0] == "masked" else entry.numel() // entry.shape[-1] for entry in entries]
        return tuple(_features_in(output, self.form.fields)), lengths

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
            with (one := Kept(self.module.parameters())):
                self._of_units(batch, units[:1])
            self._bytes_per_row = one.bytes / batch.rows[units[0]]
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
        """Return the arguments as a batch of units; None if units cannot be told apart."""
        names = self._names()
        own = {name: tensor for name, tensor in zip(names, tensors, strict=True) if name not in ("", *self.shared)}
        # A list of tensors has no common dimension of units, and what a method only passes on may be of anything.
        is_list = len(own) != sum(name not in ("", *self.shared) for name in names)
        is_passed_on = any(tensor.dim() for name, tensor in zip(names, tensors, strict=True) if not name)
        # Equal tensors that require gradients have gradients of their own.
        is_shared = any(tensor.dim() == 0 or tensor.requires_grad for tensor in own.values())
        if not own or is_list or is_passed_on or is_shared:
            return None
        count, rows = len(next(iter(own.values()))), []
        grid = next((tensor for name, tensor in own.items() if name.endswith("grid_thw")), None)
        if grid is not None:
            count, rows = len(grid), grid.prod(-1).tolist()
        elif "pixel_attention_mask" in inspect.signature(self.method).parameters:
            # Images by row of the batch, [B, n, 3, H, W]; a row with fewer is filled up with zeros, which are skipped.
            own = {name: tensor.flatten(0, 1)[:, None] for name, tensor in own.items()}
            is_image = own["pixel_values"].flatten(1).any(-1)
            own = {name: tensor[is_image] for name, tensor in own.items()}
            count = len(own["pixel_values"])
        sizes = {
            name: [1] * count if len(tensor) == count else rows if len(tensor) == sum(rows) else None
            for name, tensor in own.items()
        }
        if not count or None in sizes.values():
            return None
        values = tuple(own.get(name, tensor) for name, tensor in zip(names, tensors, strict=True))
        return Batch(values, [sizes.get(name) for name in names], count)

    def _names(self) -> list[str]:
        """Return the method's parameter of each tensor; empty for those that it takes by `**kwargs`."""
        signature = inspect.signature(self.method)
        bound = signature.bind(None, *self.arguments.positional, **dict(self.arguments.keyword)).arguments
        names = []
        for name, value in bound.items():
            is_own = signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD
            names += [name if is_own else ""] * _tensors_in(value)
        return names

    def _look(self, tensors: Tensors, batch: Batch | None, first: Sequence[int], kinds: Sequence[int]) -> None:
        """Check that features are not random, and that units do not depend on each other.

        This is done for the first call in a training mode, and for the first one with several kinds of units.
        """
        mode = tuple(part.training for module in self._modules() for part in module.modules())
        if min(len(first), 2) <= self._looked_at.get(mode, 0):
            return
        if refusal := self._refusal_of(False, self._modules()):
            raise refusal
        with Trial(self.module) as trial:
            together, lengths = self._features(tensors)
        if refusal := self._refusal_of(trial.is_random, []):
            raise refusal
        if batch is not None:
            self._one_by_one |= len(lengths) != batch.count
            self._compare(batch, together, first, kinds)
        self._looked_at[mode] = min(len(first), 2)

    def _compare(self, batch: Batch, together: Tensors, first: Sequence[int], kinds: Sequence[int]) -> None:
        """Compare features of all units with those of every distinct unit alone."""
        with torch.no_grad():
            alone = [self._of_units(batch, [unit])[0] for unit in first]
        for level, found in enumerate(together):
            expected = torch.cat([alone[kind][level] for kind in kinds])
            if expected.shape != found.shape or not _is_close(expected, found, TOLERANCES.get(found.dtype, 0.0)):
                raise dependence(self.name, "other features of an image alone than of all images")

    def _refusal_of(self, is_random: bool, modules: Sequence[nn.Module]) -> RefusalError | None:
        parts = [part for module in modules for part in module.modules()]
        if any(part.training and _is_batch_norm(part) for part in parts):
            return dependence(self.name, "batch norm in training mode, which reads all images of a batch")
        return dependence(self.name, "random numbers (dropout)") if is_random else None


def _is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.batchnorm._BatchNorm)


def _is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    return bool(torch.linalg.vector_norm(one - other) <= tolerance * torch.linalg.vector_norm(other))


class Trial:
    """Run without gradients; the random state is kept, and `is_random` tells whether it was read.

    (Operators cannot be asked: torch's attention counts as random, though it draws nothing without dropout.)
    """

    def __init__(self, module: nn.Module) -> None:
        devices = {weight.device for weight in module.parameters()}
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.is_random = False

    def _state(self) -> list[torch.Tensor]:
        of_devices = (torch.get_device_module(device).get_rng_state(device) for device in self.devices)
        return [torch.get_rng_state(), *of_devices]

    @staticmethod
    def _state_of_numpy() -> tuple[bytes, Any]:
        state: Any = np.random.get_state()
        return state[1].tobytes(), state[2:]

    def __enter__(self) -> Trial:
        self._grad = torch.no_grad()
        self._grad.__enter__()
        self._before, self._of_numpy = self._state(), (np.random.get_state(), self._state_of_numpy())
        return self

    def __exit__(self, *error: object) -> None:
        self._grad.__exit__(*error)
        before, of_numpy = self._of_numpy
        self.is_random = not all(map(torch.equal, self._before, self._state())) or of_numpy != self._state_of_numpy()
        np.random.set_state(before)
        torch.set_rng_state(self._before[0])
        for device, state in zip(self.devices, self._before[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


class _Weights(TorchDispatchMode):
    """Collect parameters that operators read, and other tensors that require a gradient, by their `id`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad):
                self.weights[id(value)] = value
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _training_without_batch_norm(module: nn.Module) -> Iterator[None]:
    """Keep running statistics from a trial run."""
    parts = [part for part in module.modules() if part.training and _is_batch_norm(part)]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True


@contextlib.contextmanager
def _called(module: nn.Module) -> Iterator[dict[str, None]]:
    """Give the names of the submodules that are called, in order of their first calls."""
    names = {part: name for name, part in module.named_modules() if name}
    called: dict[str, None] = {}

    def note(part: nn.Module, _: Any) -> None:
        if part in names:
            called[names[part]] = None

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        hook.remove()


class Positions(MethodCall):
    """A method of a model that computes positions of tokens in several axes (M-RoPE) from ids and grids of images."""

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Compute positions `[axes, B, S]`; the first of the tensors are ids `[B, S]`."""
        with torch.no_grad():
            positions: torch.Tensor = self.run(tensors)
        assert positions.shape[1:] == tensors[0].shape, self.name  # what the trace is told
        return positions


def register(kind: type[MethodCall], module: nn.Module, method: Callable[..., Any], arguments: Arguments) -> int:
    """Return the handle of a call of a model's method with constant arguments, always the same one."""
    for call in _calls.values():
        if call.of() is module and (type(call), call.method, call.arguments) == (kind, method, arguments):
            return call.handle
    return kind(module, method, arguments).handle


def encoder_of(handle: int) -> Encoder:
    """Return the encoder that a handle of this process stands for."""
    encoder = _calls[handle]
    assert isinstance(encoder, Encoder)
    return encoder


def positions_of(handle: int) -> Positions:
    """Return the method that computes positions that a handle of this process stands for."""
    positions = _calls[handle]
    assert isinstance(positions, Positions)
    return positions
