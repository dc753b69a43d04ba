"""Tokenizers and chat templates through transformers; a `tokenizer.json` without a configuration works as well."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dta_compile.data.file_formats import optional
from dta_compile.data.recorded import ReadOptions, Recorded
from dta_compile.errors import OptionError, PlanError
from dta_compile.files import read_text

CACHED_TEXTS = 1024  # later turns of a conversation render the earlier ones again


class Tokenizer:
    """Tokenizer with a chat template: converts text to token ids and back, and messages to text.

    Args:
        inner: a tokenizer of transformers.
        name: name given by the user, for error messages.
        template: chat template that replaces the tokenizer's own.
    """

    def __init__(self, inner: Any, name: str, template: str | None = None) -> None:
        self.inner, self.name, self.template = inner, name, template
        self.encode = functools.lru_cache(CACHED_TEXTS)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without added special tokens."""
        try:
            return tuple(self.inner(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # raised by tokenizers, for example over unpaired surrogates
            raise PlanError(
                "a text cannot be tokenized", where=self.name, got=f"{type(error).__name__}: {error}"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens; an id out of the vocabulary appears as `<id>`."""
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
        """Render messages by the chat template; `prompt` appends the header of an assistant turn.

        Raises:
            PlanError: there is no template, or it rejects these messages.
        """
        if not (self.template or getattr(self.inner, "chat_template", None)):
            raise PlanError(
                "the tokenizer has no chat template",
                where=self.name,
                expected="a tokenizer with one, or --chat-template FILE",
            )
        template = {"chat_template": self.template} if self.template else {}
        try:
            text = self.inner.apply_chat_template(
                list(messages),
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **template,
                **(values or {}),
            )
        except Exception as error:  # jinja2's errors, and any Python error inside the template
            raise PlanError(
                "the chat template does not take these messages",
                where=f"roles {', '.join(str(message.get('role')) for message in messages)}",
                got=f"{type(error).__name__}: {error}",
            ) from error
        return str(text)


def load_tokenizer(name: str, template: str | None = None) -> Tokenizer:
    """Load a tokenizer by name, folder or `tokenizer.json`.

    Args:
        template: file with a chat template, or the template itself.

    Raises:
        MissingPackageError: transformers is not installed.
        OptionError: the tokenizer does not exist or cannot be read.
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
    except Exception as error:  # raised by transformers, tokenizers, huggingface_hub and its HTTP client
        raise OptionError(
            "the tokenizer cannot be loaded",
            expected="--tokenizer with a name that transformers' AutoTokenizer knows, its folder, or a tokenizer.json",
            got=f"{name!r}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
        ) from error
    return Tokenizer(inner, name, _template(template))


def _template(template: str | None) -> str | None:
    """Read a template from its file; a text with jinja markers is a template itself."""
    if template is None or "{%" in template or "{{" in template:
        return template
    try:
        return read_text(template)
    except UnicodeError as error:
        raise OptionError("a chat template is no text", expected="a file of jinja", got=template) from error


Message = dict[str, Any]

# Role names of ShareGPT.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def conversation(value: Any, where: str, role: str = "user") -> list[Message]:
    """Normalise a conversation to messages `{"role", "content", ...}`.

    `value` is a list of messages in OpenAI's or ShareGPT's format, or one text spoken by `role`. Tool call arguments
    that are JSON strings become objects, as chat templates expect. Entries that are None are dropped: tables have them
    for keys that only other messages use.

    Raises:
        PlanError: `value` is not a list of messages with roles.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [_message(message) for message in value] if isinstance(value, list) else []
    bad = [number for number, message in enumerate(messages) if message is None]
    if bad or not messages:
        raise PlanError(
            "not a list of messages",
            where=where,
            expected='[{"role": "user", "content": "..."}, ...] or [{"from": "human", "value": "..."}, ...]',
            got=f"entry {bad[0]} without a role" if bad else repr(value)[:60],
        )
    return [message for message in messages if message is not None]


def samples(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: Any,
    values: Mapping[str, Any],
    options: ReadOptions,
    first: int = 0,
    where: str = "",
) -> Iterator[Recorded]:
    """Yield the samples of one transcript.

    Args:
        tools, values: variables of the chat template besides the messages.
        options: select the turns that become samples and those that are trained on.
        first: index of the first message that may be an answer; earlier ones are the prompt.

    Raises:
        PlanError: no message is by the assistant.
    """
    if isinstance(tools, str):  # tables store them as JSON text
        tools = from_json(tools)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if not answers:
        raise PlanError(
            "a transcript without an assistant's turn",
            where=where,
            expected='a message with "role": "assistant"',
            got=", ".join(str(message["role"]) for message in messages),
        )
    render = _Renderer(tokenizer, messages, tools, values)
    ends = answers if options.turns == "each" else [answers[-1]]
    for turn, last in enumerate(ends):
        stop = last + 1 if options.turns == "each" else len(messages)
        tokens = render.tokens(stop)
        trained = [i for i in answers if i <= last] if options.trains_all else [last]
        yield Recorded(tokens, spans=tuple(render.spans(tokens, trained, stop)), turn=turn)


class _Renderer:
    """Renderer of prefixes of one transcript as token ids."""

    def __init__(self, tokenizer: Tokenizer, messages: list[Message], tools: Any, values: Mapping[str, Any]) -> None:
        self.tokenizer, self.messages, self.tools, self.values = tokenizer, messages, tools, values

    def text(self, stop: int, prompt: bool = False) -> str:
        return self.tokenizer.render(self.messages[:stop], self.tools, self.values, prompt)

    def tokens(self, stop: int, prompt: bool = False) -> tuple[int, ...]:
        return self.tokenizer.encode(self.text(stop, prompt))

    def spans(self, tokens: tuple[int, ...], answers: list[int], stop: int) -> Iterator[tuple[int, int]]:
        """Yield the token ranges of the answers within the messages before `stop`.

        An answer begins where its prompt ends. If the template has changed that prompt since (for example by dropping
        the reasoning of earlier turns), the answer's content is searched for behind the messages before it.
        """
        text, done, first = self.text(stop), 0, 0
        for answer in answers:
            begin, end = self._begin(tokens, answer), len(tokens)
            if answer + 1 < stop:
                end = common_prefix(tokens, self.tokens(answer + 1))
            if begin is None or end <= max(begin, done):
                before = range(first, answer) if begin is None else None
                span = self._found(text, before, answer, max(begin or 0, done))
                if span is None:
                    continue
                begin, end = span
            yield begin, end
            done, first = end, answer + 1

    def _begin(self, tokens: tuple[int, ...], answer: int) -> int | None:
        """Return the length of an answer's prompt, or None if `tokens` do not begin with the messages before it."""
        before = self.tokens(answer)
        shared = common_prefix(tokens, self.tokens(answer, prompt=True))
        return shared if shared >= common_prefix(tokens, before) >= len(before) - 1 else None

    def _found(self, text: str, before: range | None, answer: int, done: int) -> tuple[int, int] | None:
        """Find an answer's content behind token `done` and the messages `before` it, which may have it as well."""
        content = self.messages[answer].get("content")
        if not isinstance(content, str) or not content.strip():
            return None
        encode = self.tokenizer.encode
        place = len(self.tokenizer.decode(encode(text)[:done])) if done else 0
        skipped: list[Any] = []
        if before is not None:
            header = self.text(answer, prompt=True).removeprefix(self.text(answer))
            skipped = [*(self.messages[message].get("content") for message in before), header]
        for known in skipped:
            if isinstance(known, str) and (at := text.find(known.strip(), place)) >= 0:
                place = at + len(known.strip())
        begin = text.find(content.strip(), place)
        if begin < 0:
            return None
        return len(encode(text[:begin])), len(encode(text[: begin + len(content.strip())]))


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two token sequences, or texts."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)


def _message(value: Any) -> Message | None:
    if not isinstance(value, dict):
        return None
    message = {str(key): entry for key, entry in value.items() if entry is not None}
    if "role" not in message and "from" in message:
        role = str(message.pop("from"))
        message = {"role": ROLES.get(role, role), "content": message.pop("value", ""), **message}
    if not isinstance(message.get("role"), str):
        return None
    parts = message.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        message["content"] = "".join(str(part.get("text", "")) for part in parts)
    message.setdefault("content", "")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    inner = call.get("function", call)
    if not isinstance(inner, dict):
        return call
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = from_json(arguments)
    elif isinstance(arguments, dict):
        arguments = {key: argument for key, argument in arguments.items() if argument is not None}
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def from_json(text: str) -> Any:
    """Parse a text that may be JSON; return any other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
