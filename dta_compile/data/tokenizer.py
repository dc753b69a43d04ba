"""Tokenizers and their chat templates, by transformers; a `tokenizer.json` alone by the package `tokenizers`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dta_compile.data.tables import optional
from dta_compile.errors import OptionError, PlanError
from dta_compile.files import read_text

CACHED_TEXTS = 1024  # turns of a conversation are rendered again as parts of later ones


class Tokenizer:
    """Text to token ids and back, and messages to text.

    Args:
        inner: a tokenizer of transformers.
        name: as the user called it.
        template: a chat template in place of the tokenizer's own.
    """

    def __init__(self, inner: Any, name: str, template: str | None = None) -> None:
        self.inner, self.name, self.template = inner, name, template
        self.encode = functools.lru_cache(CACHED_TEXTS)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens around it."""
        try:
            return tuple(self.inner(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # of tokenizers: halves of characters, for one
            raise PlanError(
                "a text cannot be tokenized", where=self.name, got=f"{type(error).__name__}: {error}"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included; ids that are out of its vocabulary by their number."""
        ids, size = [int(token) for token in tokens], len(self.inner)
        if all(0 <= token < size for token in ids):
            return str(self.inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return " ".join(
            str(self.inner.decode([token], skip_special_tokens=False)) if 0 <= token < size else f"<{token}>"
            for token in ids
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        values: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> str:
        """The text of messages by the chat template; `prompt`: with the beginning of an assistant's turn after them.

        Raises:
            PlanError: there is no template, or it does not take these messages.
        """
        if not (self.template or getattr(self.inner, "chat_template", None)):
            raise PlanError(
                "the tokenizer has no chat template",
                where=self.name,
                expected="a tokenizer with one, or --chat-template FILE",
            )
        given = {"chat_template": self.template} if self.template else {}
        try:
            text = self.inner.apply_chat_template(
                list(messages),
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **given,
                **(values or {}),
            )
        except Exception as error:  # jinja2's errors, and whatever Python raises inside of a template
            raise PlanError(
                "the chat template does not take these messages",
                where=f"roles {', '.join(str(message.get('role')) for message in messages)}",
                got=f"{type(error).__name__}: {error}",
            ) from error
        return str(text)


def load_tokenizer(name: str, template: str | None = None) -> Tokenizer:
    """A tokenizer by name, folder or `tokenizer.json`.

    Args:
        template: file with a chat template, or the template itself.

    Raises:
        MissingPackageError: transformers is not installed.
        OptionError: there is no such tokenizer, or it cannot be read.
    """
    transformers = optional("transformers", "a tokenizer", "transformers")
    try:
        path = Path(name)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError("neither a file nor a folder")
        if path.is_file():
            inner = transformers.PreTrainedTokenizerFast(tokenizer_file=name)
        elif path.is_dir() and not (path / "tokenizer_config.json").exists() and (path / "tokenizer.json").exists():
            inner = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
        else:
            inner = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of transformers, tokenizers, huggingface_hub and its HTTP client
        raise OptionError(
            "the tokenizer cannot be loaded",
            expected="--tokenizer with a name that transformers' AutoTokenizer knows, its folder, or a tokenizer.json",
            got=f"{name!r}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
        ) from error
    return Tokenizer(inner, name, _template(template))


def _template(given: str | None) -> str | None:
    """A template from its file; what has marks of jinja in it is a template itself."""
    if given is None or "{%" in given or "{{" in given:
        return given
    try:
        return read_text(given)
    except UnicodeError as error:
        raise OptionError("a chat template is no text", expected="a file of jinja", got=given) from error
