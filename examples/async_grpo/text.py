"""The tokenizer, trained on games, and how a game becomes tokens that only ever grow at the end.

A turn is read as `<|user|>...<|end|><|assistant|>` and said as `...<|end|>`. What a player said stays the very tokens
that were sampled: text that is taken apart and tokenized again may come out otherwise, and would share less.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, USER, ASSISTANT, END = range(4)


def train_tokenizer(texts: Iterable[str], size: int = 512) -> Tokenizer:
    """Byte-level BPE of at most `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokens(tokenizer: Tokenizer, heard: str) -> list[int]:
    """What a player reads before a turn."""
    return [USER, *tokenizer.encode(heard, add_special_tokens=False).ids, END, ASSISTANT]


def said_tokens(tokenizer: Tokenizer, said: str) -> list[int]:
    """What a player says in a turn."""
    return [*tokenizer.encode(said, add_special_tokens=False).ids, END]


def said_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """The words of a turn."""
    return tokenizer.decode([token for token in tokens if token >= len(SPECIAL)])
