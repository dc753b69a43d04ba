"""Run TRL's GRPOTrainer with one added line: `callbacks=[dta_compile.DTACallback()]`.

    python examples/trl_grpo.py [--where callback|model|backbone] [--steps 4]

The callback compiles the model with TRL's fused head, so that only completion tokens are scored. If only the backbone
is compiled, TRL's own kernel gets all hidden states.

Trains a tiny Qwen3 with random weights twice in one process on CPU, eagerly and over the prefix tree, from the same
seeds, and compares the weights. Uses plain SGD in float64: Adam divides every gradient by its magnitude and so turns
rounding errors (1e-7, as transformers computes norms in float32) into full steps where a gradient is almost zero.
Model, tokenizer, prompts and reward are made here. Generation runs eagerly.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import dta_compile

WORDS = [f"w{i}" for i in range(61)]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes: prompts alternate between `prompt` and `prompt - 5` words (left-padded), with `group` completions each."""

    steps: int = 4
    prompt: int = 240
    completion: int = 24
    group: int = 8
    hidden: int = 128
    layers: int = 2


@dataclasses.dataclass
class Run(TrainerCallback):
    """Records of one training run; as callback and reward function of the trainer it fills itself.

    `seconds`: forward, loss and backward per step, from the reward (generation is done) to the optimizer.
    """

    compiled: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    plans: list[dta_compile.Plan] = dataclasses.field(default_factory=list)
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def reward(self, completions: list[str], **kwargs: Any) -> list[float]:
        """Return the fraction of even-numbered words."""
        numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
        self.started = time.perf_counter()
        return [sum(number % 2 == 0 for number in row) / max(len(row), 1) for row in numbers]

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.started)
        if self.compiled is not None:
            self.plans.append(dta_compile.last_plan(self.compiled))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word; nothing is downloaded."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def dataset(settings: Settings) -> Dataset:
    """Return prompts of random words, half of them shorter."""
    generator = torch.Generator().manual_seed(1)
    lengths = [settings.prompt - 5 * (i % 2) for i in range(2 * settings.steps)]
    picks = [torch.randint(len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"prompt": " ".join(WORDS[i] for i in row)} for row in picks])


def model(settings: Settings) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": settings.hidden // 4}
    config = Qwen3Config(
        vocab_size=len(WORDS) + 3,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        pad_token_id=0,
        eos_token_id=1,
        **heads,
    )
    return Qwen3ForCausalLM(config).double()


def train(settings: Settings, where: str | None) -> Run:
    """Train from fixed seeds; `where`: compile nothing (None), the "model", also by "callback", or its "backbone"."""
    run = Run()
    with tempfile.TemporaryDirectory() as directory:
        arguments = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=2 * settings.group,
            num_generations=settings.group,
            max_completion_length=settings.completion,
            max_steps=settings.steps,
            learning_rate=0.5,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            bf16=False,
            gradient_checkpointing=False,  # dta itself decides on recomputation
            use_cpu=True,
            seed=3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model(settings),
            run.reward,
            args=arguments,
            train_dataset=dataset(settings),
            processing_class=tokenizer(),
            callbacks=[run],
        )
        trainer.remove_callback(PrinterCallback)
        if where == "callback":
            trainer.add_callback(dta_compile.DTACallback())  # the one line
            run.compiled = trainer.model
        elif where == "model":
            trainer.model.compile(backend="dta")  # or this line
            run.compiled = trainer.model
        elif where == "backbone":
            trainer.model.model.compile(backend="dta")
            run.compiled = trainer.model.model
        trainer.train()
        run.weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return run


def difference(left: Run, right: Run) -> float:
    """Return the largest max |difference| / max |weight| over all parameters."""
    return max(
        float((value - right.weights[name]).abs().max() / value.abs().max()) for name, value in left.weights.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--where", choices=("callback", "model", "backbone"), default="callback")
    parser.add_argument("--threads", type=int, default=1, help="more only help on cores that nobody else uses")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    logging.getLogger("dta_compile").addHandler(RichHandler(console=console, show_path=False))
    logging.getLogger("dta_compile").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)  # TRL calls renamed methods of transformers
    settings = Settings(steps=options.steps)
    eager, ours = train(settings, None), train(settings, options.where)

    assert len({id(plan) for plan in ours.plans}) == settings.steps, "a step's forward did not run over the tree"
    initial = {name: value.detach() for name, value in model(settings).named_parameters()}
    moved = max(float((value - initial[name]).abs().max()) for name, value in eager.weights.items())
    stats = ours.plans[-1].stats
    table = Table(title=f"GRPOTrainer, {settings.steps} steps (the first compiles), CPU float64, SGD")
    for column in ("", "eager", f"{options.where}, dta"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("loss of each step", *("\n".join(f"{loss:+.8f}" for loss in run.losses) for run in (eager, ours)))
    table.add_row("largest change of a weight", f"{moved:.1e}", "")
    table.add_row("largest difference of a weight", "reference", f"{difference(eager, ours):.1e}")
    table.add_row("tokens of the last step", f"{stats.tokens:,}", f"{stats.tree_tokens:,} (C {stats.compression:.2f})")
    table.add_row(
        "forward and backward", *("\n".join(f"{value:.2f} s" for value in run.seconds) for run in (eager, ours))
    )
    console.print(table)
    console.print(str(ours.plans[-1]), markup=False, highlight=False)


if __name__ == "__main__":
    main()
