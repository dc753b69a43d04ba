"""Small tokenizer, trained on the project's own README, with a chat template like Qwen3's."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]

# Like Qwen3's: reasoning is kept in turns after the last user message and dropped from earlier ones.
STRIPPING = "".join(
    [
        "{% set ns = namespace(last=0) %}",
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
        "{% if tools %}<|im_start|>system\n",
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}",
        "<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n' }}</tools><|im_end|>{{ '\n' }}",
        "{% elif messages[0].role == 'system' %}",
        "<|im_start|>system\n{{ messages[0].content }}<|im_end|>{{ '\n' }}{% endif %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}",
        "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>",
        "{{ '\n\n' }}{% endif %}{{ m.content }}",
        "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}",
        "<|im_end|>{{ '\n' }}{% elif m.role != 'system' or not loop.first %}",
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}",
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}",
    ]
)
KEEPING = STRIPPING.replace(" and loop.index0 > ns.last", "")


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a thousand tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((ROOT / "README.md").read_text().splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = STRIPPING
    return wrapped


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **more}


def write_lines(path: Path, rows: list[Any]) -> str:
    """Write rows as JSON lines; return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
