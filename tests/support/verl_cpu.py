"""verl on a CPU: a platform for it, its engines with common initial weights, and bundled rollouts as its data.

verl registers its own engines only for accelerators; their results on a CPU are the reference here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.utils.losses import ppo_loss

from dta_compile.data import Rollout
from tests.support import vision

FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
REFERENCE = "fsdp2"
VOCABULARY = 64


class CPU(PlatformBase):
    """verl's platform interface without an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()


def _nothing(*_: Any, **__: Any) -> None:
    """Stand-in for device functions that a CPU does not need."""


for _name in PlatformBase.__abstractmethods__ - vars(CPU).keys():
    setattr(CPU, _name, _nothing)
CPU.__abstractmethods__ = frozenset()


@contextlib.contextmanager
def verl_on_cpu() -> Iterator[None]:
    """Make verl use the CPU, and register its FSDP engine for it; starts one rank unless ranks exist."""
    before, own = platform_manager._current_platform, not dist.is_initialized()
    platform_manager._current_platform = CPU()
    transformer_impl.device_name = "cpu"  # read when verl was imported
    kinds = {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}
    for kind, engine in kinds.items():
        EngineRegistry._engines[kind][REFERENCE]["cpu"] = engine
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if own:
            dist.destroy_process_group()
        for kind in kinds:
            del EngineRegistry._engines[kind][REFERENCE]["cpu"]
        platform_manager._current_platform = before


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an engine and its data.

    Attributes:
        tokens: most tokens per micro-batch with dynamic batch sizes; None: `rows` sequences instead.
        checkpointing: recompute the activations of every layer, verl's default.
        engine: further fields of the engine's configuration.
        model: further fields of the model's configuration.
    """

    remove_padding: bool = True
    tokens: int | None = None
    rows: int = 1
    entropy: float = 0.0
    temperature: float = 1.0
    learning_rate: float = 0.1
    optimizer: str = "SGD"
    checkpointing: bool = False
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)


TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def save_model(path: str, vocabulary: int, seed: int = 0, **sizes: Any) -> None:
    """Save a Qwen3 with random float32 weights as a checkpoint; a tiny one unless sizes are given."""
    torch.manual_seed(seed)
    sizes = sizes or {**TINY, **HEADS}
    Qwen3ForCausalLM(
        Qwen3Config(**{"vocab_size": vocabulary, "max_position_embeddings": 4096, **sizes})
    ).save_pretrained(path)


def nested_rollouts(vocabulary: int, seed: int = 0) -> list[Rollout]:
    """Return rollouts of two prompts with three answers of two turns each; every turn is one, with uneven lengths."""
    random, rollouts = np.random.default_rng(seed), []
    for group in range(2):
        prompt = random.integers(vocabulary, size=16 + 5 * group)
        for trial in range(3):
            first, second, third = (random.integers(vocabulary, size=size) for size in (5 + 3 * trial, 4, 6 + trial))
            turn = np.concatenate([prompt, first])
            spans = (len(prompt), len(turn)), (len(turn) + len(second), len(turn) + len(second) + len(third))
            for number, tokens in enumerate([turn, np.concatenate([turn, second, third])], 1):
                reward = random.normal()
                own = (reward, reward, reward, group, trial, 3 * group + trial, number, number == 2)
                rollouts.append(Rollout(tokens.astype(np.int32), spans[:number], *own))
    return rollouts


@dataclasses.dataclass(frozen=True)
class ImageRollout(Rollout):
    """A rollout of a model that takes images.

    Attributes:
        media: its entry of verl's `multi_modal_inputs`.
        positions: `[4, n]` of its tokens: in the text, then in three axes.
    """

    media: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    positions: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(4, 0))


def image_rollouts(model: Any) -> list[ImageRollout]:
    """Return rollouts of a Qwen3-VL: episodes of turns with an image each, every turn one, and one without images."""
    rollouts = []
    for group, (first, second) in enumerate(("ab", "ac", "ac")):
        turn: list[int | str] = [5, 6, first, 7, 8, 20 + group]
        for number, row in enumerate([turn, [*turn, second, 3, 30 + group, 4]], 1):
            rollouts.append(_image_rollout(model, row, group, number))
    return [*rollouts, _image_rollout(model, [5, 6, 4, 4, 9], 3, 1)]


def _image_rollout(model: Any, row: list[int | str], group: int, turn: int) -> ImageRollout:
    call = vision.inputs("qwen3_vl", [row])
    ids, types = call.pop("input_ids"), call.pop("mm_token_type_ids")
    mask, grids = call.pop("attention_mask"), call.get("image_grid_thw")
    axes = model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids, attention_mask=mask)[0]
    positions = torch.cat([torch.arange(ids.shape[1])[None], axes[:, 0]])
    media = {name: value.float() if value.is_floating_point() else value for name, value in call.items()}
    if media:
        media |= {"images_seqlens": grids[:, 1] * grids[:, 2], "mm_token_type_ids": types}
    own = (0.5, 0.5 - group, 0.5, group, 0, group, turn, turn == 2)
    spans = ((ids.shape[1] - 2, ids.shape[1]),)
    return ImageRollout(ids[0].numpy().astype(np.int32), spans, *own, media=media, positions=positions)


def parts_of(strategy: str, path: str, settings: Settings, kind: str = "language_model") -> dict[str, Any]:
    """Return what verl's engines and workers are made of."""
    return {
        "model_type": kind,
        "model_config": HFModelConfig(
            path=path,
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            model_type=kind,
            enable_gradient_checkpointing=settings.checkpointing,
            use_remove_padding=settings.remove_padding,
            **settings.model,
        ),
        "engine_config": actor_of(strategy, settings).engine,
        "optimizer_config": FSDPOptimizerConfig(
            lr=settings.learning_rate,
            optimizer=settings.optimizer,
            weight_decay=0.0,
            total_training_steps=100,
            clip_grad=0.5,
        ),
        "checkpoint_config": CheckpointConfig(),
    }


