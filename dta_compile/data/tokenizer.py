"""Tokenizers and their chat templates, by transformers; a `tokenizer.json` alone by the package `tokenizers`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dta_compile.data.recorded import ReadOptions, Recorded
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


Message = dict[str, Any]

# ShareGPT's words for roles.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def conversation(value: Any, where: str, role: str = "user") -> list[Message]:
    """Messages `{"role", "content", ...}` of a list of them in OpenAI's or ShareGPT's words, or of one text by `role`.

    Arguments of tool calls that are JSON in a string become objects, as chat templates want them; entries without a
    value, which tables have for keys of other messages, are left out.

    Raises:
        PlanError: an entry has no role.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [_message(one) for one in value] if isinstance(value, list) else [None]
    bad = next((number for number, one in enumerate(messages) if one is None), None)
    if bad is not None or not messages:
        raise PlanError(
            "not a list of messages",
            where=where,
            expected='[{"role": "user", "content": "..."}, ...] or [{"from": "human", "value": "..."}, ...]',
            got=f"entry {bad} without a role" if isinstance(value, list) and messages else repr(value)[:60],
        )
    return [one for one in messages if one is not None]


def samples(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: Any,
    values: Mapping[str, Any],
    options: ReadOptions,
    first: int = 0,
    where: str = "",
) -> Iterator[Recorded]:
    """The samples of one transcript.

    Args:
        tools, values: what the chat template is given besides the messages.
        options: which turns are samples, and which count for the loss.
        first: messages before this one are a prompt, whoever wrote them.

    Raises:
        PlanError: no message is an assistant's.
    """
    if isinstance(tools, str):  # as tables keep them
        tools = _from_json(tools)
    answers = [i for i, one in enumerate(messages) if one["role"] == "assistant" and i >= first]
    if not answers:
        raise PlanError(
            "a transcript without an assistant's turn",
            where=where,
            expected='a message with "role": "assistant"',
            got=", ".join(str(one["role"]) for one in messages),
        )
    render = _Renderer(tokenizer, messages, tools, values)
    ends = answers if options.turns == "each" else [answers[-1]]
    for turn, last in enumerate(ends):
        stop = last + 1 if options.turns == "each" else len(messages)
        tokens = render.tokens(stop)
        trained = [i for i in answers if i <= last] if options.trains_all else [last]
        yield Recorded(tokens, spans=tuple(render.spans(tokens, trained, stop)), turn=turn)


class _Renderer:
    """The messages of one transcript, up to any of them, as token ids."""

    def __init__(self, tokenizer: Tokenizer, messages: list[Message], tools: Any, values: Mapping[str, Any]) -> None:
        self.tokenizer, self.messages, self.tools, self.values = tokenizer, messages, tools, values

    def text(self, stop: int, prompt: bool = False) -> str:
        return self.tokenizer.render(self.messages[:stop], self.tools, self.values, prompt)

    def tokens(self, stop: int, prompt: bool = False) -> tuple[int, ...]:
        return self.tokenizer.encode(self.text(stop, prompt))

    def spans(self, tokens: tuple[int, ...], answers: list[int], stop: int) -> Iterator[tuple[int, int]]:
        """Where the answers are in the tokens of the messages before `stop`.

        An answer begins where the prompt before it ends. Where the template has changed that prompt since (it leaves
        out thinking of earlier turns, say), the answer's content is looked for behind the answers before it.
        """
        text, done = self.text(stop), 0
        for answer in answers:
            begin, end = self._begin(tokens, answer), len(tokens)
            if answer + 1 < stop:
                end = common_prefix(tokens, self.tokens(answer + 1))
            if begin is None or end <= max(begin, done):
                found = self._found(text, answer, done)
                if found is None:
                    continue
                begin, end = found
            yield begin, end
            done = end

    def _begin(self, tokens: tuple[int, ...], answer: int) -> int | None:
        """Where the prompt before an answer ends; None if the tokens do not begin with the messages before it."""
        before = self.tokens(answer)
        shared = common_prefix(tokens, self.tokens(answer, prompt=True))
        return shared if shared >= common_prefix(tokens, before) >= len(before) - 1 else None

    def _found(self, text: str, answer: int, done: int) -> tuple[int, int] | None:
        content = self.messages[answer].get("content")
        if not isinstance(content, str) or not content.strip():
            return None
        encode = self.tokenizer.encode
        begin = text.find(content.strip(), len(self.tokenizer.decode(encode(text)[:done])) if done else 0)
        if begin < 0:
            return None
        return len(encode(text[:begin])), len(encode(text[: begin + len(content.strip())]))


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two sequences have in common from their beginning."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)


def _message(value: Any) -> Message | None:
    if not isinstance(value, dict):
        return None
    found = {str(key): one for key, one in value.items() if one is not None}
    if "role" not in found and "from" in found:
        role = str(found.pop("from"))
        found = {"role": ROLES.get(role, role), "content": found.pop("value", ""), **found}
    if not isinstance(found.get("role"), str):
        return None
    parts = found.get("content")
    if isinstance(parts, list) and all(isinstance(one, dict) and one.get("type") == "text" for one in parts):
        found["content"] = "".join(str(one.get("text", "")) for one in parts)
    found.setdefault("content", "")
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_tool_call(one) for one in found["tool_calls"]]
    return found


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    inner = call.get("function", call)
    if not isinstance(inner, dict):
        return call
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(arguments)
    elif isinstance(arguments, dict):
        arguments = {key: one for key, one in arguments.items() if one is not None}
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
