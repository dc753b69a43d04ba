"""`DTACallback` for trainers of transformers and TRL: compile the model, and warn if its batches lose sharing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, TrainerCallback

from dta_compile.errors import OptionError
from dta_compile.plan import PrefixTree
from dta_compile.rollouts import PrefixSampler
from dta_compile.rollouts.prefix_keys import prefix_keys

Arguments = TypeVar("Arguments", bound=Any)

logger = logging.getLogger("dta_compile")

# Warn if one tree over all rows would have a compression this many times higher than the batches'.
LOST = 1.25
# Below this compression rows have nothing to gain, however they are batched.
NOTHING = 1.1
# Text models (`model_type`) of transformers in which nothing but rotary embeddings reads positions.
ROTARY = """
afmoe apertus arcee bitnet cohere cohere2 deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4
exaone_moe falcon_h1 flex_olmo gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe gpt_neox gpt_oss granite
granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe lfm2 llama minimax_m2 ministral
mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open
stablelm starcoder2 youtu
"""
# Kinds of rotary frequencies that do not depend on the largest position of a batch, as "longrope" and "dynamic" do.
ROPES = ("default", "linear", "llama3", "yarn")
# Packages whose modules, around such a model or in it, read no positions themselves.
TUNERS = ("lora", "adalora", "ia3", "loha", "lokr", "vera", "trainable_tokens")
PACKAGES = ("transformers.", "trl.", "accelerate.", "liger_kernel.", "peft.peft_model", "peft.utils.")
KNOWN = (*PACKAGES, *(f"peft.tuners.{name}." for name in TUNERS))
BASES = ("torch.", "builtins", "typing", "abc")  # modules of classes that others derive from, as FSDP2 does
# Losses of TRL (GRPO, SFT, DPO, KTO) that are sums over rows or tokens, and settings that add what is of a whole batch.
BY_ROW = """
grpo dapo dr_grpo cispo sapo vespo luspo nll chunked_nll dft sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust
bco_pair sppo_hard apo_zero apo_down discopop apo_zero_unpaired
"""
OF_BATCH = {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
CACHES = ("past_key_values", "cache")  # names of the KV cache in releases of transformers


class DTACallback(TrainerCallback):  # type: ignore[misc]
    """Compile the trainer's model when training begins, and warn once if the trainer's batches lose sharing.

        trainer = GRPOTrainer(model, ..., callbacks=[DTACallback()])

    A model that is already compiled, as a whole or in part, is only observed. The callback compares how much the rows
    of the first generation batch (GRPO) or of the first optimizer step share batch by batch, and would share in one
    batch. After that it observes nothing more.

    TRL pads prompts on the left, and transformers then counts positions by column, so that prompts of different lengths
    have no token in common. Rotary embeddings depend on differences of positions only: models that are known to have
    no others are called with positions that start at the first token of each row, as in generation. Positions in
    several axes (M-RoPE) of calls with images are the model's own, which begin there by themselves. Generation is left
    to the model, uncompiled, also after training.

    Args:
        options: options of `torch.compile(..., backend="dta", options=...)`.
        group_rows: order the rows of each epoch so that those that share prefixes are in one optimiser step, instead of
            at random. This changes the batches. The data set is read once, when training begins.

    Attributes:
        now: compression over the prefix trees of the single batches; None before the comparison.
        possible: compression over one tree of all their rows; None before the comparison.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, group_rows: bool = False) -> None:
        self.options, self.group_rows = options, group_rows
        self.now: float | None = None
        self.possible: float | None = None
        self._batches: list[list[NDArray[np.int64]]] = []
        self._observes = False
        self._compiled: torch.nn.Module | None = None
        self._call: Any = None
        self._sampler: PrefixSampler | None = None

    @staticmethod
    def whole_steps(args: Arguments) -> Arguments:
        """Return training arguments that make the same updates, each from one batch, so that all of its rows share.

            trainer = GRPOTrainer(model, args=DTACallback.whole_steps(args), ..., callbacks=[DTACallback()])

        Batches that were accumulated become one: of as many rows, with no accumulation, and for trainers that generate,
        with a generation for as many updates as before. That is the same update for losses that are sums over the
        rows or tokens of an update divided by their number, as most of TRL's and those of models that take
        `num_items_in_batch`. A mean of means of batches weighs rows otherwise, and so do quantiles and sorts of a
        batch, and the auxiliary loss of a router. `dataloader_drop_last` then drops what makes no whole update.

        Raises:
            OptionError: a loss is of each batch as a whole, or not known, or an update is of several generations.
        """
        steps, split = args.gradient_accumulation_steps, getattr(args, "steps_per_generation", None) or 0
        kinds = getattr(args, "loss_type", None) or []
        kinds = [kinds] if isinstance(kinds, str) else kinds
        of_batch = {name: getattr(args, name) for name, none in OF_BATCH.items() if getattr(args, name, none) != none}
        is_known = not any(base.__module__.startswith("trl.experimental.") for base in type(args).__mro__)
        if not is_known or not set(kinds) <= set(BY_ROW.split()) or of_batch or split % steps:
            raise OptionError(
                "the batches of an update cannot be one batch",
                expected="a loss that is a sum over rows or tokens, and steps_per_generation a multiple of"
                " gradient_accumulation_steps",
                got=f"{type(args).__name__} with loss_type={kinds}, {of_batch or ''}"
                f"steps_per_generation={split or None}, gradient_accumulation_steps={steps}",
                hint="choose other batches, or another loss such as loss_type='dapo', GRPO's default",
            )
        args = copy.copy(args)
        args.per_device_train_batch_size *= steps
        args.gradient_accumulation_steps = 1
        if split:
            args.steps_per_generation = split // steps
        return args

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compile the model in place, unless it or a part of it is compiled."""
        if self.group_rows:
            self._sampler = group_rows(args, kwargs["train_dataloader"])
        compiled = next((module for module in model.modules() if module._compiled_call_impl is not None), None)
        if compiled is None:
            model.compile(backend="dta", **({} if self.options is None else {"options": dict(self.options)}))
            compiled = model
        self._observes = self.now is None
        self._wrap(compiled)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Number the epoch for the order of its rows, which is then the same in a run that is resumed."""
        if self._sampler is not None:
            self._sampler.epoch = int(state.epoch or 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop observing. The model stays compiled, with positions and generation as in training."""
        self._compiled, self._batches, self._observes, self._sampler = None, [], False, None

    def _wrap(self, module: torch.nn.Module) -> None:
        """Wrap the call of the compiled module, unless that is done; hooks would become part of its graph."""
        self._compiled = module
        if module._compiled_call_impl is self._call:
            return
        shifts, has_axes = positions_are_relative(module), has_position_axes(module)

        def call_aligned(*args: Any, **kwargs: Any) -> Any:
            if _continues_cache(kwargs) and not torch.is_grad_enabled():  # generation, which has nothing to share
                return uncompiled(*args, **kwargs)
            if self._observes and module.training and torch.is_grad_enabled():
                sequences = _sequences(*args, **with_images(kwargs, module))
                self._batches += [sequences] if sequences else []
            return call(*args, **(with_positions(kwargs, has_axes) if shifts else kwargs))

        # `last_plan` finds the compiled callable through this cell of the function.
        call: Any = module._compiled_call_impl
        uncompiled: Any = module._call_impl
        module._compiled_call_impl = self._call = call_aligned

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the batches once those of an optimizer step, or of a generation, have been seen."""
        per_generation = getattr(args, "steps_per_generation", None) or 1
        if not self._observes or len(self._batches) < max(args.gradient_accumulation_steps, per_generation):
            return
        self.now, self.possible = compressions(self._batches)
        batches = len(self._batches)
        self._batches, self._observes = [], False
        if self.possible >= LOST * self.now:
            logger.warning(
                "dta: the %d batches of this step have C %.2f, all their rows in one batch would have C %.2f: %s",
                *(batches, self.now, self.possible, _advice(args)),
            )
        elif self.possible < NOTHING:
            logger.warning(
                "dta: the rows of this step share next to nothing (C %.2f): let rows with common prefixes follow one "
                "another, and the trainer keep their order (train_sampling_strategy='sequential'), or let "
                "DTACallback(group_rows=True) order them",
                self.possible,
            )

    on_substep_end = on_step_end  # called after each batch of an optimizer step but the last


def group_rows(args: Any, loader: Any) -> PrefixSampler:
    """Make a trainer's data loader take rows that share prefixes for one optimiser step, and return what orders them.

    Raises:
        OptionError: the trainer's arguments or its data set ask for another order.
    """
    batches = loader.batch_sampler
    inner = getattr(batches, "batch_sampler", batches)  # of accelerate's shard for a rank
    sampler: Any = getattr(inner, "sampler", None)
    strategy = getattr(args, "train_sampling_strategy", "random")
    repeats = hasattr(sampler, "mini_repeat_count")  # TRL's, of prompts
    is_random = sampler.shuffle if repeats else isinstance(sampler, torch.utils.data.RandomSampler)
    if strategy != "random" or not is_random or getattr(args, "packing", False):
        raise OptionError(
            "rows cannot be grouped by their prefixes",
            where="DTACallback(group_rows=True)",
            expected="random batches of a data set of known length, whose rows are not packed",
            got=f"{strategy=!s}, packing={getattr(args, 'packing', False)}, {type(sampler).__name__}",
            hint="leave train_sampling_strategy, shuffle_dataset and packing at their defaults, or leave group_rows",
        )
    seed = args.seed if getattr(args, "data_seed", None) is None else args.data_seed
    if repeats:
        grouped = PrefixSampler(prefix_keys(loader.dataset), sampler.batch_size, seed=seed)
        sampler.shuffle = False  # its positions are then those of the order
        inner.sampler = _Ordered(grouped, sampler)
        return grouped
    ranks = getattr(batches, "num_processes", args.world_size)
    splits = getattr(batches, "split_batches", getattr(loader, "split_batches", False))
    batch = inner.batch_size // (ranks if splits else 1)
    rows = batch * ranks * args.gradient_accumulation_steps
    grouped = PrefixSampler(prefix_keys(loader.dataset), rows, batch, ranks, seed)
    inner.sampler = grouped
    return grouped


class _Ordered:
    """Sampler that takes the positions of another one in an order."""

    def __init__(self, order: PrefixSampler, positions: Any) -> None:
        self.order, self.positions = order, positions

    def __iter__(self) -> Iterator[int]:
        order = list(self.order)
        return (order[position] for position in self.positions)

    def __len__(self) -> int:
        return len(self.positions)


def with_positions(inputs: dict[str, Any], has_axes: bool = False) -> dict[str, Any]:
    """Add positions `[B, S]` that count the tokens of each row to the arguments of a call with padded rows.

    Other calls, and calls that continue a cache, are unchanged. Masked tokens behind the first real one count, as they
    do where models of transformers are given no positions.

    Args:
        has_axes: the model computes positions in several axes from images (or other media), in calls that have them.
    """
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if inputs.get("position_ids") is not None or not isinstance(mask, torch.Tensor) or ids is None:
        return inputs
    if mask.shape != ids.shape or _continues_cache(inputs):
        return inputs
    if has_axes and any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in inputs.values()):
        return inputs
    if has_axes:  # these models count the tokens of the mask, unless there are images
        return {**inputs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
    is_real = mask != 0
    first = is_real.int().argmax(-1, keepdim=True)
    return {**inputs, "position_ids": (torch.arange(mask.shape[-1], device=mask.device) - first).clamp(min=0)}


def with_images(inputs: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Replace the ids of placeholder tokens by numbers of their images, so that only equal images count as shared.

    Images are patches with `image_grid_thw`, or entries of `pixel_values` `[images, 3, H, W]`. Others are left out.
    """
    pixels, grids, ids = (inputs.get(name) for name in ("pixel_values", "image_grid_thw", "input_ids"))
    config = getattr(model, "config", None)
    placeholder = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if not isinstance(pixels, torch.Tensor) or not isinstance(ids, torch.Tensor) or placeholder is None:
        return inputs
    if grids is None and pixels.dim() != 4:
        return inputs
    sizes = [1] * len(pixels) if grids is None else grids.prod(-1).tolist()
    ids = ids.cpu()
    is_image = ids == placeholder
    tokens = torch.tensor([size * int(is_image.sum()) // sum(sizes) for size in sizes])
    if int(tokens.sum()) != int(is_image.sum()):  # the model makes another number of features of each
        return inputs
    images = pixels.split(sizes)  # type: ignore[no-untyped-call]
    numbers = [hash(image.detach().float().cpu().numpy().tobytes()) for image in images]
    of_tokens = torch.tensor(numbers, dtype=torch.int64).repeat_interleave(tokens)
    return {**inputs, "input_ids": ids.masked_scatter(is_image, of_tokens)}


def _continues_cache(inputs: Mapping[str, Any]) -> bool:
    return any(inputs.get(name) is not None for name in CACHES)


def positions_are_relative(model: torch.nn.Module) -> bool:
    """Return whether a model is known to use positions for rotary embeddings alone.

    Their products depend on differences only. Others scale queries by their absolute position, compare positions with
    columns, or have learned embeddings of them; learned keys (prefix tuning) are at no position. What is not known
    counts as one of these.
    """
    text = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
    if text is None or not all(map(_is_known, model.modules())):
        return False
    config = text.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [one for one in (rope, *rope.values()) if isinstance(one, dict)]  # kinds of layers may have their own
    return config.model_type in ROTARY.split() and all(one.get("rope_type", "default") in ROPES for one in of_layers)


def _is_known(module: torch.nn.Module) -> bool:
    """Return whether a module comes from a package that is known; one without parts cannot tell positions apart."""
    names = (base.__module__ for base in type(module).__mro__)
    own = next((name for name in names if not name.startswith(BASES)), None)
    return own is None or own.startswith(KNOWN) or not any(module.children())


def has_position_axes(model: torch.nn.Module) -> bool:
    """Return whether a model counts positions in several axes: tokens of an image by row and column (M-RoPE)."""
    return any(hasattr(module, "get_rope_index") for module in model.modules())


def compressions(batches: Sequence[Sequence[Any]]) -> tuple[float, float]:
    """Return the compression of batches of token sequences, each over its own prefix tree, and all over one tree."""
    together = [sequence for batch in batches for sequence in batch]
    tokens = sum(len(sequence) for sequence in together)
    apart = sum(PrefixTree.build(batch).num_rows for batch in batches)
    return tokens / max(apart, 1), tokens / max(PrefixTree.build(together).num_rows, 1)


def _advice(args: Any) -> str:
    one_batch = "args=DTACallback.whole_steps(args) makes the same update from one batch"
    if not hasattr(args, "num_generations"):
        return one_batch
    steps = args.steps_per_generation
    rows = args.per_device_train_batch_size * steps
    instead = (
        f"per_device_train_batch_size={rows}, steps_per_generation=1 and gradient_accumulation_steps=1 make one update"
        f" of a generation batch (keep it a multiple of num_generations={args.num_generations})"
    )
    return "TRL shuffles the rows of a generation batch before it splits them, which cuts groups apart; " + (
        one_batch if steps == args.gradient_accumulation_steps else instead
    )


def _sequences(
    input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, *rest: Any, **others: Any
) -> list[NDArray[np.int64]]:
    """Return the sequences of a call: rows without padding, or packed rows split where positions are zero.

    A call has none if it is not given token ids; a loss that TRL runs as the model's forward is given the model.
    """
    if not isinstance(input_ids, torch.Tensor):
        return []
    masks = attention_mask if isinstance(attention_mask, torch.Tensor) else None
    if masks is not None and masks.shape != input_ids.shape:  # of pairs of tokens
        masks = None
    sequences: list[NDArray[np.int64]] = []
    for i, row in enumerate(input_ids.cpu().numpy()):
        if masks is not None:
            sequences.append(row[masks[i].cpu().numpy() > 0])
        elif isinstance(position_ids, torch.Tensor) and position_ids.dim() == 2:
            starts = np.flatnonzero(position_ids[i % len(position_ids)].cpu().numpy() == 0)
            sequences += np.split(row, starts[starts > 0])
        else:
            sequences.append(row)
    return sequences
