"""Toy training runs: the same model and rows, by TRL or transformers, eagerly or over the prefix tree.

    difference(train(grpo), train(grpo, backbone))

Uses plain SGD in float64: Adam divides every gradient by its magnitude and so turns rounding into full steps where it
is almost zero. Nothing is generated: `completion` gives the completions, so that runs cannot diverge by a sampled
token.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import dta_compile

VOCABULARY = 64
UPDATES = 3
GROUP = 4


@dataclasses.dataclass
class Run(TrainerCallback):
    """Records of a run: weights, the loss of each update, the plans of its calls."""

    watched: Callable[[], Any] | None = None
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    initial: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    plans: list[dta_compile.Plan] = dataclasses.field(default_factory=list)

    def note_plan(self, *args: Any, **kwargs: Any) -> None:
        if self.watched is not None:
            self.plans.append(dta_compile.last_plan(self.watched()))

    on_substep_end = on_pre_optimizer_step = note_plan

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


Adjust = Callable[[Any], Any]  # of the arguments of a trainer


def same(arguments: Any) -> Any:
    return arguments


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, `w5` is 5; 0 to 2 are padding, end and unknown."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>"])}
    vocabulary = words | {f"w{i}": i for i in range(3, VOCABULARY)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def prompts(count: int, length: int = 14) -> list[list[int]]:
    """Draw prompts with a common beginning and two lengths, so that some are padded."""
    draw = torch.Generator().manual_seed(1)
    return [
        [7, 8, 9, 10, *torch.randint(3, VOCABULARY, (length - 4 - i % 2,), generator=draw).tolist()]
        for i in range(count)
    ]


def completion(prompt: list[int], which: int) -> list[int]:
    """Return completion number `which`; pairs of them share their first tokens."""
    draw = torch.Generator().manual_seed(sum(prompt) + which // 2)
    shared = torch.randint(3, VOCABULARY, (3,), generator=draw).tolist()
    draw.manual_seed(sum(prompt) + 1000 + which)
    return [*shared, *torch.randint(3, VOCABULARY, (2 + which % 3,), generator=draw).tolist(), 1]


def answer(prompt: list[int], which: int) -> str:
    """Return a completion as text, without its end token."""
    return " " + text(completion(prompt, which)[:-1])


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config).double()


COMMON: dict[str, Any] = {
    "max_steps": UPDATES,
    "learning_rate": 0.3,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "seed": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def grpo(
    folder: str, callbacks: list[Any], peft_config: Any = None, adjust: Adjust = same, **settings: Any
) -> GRPOTrainer:
    """Build a GRPO trainer on `completion(prompt, 0..GROUP-1)` of each prompt, passed in by its `rollout_func`."""
    words = tokenizer()

    def rollouts(texts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [words(prompt_text)["input_ids"] for prompt_text in texts]
        rows = [completion(prompt, i % GROUP) for i, prompt in enumerate(ids)]
        return {"prompt_ids": ids, "completion_ids": rows, "logprobs": [[0.0] * len(row) for row in rows]}

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(int(word[1:]) % 2 for word in row.split() if word[1:].isdigit()) / 8 for row in completions]

    return GRPOTrainer(
        model(),
        reward,
        args=adjust(
            GRPOConfig(
                output_dir=folder,
                num_generations=GROUP,
                max_completion_length=12,
                **{**COMMON, "per_device_train_batch_size": 2 * GROUP, **settings},
            )
        ),
        train_dataset=Dataset.from_list([{"prompt": text(row)} for row in prompts(12)]),
        processing_class=words,
        rollout_func=rollouts,
        callbacks=callbacks,
        peft_config=peft_config,
    )


def sft(folder: str, callbacks: list[Any], adjust: Adjust = same, **settings: Any) -> SFTTrainer:
    """Build an SFT trainer on prompts with several answers each, in sequence."""
    rows = [{"prompt": text(row), "completion": answer(row, i)} for row in prompts(8) for i in (0, 1)]
    return SFTTrainer(
        model(),
        args=adjust(
            SFTConfig(
                output_dir=folder,
                **{**COMMON, "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", **settings},
            )
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def dpo(folder: str, callbacks: list[Any], adjust: Adjust = same, **settings: Any) -> DPOTrainer:
    """Build a DPO trainer with two answers per prompt."""
    rows = [
        {
            "prompt": text(row),
            "chosen": answer(row, 0),
            "rejected": answer(row, 1),
        }
        for row in prompts(12)
    ]
    return DPOTrainer(
        model(),
        ref_model=model(),
        args=adjust(DPOConfig(output_dir=folder, **{**COMMON, "per_device_train_batch_size": 4, **settings})),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def plain(folder: str, callbacks: list[Any], adjust: Adjust = same, **settings: Any) -> Trainer:
    """Build transformers' own trainer, with the model's loss."""
    words = tokenizer()
    rows = [{"input_ids": [*row, *completion(row, i)]} for row in prompts(8) for i in (0, 1)]
    return Trainer(
        model(),
        args=adjust(
            TrainingArguments(
                output_dir=folder,
                **{**COMMON, "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", **settings},
            )
        ),
        train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        processing_class=words,
        callbacks=callbacks,
    )


def train(make: Callable[..., Trainer], compiled: Callable[[Trainer], Any] | None = None, **settings: Any) -> Run:
    """Train from fixed seeds; `compiled` compiles a part of the trainer and returns it."""
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(folder, [run], **settings)
        trainer.remove_callback(PrinterCallback)
        if compiled is not None:
            watched = compiled(trainer)
            run.watched = lambda: watched
        run.initial = _weights(trainer.model)
        trainer.train()
        run.weights = _weights(trainer.model)
    return run


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the weights, gathered where they are sharded."""
    named = ((name, value.detach()) for name, value in model.named_parameters())
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in named}


def callback(trainer: Trainer) -> Any:
    """Compile by a `DTACallback`."""
    trainer.add_callback(dta_compile.DTACallback())
    return trainer.model


def backbone(trainer: Trainer) -> Any:
    """Compile the backbone in place."""
    inner = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    inner.model.compile(backend="dta")
    return inner.model


def whole(trainer: Trainer) -> Any:
    """Compile the model in place."""
    trainer.model.compile(backend="dta")
    return trainer.model


def difference(left: Run, right: Run) -> float:
    """Return the largest max |difference| / max |weight| over all parameters."""
    return max(
        float((value - right.weights[name]).abs().max() / value.abs().max()) for name, value in left.weights.items()
    )


def rounding(exact: Run, other: Run) -> float:
    """Return the root mean over all parameters of |difference|^2 / |exact|^2."""
    parts = [
        float((value - other.weights[name]).square().sum() / value.square().sum())
        for name, value in exact.weights.items()
    ]
    return (sum(parts) / len(parts)) ** 0.5


def moved(run: Run) -> float:
    """Return the largest change of a weight."""
    return max(float((value - run.initial[name]).abs().max()) for name, value in run.weights.items())
