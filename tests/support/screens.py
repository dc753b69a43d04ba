"""Toy runs of TRL's trainers with images: episodes of drawn screens, a processor that is made here, a tiny Qwen3-VL.

difference(train(grpo), train(grpo, callback))        # both of `tests.support.trainers`
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.support import vision
from tests.support.trainers import COMMON, GROUP

SIDES = ((16, 16), (16, 24))  # height and width of screens: 4 and 6 tokens
# The ids of `vision.TOKENS`, then those of the chat template.
MARKS = {"<|image_pad|>": 90, "<|video_pad|>": 91, "<|vision_start|>": 92, "<|vision_end|>": 93, "<|im_start|>": 94}
WORDS = {"<pad>": 0, "<|im_end|>": 1, "<unk>": 2, "user": 3, "assistant": 4} | {f"w{i}": i for i in range(5, 90)}
TEMPLATE = """
{%- for message in messages -%}<|im_start|>{{ message.role }}
{%- for part in message.content -%}
{%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part.text }}{% endif -%}
{%- endfor -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}
"""


class Processor(Qwen3VLProcessor):
    """Qwen3-VL's processor without videos, which need torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_token_id = "<|image_pad|>", MARKS["<|image_pad|>"]
        self.video_token, self.video_token_id = "<|video_pad|>", MARKS["<|video_pad|>"]


def processor() -> Processor:
    """Return a processor whose tokenizer has one token per word."""
    words = Tokenizer(models.WordLevel(WORDS | MARKS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=[*MARKS],
        padding_side="left",
    )
    images = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=4096)
    return Processor(images, tokenizer, TEMPLATE)


def screen(number: int) -> Image.Image:
    """Draw a screen: a window whose place and colours depend on the number."""
    height, width = SIDES[number % len(SIDES)]
    image = Image.new("RGB", (width, height), (40 * number % 256, 90, 160))
    left = 3 * number % (width - 8)
    ImageDraw.Draw(image).rectangle((left, 3, left + 7, 12), (250, 80 * number % 256, 20), (0, 0, 0))
    return image


def episode(task: int, turns: int) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Return the messages of an episode's first turns, which end with a screen, and its screens."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": [_image(), _text(f"w{5 + task} w{20 + turn}")]})
        messages.append({"role": "assistant", "content": [_text(f"w{40 + task + turn} w50")]})
    return messages[:-1], [screen(3 * task + turn) for turn in range(turns)]


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _image() -> dict[str, Any]:
    return {"type": "image", "text": None}


def model() -> Qwen3VLForConditionalGeneration:
    return vision.build("qwen3_vl")


def grpo(folder: str, callbacks: list[Any], peft_config: Any = None, **settings: Any) -> GRPOTrainer:
    """Build a GRPO trainer on prompts of one to three screens; those of an episode begin alike."""

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        words = [row[0]["content"].split() for row in completions]
        return [sum(int(word[1:]) % 2 for word in row if word[1:].isdigit()) / 8 for row in words]

    rows = [
        dict(zip(("prompt", "images"), episode(task, turns), strict=True)) for task in range(4) for turns in (1, 2, 3)
    ]
    return GRPOTrainer(
        model(),
        reward,
        args=GRPOConfig(
            output_dir=folder,
            num_generations=GROUP,
            max_completion_length=6,
            **{**COMMON, "per_device_train_batch_size": 3 * GROUP, "shuffle_dataset": False, **settings},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=processor(),
        callbacks=callbacks,
        peft_config=peft_config,
    )


def _rows() -> list[dict[str, Any]]:
    """Return episodes of one to three screens, each with two answers of which the first is chosen."""
    rows = []
    for task in range(4):
        for turns in (1, 2, 3):
            prompt, images = episode(task, turns)
            answers = [
                [{"role": "assistant", "content": [_text(f"w{60 + task + turns} w{other}")]}] for other in (7, 8)
            ]
            rows.append({"prompt": prompt, "images": images, "chosen": answers[0], "rejected": answers[1]})
    return rows


def sft(folder: str, callbacks: list[Any], **settings: Any) -> SFTTrainer:
    """Build an SFT trainer on episodes with an answer each, in sequence."""
    rows = [{name: row[name] for name in ("prompt", "images")} | {"completion": row["chosen"]} for row in _rows()]
    return SFTTrainer(
        model(),
        args=SFTConfig(
            output_dir=folder,
            max_length=None,
            **{**COMMON, "per_device_train_batch_size": 6, "train_sampling_strategy": "sequential", **settings},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=processor(),
        callbacks=callbacks,
    )


def dpo(folder: str, callbacks: list[Any], **settings: Any) -> DPOTrainer:
    """Build a DPO trainer on episodes with two answers each."""
    return DPOTrainer(
        model(),
        ref_model=model(),
        args=DPOConfig(output_dir=folder, max_length=None, **{**COMMON, "per_device_train_batch_size": 4, **settings}),
        train_dataset=Dataset.from_list(_rows()),
        processing_class=processor(),
        callbacks=callbacks,
    )
