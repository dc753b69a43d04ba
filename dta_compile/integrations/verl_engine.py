"""Training engine for verl over prefix trees, selected by `strategy: dta` in the configuration.

verl imports this module through the entry-point group "verl.plugins". The engine is verl's FSDP engine with FSDP2,
except for these points: the rows of a mini-batch (or all rows whose log-probs are computed) are dealt out among ranks
by their prefix tree, and those of a rank are one micro-batch, so that they share prefixes; ranks with equal rows
(`ulysses_sequence_parallel_size`) run one tree; log-probs, entropies and values come from one compiled function, so
that no logits are returned; and gradient checkpointing, offloading of activations, Liger's and verl's fused kernels are
off, since the plan decides about recomputation and the head has no logits as it is. The loss, its normalisation,
gradient clipping, the optimiser, offloading and checkpoints are verl's.
Models that take images run transformers' own `forward`, whose encoders run once per distinct image, in place of the one
that verl gives their classes.

verl is imported here only. Supported: 0.9.1.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import FSDPEngineConfig
from verl.workers.config.engine import EngineConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree

from dta_compile.distributed.group import Group
from dta_compile.errors import OptionError, RefusalError, RuntimeContractError
from dta_compile.options import Options
from dta_compile.plan import PrefixTree, balance

logger = logging.getLogger("dta_compile")

DEVICES = ["cuda", "cpu"]
# Names of per-token outputs of verl besides log-probs, by the setting that requests them.
EXTRA_VALUES = {"calculate_entropy": "entropy", "calculate_sum_pi_squared": "sum_pi_squared"}
INPUTS = {"input_ids", "attention_mask", "position_ids"}
# Entries of multi_modal_inputs that models do not read: a count of verl's, and what positions were computed from.
NOT_OF_MODELS = {"images_seqlens", "mm_token_type_ids"}
LEAST_TEMPERATURE = 1e-8  # verl's
# Rows move only if that lowers the largest number of tree tokens of a rank below this share.
WORTHWHILE = 0.95

Values = dict[str, torch.Tensor]


@dataclasses.dataclass
class DTAEngineConfig(FSDPEngineConfig):
    """verl's FSDP configuration, extended by options of the backend.

    Attributes:
        dta: options of `torch.compile(..., backend="dta", options=...)`.
        deal_rows: whether rows of a mini-batch move to other ranks, where that saves tokens.
    """

    strategy: str = "dta"
    dta: dict[str, Any] = dataclasses.field(default_factory=dict)
    deal_rows: bool = True

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # FSDP's own method rejects this strategy
        _only("strategy", self.strategy, "dta", "leave it out")
        Options.parse(self.dta)


@EngineRegistry.register(model_type="language_model", backend="dta", device=DEVICES)
class DTAEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine for causal language models, over the prefix tree of each mini-batch.

    Attributes:
        token_values: the compiled function; `dta_compile.last_plan` and `explain` take it.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        _check_settings(engine_config)
        model_config = _without_kernels(model_config)
        engine_config = copy.copy(engine_config)
        object.__setattr__(engine_config, "strategy", "fsdp2")  # how the module is wrapped; a frozen dataclass
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.pad_to_length = False  # only saves other engines recompilations

    def _init_device_mesh(self) -> None:
        """Make the groups, without verl's sequence parallelism: ranks of one have equal rows, whole, and one tree."""
        super()._init_device_mesh()
        self.use_ulysses_sp, self.ulysses_parallel_group = False, None

    def initialize(self) -> None:
        super().initialize()
        options = dict(getattr(self.engine_config, "dta", {}))
        if self.ulysses_device_mesh is not None:
            options = {"strategy": "one_tree", **options, "mesh": self.ulysses_device_mesh["sp"]}
        module, compute = self.module, self.compute

        def token_values(*args: Any) -> Values:
            return compute(module, *args)

        self.token_values = torch.compile(token_values, backend="dta", options=options)

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run verl's method with all rows in one micro-batch, after rows were dealt out."""
        dealt = DealtRows(data, Group(self.get_data_parallel_group())) if self._deals(data, forward_only) else None
        whole = (data if dealt is None else dealt.data).copy()
        group = _setting(data, "force_group_size", 1)
        tensordict_utils.assign_non_tensor(
            whole,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=max(len(whole) // group, 1),
            use_fused_kernels=False,
        )
        result = super().forward_backward_batch(whole, loss_function, forward_only=forward_only)
        if dealt is not None and result.get("model_output"):
            result["model_output"] = dealt.to_owners(result["model_output"])
        return result

    def _deals(self, data: Any, forward_only: bool) -> bool:
        """Return whether rows may move: not if a loss is normalised over a rank's own, nor with media, which all ranks
        need to have."""
        if self.get_data_parallel_size() == 1 or not getattr(self.engine_config, "deal_rows", True):
            return False
        normalised = forward_only or _setting(data, "global_batch_size", None) is not None
        grouped = _setting(data, "force_group_size", 1) > 1
        return normalised and not grouped and "multi_modal_inputs" not in data

    def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool) -> Any:
        """Return the loss of a micro-batch, with its graph, and the outputs and metrics that verl reports."""
        micro_batch = micro_batch.to(get_device_id())
        inputs, of_inputs = self.prepare_model_inputs(micro_batch=micro_batch)
        inputs = {name: value for name, value in inputs.items() if name not in NOT_OF_MODELS}
        _check_data(micro_batch, inputs)
        self._require_same_media(sorted(inputs.keys() - INPUTS))
        with self._autocast():
            values = self._values(micro_batch, inputs, of_inputs, _log_prob_clamp(micro_batch, loss_function))
            if loss_function is None:
                loss, metrics = torch.ones((), device=get_device_name()), {}
            else:
                group = self.get_data_parallel_group()
                loss, metrics = loss_function(model_output=values, data=micro_batch, dp_group=group)
        return loss, {"model_output": detach_tree(values), "loss": loss.detach().item(), "metrics": metrics}

    def _require_same_media(self, names: list[str]) -> None:
        """Raise unless all ranks have the same media: those that encode images gather all parameters together."""
        config, ranks = self.model_config.hf_config, self.get_data_parallel_size()
        if ranks == 1 or config.get_text_config() is config:
            return
        of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(of_ranks, names, self.get_data_parallel_group())
        if any(others != names for others in of_ranks):
            raise RuntimeContractError(
                "some ranks have images (or other media) in their rows, and others have none",
                where="multi_modal_inputs",
                expected="the same entries on every rank",
                got="; ".join(f"rank {rank}: {', '.join(own) or 'none'}" for rank, own in enumerate(of_ranks)),
                hint="deal rows without images out evenly, or give each a small image",
            )

    @staticmethod
    def compute(
        module: nn.Module,
        inputs: dict[str, Any],
        labels: torch.Tensor,
        temperature: torch.Tensor | None,
        extra: tuple[str, ...],
        teacher: Teacher | None,
    ) -> Values:
        """Compute per-token values; compiled, and written so that no chunk has logits where the vocabulary is large."""
        logits = module(**inputs, use_cache=False).logits.float()
        if temperature is not None:
            logits = logits / temperature
        log_probs = logits.log_softmax(-1)
        values = {"log_probs": log_probs.gather(-1, labels[..., None])[..., 0]}
        if "entropy" in extra:
            values["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "sum_pi_squared" in extra:
            values["sum_pi_squared"] = ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()
        return values if teacher is None else {**values, **_distilled(log_probs, teacher)}

    def _values(
        self, micro_batch: Any, inputs: dict[str, Any], of_inputs: dict[str, Any], clamp: float | None
    ) -> Values:
        """Return per-token values by name in verl's layout: nested tensors with one row per sequence."""
        extra = tuple(name for asks, name in EXTRA_VALUES.items() if _flag(micro_batch, asks))
        offsets = micro_batch["input_ids"].offsets()
        rows, teacher = _Rows.of(inputs, of_inputs, offsets), None
        if _flag(micro_batch, "distillation_use_topk"):
            ids, log_probs = (rows.laid_out(micro_batch[name].values(), offsets) for name in TEACHER)
            teacher = Teacher(ids, log_probs.float(), ids.shape[-1], clamp)
        values = self.token_values(inputs, rows.labels, rows.temperature, extra, teacher)
        return {
            name: torch.nested.nested_tensor_from_jagged(rows.flat(value), offsets) for name, value in values.items()
        }

    def _build_module(self) -> nn.Module:
        with _without_flash_attention(), mock.patch.object(self, "ulysses_sequence_parallel_size", 1):
            module: nn.Module = super()._build_module()
        for part in module.modules():
            if type(part) in _forwards:
                part.forward = types.MethodType(_forwards[type(part)], part)
        return module

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        module = super()._build_lora_module(module)
        module.disable_input_require_grads()  # type: ignore[operator]  # only needed for checkpointing
        return module

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._autocast_dtype == torch.float32:
            yield
        else:
            with torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype):
                yield