def engine_of(strategy: str, path: str, settings: Settings, kind: str = "language_model") -> Any:
    """Build verl's engine of a strategy, for an actor or a critic ("value_model"), like its workers do."""
    parts = parts_of(strategy, path, settings, kind)
    engine = EngineRegistry.new(backend=parts["engine_config"].strategy, **parts)
    torch.manual_seed(0)  # adapters have random initial weights
    engine.initialize()
    return engine


def actor_of(strategy: str, settings: Settings) -> FSDPActorConfig:
    """Return the actor's configuration, which passes its strategy to the engine's."""
    return FSDPActorConfig(
        strategy=strategy,
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=settings.rows,
        entropy_coeff=settings.entropy,
        fsdp_config=FSDPEngineConfig(**{"mixed_precision": FLOAT32, "use_torch_compile": False, **settings.engine}),
    )


def data_of(rollouts: Sequence[Rollout], settings: Settings, old_logprobs: torch.Tensor | None = None) -> Any:
    """Build a mini-batch like verl's trainer: nested tensors, the prompt up to the first trained token."""
    prompts, responses, masks, advantages = [], [], [], []
    for rollout in rollouts:
        start = max(int(np.argmax(rollout.loss_mask)), 1)
        prompts.append(torch.from_numpy(rollout.tokens[:start].astype(np.int64)))
        responses.append(torch.from_numpy(rollout.tokens[start:].astype(np.int64)))
        masks.append(torch.from_numpy(rollout.loss_mask[start:].astype(np.int64)))
        advantages.append(torch.full((len(rollout) - start,), rollout.advantage or 0.5))
    whole = [torch.cat(parts) for parts in zip(prompts, responses, strict=True)]
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": masks,
        "loss_mask": masks,
        "advantages": advantages,
        "old_log_probs": [torch.zeros_like(values) for values in advantages],
        "values": [torch.zeros_like(values) for values in advantages],
        "returns": [values.cumsum(0) for values in advantages],
        "input_ids": whole,
        "position_ids": [getattr(one, "positions", torch.arange(len(one))) for one in rollouts],
    }
    nested = {name: torch.nested.as_nested_tensor(list(parts), layout=torch.jagged) for name, parts in tensors.items()}
    if old_logprobs is not None:
        nested["old_log_probs"] = old_logprobs
    data = tensordict_utils.get_tensordict(
        nested,
        {
            "temperature": settings.temperature,
            "use_remove_padding": settings.remove_padding,
            "use_dynamic_bsz": settings.tokens is not None,
            "max_token_len_per_gpu": settings.tokens,
            "micro_batch_size_per_gpu": settings.rows,
            "calculate_entropy": settings.entropy != 0,
            "global_batch_size": len(rollouts) * dist.get_world_size(),
        },
    )
    if isinstance(rollouts[0], ImageRollout):
        tensordict_utils.assign_non_tensor_stack(data, "multi_modal_inputs", [one.media for one in rollouts])
    return data


def response_values(values: torch.Tensor, data: Any) -> torch.Tensor:
    """Return the values of a nested tensor that predict the response, cut like verl's trainer cuts old log-probs."""
    from verl.workers.utils.padding import response_from_nested

    return response_from_nested(values, data["response_mask"])


@dataclasses.dataclass(frozen=True)
class Trained:
    """Results of some updates: log-probs (and entropies) before, verl's metrics of each, and the weights after."""

    scores: dict[str, torch.Tensor]
    reports: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]


def train(engine: Any, rollouts: Sequence[Rollout], settings: Settings, steps: int = 3) -> Trained:
    """Score the rollouts, then update the policy some times, like verl's actor."""
    config = actor_of(REFERENCE, settings)
    with engine.eval_mode():
        data = data_of(rollouts, settings)
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
        scores = engine.infer_batch(data)["model_output"]
    old = response_values(scores["log_probs"], data)
    reports = [update(engine, data_of(rollouts, settings, old), config) for _ in range(steps)]
    weights = {name: full(parameter.detach()).clone() for name, parameter in engine.module.named_parameters()}
    # verl rolls labels over a micro-batch: the label of a last token is the first token of an arbitrary next row.
    real = {name: torch.cat([row[:-1] for row in value.unbind()]) for name, value in scores.items()}
    return Trained(real, reports, weights)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def update(engine: Any, data: Any, config: FSDPActorConfig) -> dict[str, Any]:
    """Run one optimiser step; return metrics summed over micro-batches, with the loss and the gradient norm."""

    def loss(**values: Any) -> Any:
        return ppo_loss(config, **values)

    with engine.train_mode():
        output = engine.train_batch(data, loss_function=loss)
    assert not output["model_output"]
    norm = output["metrics"]["grad_norm"]
    return {"loss": sum(output["loss"]), "grad_norm": norm, "metrics": sorted(output["metrics"])}