@contextlib.contextmanager
def _without_flash_attention() -> Iterator[None]:
    """Let models have SDPA where verl asks for flash-attn and it is not installed: the backend replaces either."""
    chosen = PreTrainedModel.get_correct_attn_implementation

    def installed(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
        asks = (requested or "").startswith("flash_attention") and not is_flash_attn_2_available()
        return chosen(self, "sdpa" if asks else requested, *args, **kwargs)

    with mock.patch.object(PreTrainedModel, "get_correct_attn_implementation", installed):
        yield


# By class of a model's part, the `forward` that verl replaced.
_forwards: dict[type[nn.Module], Callable[..., Any]] = {}
_patch_of_verl = transformer_impl.apply_monkey_patch


def _patch(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Apply verl's patches of the classes of a model, for whichever engine, and keep what they replace."""
    before = {type(part): type(part).forward for part in model.modules()}
    _patch_of_verl(model, *args, **kwargs)
    for cls, forward in before.items():
        if cls.forward is not forward:
            _forwards.setdefault(cls, forward)


transformer_impl.apply_monkey_patch = _patch


class DealtRows:
    """The rows of a rank after those of all ranks were dealt out by their prefix tree (`dta_compile.balance`).

    verl gives ranks rows of equal length in all, whatever they share. Its losses are normalised over the rows of all
    ranks, so that a mini-batch makes the same update wherever its rows are. To make one and `to_owners` are
    collectives.

    Attributes:
        data: this rank's rows, those that came from the first rank first.
    """

    def __init__(self, data: Any, group: Group) -> None:
        self.data, self._group = data, group
        of_ranks = group.gather([row.cpu().numpy() for row in data["input_ids"].unbind()])
        groups = group.from_first(lambda: _groups(of_ranks))
        self._sent: list[list[int]] | None = None  # by rank, the rows that this one sent there; None: rows stayed
        if groups is not None:
            first = sum(len(rows) for rows in of_ranks[: group.rank])
            own = range(first, first + len(data))
            self._sent = [sorted(number - first for number in chosen if number in own) for chosen in groups]
            parts = [
                tensordict_utils.index_select_tensor_dict(data.cpu(), rows) if rows else None for rows in self._sent
            ]
            came = _exchanged(parts, group)
            self._counts = [0 if part is None else len(part) for part in came]
            self.data = tensordict_utils.concat_tensordict([part for part in came if part is not None])

    def to_owners(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return nested tensors `[rows, tokens]` of the rows that this rank had before, given those of its rows now."""
        if self._sent is None:
            return dict(outputs)
        result = {}
        for name, values in outputs.items():
            rows = iter(values.detach().cpu().unbind())
            returned = _exchanged([list(itertools.islice(rows, count)) for count in self._counts], self._group)
            of_rows = dict(zip(itertools.chain(*self._sent), itertools.chain(*returned), strict=True))
            own = [of_rows[number].to(values.device) for number in range(len(of_rows))]
            result[name] = torch.nested.as_nested_tensor(own, layout=torch.jagged)
        return result


def _groups(of_ranks: Sequence[Sequence[Any]]) -> list[list[int]] | None:
    """Return the rows of each rank, numbered over all ranks; None if they better stay where they are."""
    rows = [row for rows in of_ranks for row in rows]
    if len(rows) < len(of_ranks):
        return None
    groups = balance(rows, len(of_ranks))
    dealt = max(PrefixTree.build([rows[number] for number in chosen]).num_rows for chosen in groups)
    before = max(PrefixTree.build(rows).num_rows for rows in of_ranks)
    return groups if dealt < WORTHWHILE * before else None


def _exchanged(values: Sequence[Any], group: Group) -> list[Any]:
    """Send each rank a value; return those that came from each."""
    sent = [pickle.dumps(value) for value in values]
    sizes = group.gather([len(message) for message in sent])
    received = [of_rank[group.rank] for of_rank in sizes]
    data = torch.from_numpy(np.frombuffer(b"".join(sent), np.uint8).copy())
    arrived = group.all_to_all(data, sizes[group.rank], received).numpy().tobytes()
    ends = np.cumsum(received)
    return [pickle.loads(arrived[end - size : end]) for size, end in zip(received, ends, strict=True)]


class Teacher(NamedTuple):
    """The largest log-probs of a teacher at each token.

    Attributes:
        ids, log_probs: `[1, T, k]` or `[B, S, k]`.
        clamp: the least log-prob that is used; None: any.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    k: int
    clamp: float | None


TEACHER = ("teacher_ids", "teacher_logprobs")  # nested `[B, tokens, k]`


def _log_prob_clamp(micro_batch: Any, loss_function: Any) -> float | None:
    """Return the clamp of a top-k distillation, whose loss verl's workers bind to its configuration."""
    if not _flag(micro_batch, "distillation_use_topk"):
        return None
    config = getattr(loss_function, "keywords", {}).get("distillation_config")
    if config is None:
        raise RefusalError(
            "verl's strategy dta computes top-k distillation without logits, and the loss does not say how",
            where="distillation_use_topk",
            expected="partial(distillation_ppo_loss, ..., distillation_config=...), as verl's workers pass it",
            hint="use strategy=fsdp2 for a loss of your own that reads logits",
        )
    return config.distillation_loss.log_prob_min_clamp


def _distilled(student: torch.Tensor, teacher: Teacher) -> Values:
    """Compute what verl's distillation gets from logits: the forward divergence over the teacher's entries, the mass of
    these for both, how many of them are among as many largest of the student, and the divergence of those, negated."""
    ids, theirs, k, clamp = teacher
    mine, largest = student.gather(-1, ids), student.detach().topk(k, -1).indices
    values = {"student_mass": mine.exp().sum(-1), "teacher_mass": theirs.exp().sum(-1)}
    if clamp is not None:
        mine, theirs = mine.clamp(min=clamp), theirs.clamp(min=clamp)
    of_entries = theirs.exp() * (theirs - mine)
    shared = (ids[..., None] == largest[..., None, :]).any(-1)
    both = shared.sum(-1)
    mean = -(of_entries * shared).sum(-1) / both.clamp(min=1)
    return {
        **values,
        "distillation_losses": of_entries.sum(-1),
        "overlap_count": both,
        "overlap_token_advantage": mean,
    }


class _Rows(NamedTuple):
    """A micro-batch in the layout of the model's inputs: one packed row or padded rows.

    Attributes:
        labels: `[1, T]` or `[B, S]`, the next tokens.
        temperature: `[1, T, 1]` or `[B, 1, 1]`; None: 1.
        mask: `[B, S]`, 1 at tokens; None: no padding.
    """

    labels: torch.Tensor
    temperature: torch.Tensor | None
    mask: torch.Tensor | None

    @classmethod
    def of(cls, inputs: Mapping[str, Any], of_inputs: Mapping[str, Any], offsets: torch.Tensor) -> _Rows:
        """Build from the results of verl's `prepare_model_inputs`."""
        labels, mask = of_inputs["input_ids_rmpad_rolled"], inputs["attention_mask"]
        if mask is None:
            labels, temperature = labels[None], of_inputs["temperature_rmpad"][None, :, None]
        else:
            labels = _padded(labels, offsets, mask)
            temperature = of_inputs["temperature"][:, None, None]
        is_one = of_inputs["temperature_is_one"]
        return cls(labels, None if is_one else temperature.clamp(min=LEAST_TEMPERATURE), mask)

    def laid_out(self, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Lay values `[T, ...]` out as the tokens are, with zeros for padding."""
        return values[None] if self.mask is None else _padded(values, offsets, self.mask)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Flatten values of these rows to `[T]`, one sequence after the other, without padding."""
        return values[0] if self.mask is None else values[self.mask.bool()]


def _padded(values: torch.Tensor, offsets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    return torch.nested.to_padded_tensor(nested, 0, output_size=(*mask.shape, *values.shape[1:]))


@EngineRegistry.register(model_type="value_model", backend="dta", device=DEVICES)
class DTAValueEngine(DTAEngine):
    """The same for critics."""

    @staticmethod
    def compute(module: nn.Module, inputs: dict[str, Any], *_: Any) -> Values:
        """Compute the value of each token, by a head with one output, or by TRL's `v_head`."""
        output = module(**inputs, use_cache=False)
        return {"values": output[2] if hasattr(module, "v_head") else output.logits[..., 0]}


def _check_settings(engine: Any) -> None:
    """Raise `OptionError` for settings that this engine does not support."""
    _only("fsdp_config.qat.enable", engine.qat.enable, False, "set it to false, or use strategy=fsdp2")
    ranks = dist.get_world_size()
    if ranks % engine.ulysses_sequence_parallel_size:
        raise OptionError(
            "fsdp_config.ulysses_sequence_parallel_size does not divide the ranks",
            expected=f"a divisor of {ranks}, of ranks that run one tree",
            got=repr(engine.ulysses_sequence_parallel_size),
            hint="set it to 1, and each rank runs a tree of its own",
        )


# Settings of a model that change how it is computed, not what, by why they have no effect here.
WITHOUT_EFFECT = {
    "enable_gradient_checkpointing": "a plan says itself what is computed again",
    "use_fused_kernels": "large vocabularies are reduced without logits as it is",
    "use_liger": "kernels between matrix products are generated",
    "enable_activation_offload": "fsdp_config.dta.memory_budget bounds the bytes that are kept",
}


def _without_kernels(model: Any) -> Any:
    """Return the configuration of a model without the settings that have no effect, and say so once."""
    ineffective = [name for name in WITHOUT_EFFECT if getattr(model, name, False)]
    if not ineffective:
        return model
    model = copy.copy(model)
    for name in ineffective:
        object.__setattr__(model, name, False)
        if dist.get_rank() == 0:
            logger.warning("dta: model.%s has no effect: %s", name, WITHOUT_EFFECT[name])
    return model


def _only(name: str, value: Any, accepted: Any, instead: str) -> None:
    if value != accepted:
        raise OptionError(
            f"{name} does not work with verl's strategy dta", expected=repr(accepted), got=repr(value), hint=instead
        )


def _check_data(micro_batch: Any, inputs: Mapping[str, Any]) -> None:
    lists = sorted(name for name, value in inputs.items() if isinstance(value, (list, tuple)))
    if lists:
        raise RefusalError(
            "verl's strategy dta takes images as tensors over those of a batch",
            where=f"multi_modal_inputs: {', '.join(lists)}",
            got="a list with an entry per row",
            hint="use strategy=fsdp2 for this model",
        )


def _setting(data: Any, name: str, default: Any) -> Any:
    return tensordict_utils.get_non_tensor_data(data=data, key=name, default=default)


def _flag(micro_batch: Any, name: str) -> bool:
    return bool(_setting(micro_batch, name, False))
