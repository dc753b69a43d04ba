"""Convert rows to token sequences by their keys: token ids, messages, or a prompt with its completion."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dta_compile.data.file_formats import SHOWN, Row
from dta_compile.data.recorded import ReadOptions, Recorded, spans_of_mask
from dta_compile.data.tokenizer import Tokenizer, conversation, samples
from dta_compile.errors import OptionError, PlanError

# Keys of token ids that trainers and inference engines use, in order of precedence. Two keys: prompt and completion.
TOKENS: tuple[tuple[str, ...], ...] = (
    ("tokens",),
    ("input_ids", "output_ids"),
    ("input_ids",),
    ("prompt_token_ids", "token_ids"),
    ("token_ids",),
    ("prompt_ids", "completion_ids"),
    ("prompt_token_ids", "completion_token_ids"),
    ("prompt_token_ids", "response_token_ids"),
    ("prompts", "responses"),
)
MESSAGES = ("messages", "conversations", "conversation")
TEXT_PAIRS = (("prompt", "completion"), ("input", "output"), ("prompt", "response"))
LOSS_MASKS = ("loss_mask", "completion_mask", "response_mask", "assistant_masks", "assistant_mask")
OF_COMPLETIONS = ("completion_mask", "response_mask")  # masks that may cover the completion alone
TRAJECTORIES = ("trajectory", "trajectory_id", "traj", "conversation_id", "request_id")
REWARDS = ("reward", "score", "rewards")
MOST_ID, FINITE = 2**63, sys.float_info.max  # exclusive bound of token ids; inclusive bound of other numbers
IGNORED_LABEL = -100  # ignore_index of torch's cross-entropy

EXPECTED = (
    "token ids such as [151644, 8948, 198], or an object with tokens (and routes, images), messages, or prompt and "
    "completion"
)


@dataclasses.dataclass
class RowReader:
    """Converter of rows to token sequences, which counts the kinds of rows.

    Attributes:
        options: how rows with text become tokens.
        tokenizer: tokenizer named by the options; None: they name none.
        kinds: number of rows of each kind, by description.
    """

    options: ReadOptions
    tokenizer: Tokenizer | None
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)

    def read(self, rows: Iterable[Row]) -> Iterator[Recorded]:
        """Yield the sequences of rows, in order.

        Raises:
            PlanError: a row has an unknown format; the error names it.
            OptionError: a row has text, and no tokenizer is named.
        """
        for number, (where, row) in enumerate(rows):
            kind, sequences = self._convert(row, where, number)
            self.kinds[kind] += 1
            yield from sequences

    def _convert(self, row: Any, where: str, number: int) -> tuple[str, Iterable[Recorded]]:
        """Return the kind of a row, in words, and its sequences."""
        if isinstance(row, list) and row and all(isinstance(message, dict) for message in row):
            row = {"messages": row}
        if not isinstance(row, dict):
            return "rows of token ids", [Recorded(_ids(row, where))]
        for keys in TOKENS:
            if all(isinstance(row.get(key), list) and not _is_messages(row.get(key)) for key in keys):
                kind = "rows of token ids" if len(keys) == 1 else f"rows of {' and '.join(keys)}"
                return kind, [_of_tokens(row, keys, where)]
        if (key := _first(row, MESSAGES)) is not None:
            messages = conversation(row[key], where)
            if isinstance(system := row.get("system"), str) and system and messages[0]["role"] != "system":
                messages = [*conversation(system, where, role="system"), *messages]  # as ShareGPT's tables have it
            return f"transcripts ({key})", self._of_messages(row, messages, 0, where, number)
        for pair in TEXT_PAIRS:
            if all(row.get(key) is not None for key in pair):
                return f"rows of {pair[0]} and {pair[1]}", self._of_pair(row, pair, where, number)
        if isinstance(row.get("text"), str):
            return "texts", [Recorded(self._tokenizer(where).encode(row["text"]), **_facts(row, where))]
        raise _bad("a row without anything to read", where, EXPECTED, row)

    def _of_pair(self, row: dict[str, Any], pair: tuple[str, str], where: str, number: int) -> Iterable[Recorded]:
        """Return the sequences of a prompt and its completion, which are texts or lists of messages."""
        prompt, completion = (row[key] for key in pair)
        if isinstance(prompt, str) and isinstance(completion, str):
            tokenizer = self._tokenizer(where)
            prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(completion)
            span = len(prompt_ids), len(prompt_ids) + len(ids)
            return [Recorded(prompt_ids + ids, spans=(span,), **_facts(row, where))]
        asked, answered = conversation(prompt, where), conversation(completion, where, role="assistant")
        options = dataclasses.replace(self.options, turns="whole")  # a completion of several turns is one sample
        return self._of_messages(row, [*asked, *answered], len(asked), where, number, options)

    def _of_messages(
        self,
        row: dict[str, Any],
        messages: list[dict[str, Any]],
        first: int,
        where: str,
        number: int,
        options: ReadOptions | None = None,
    ) -> Iterator[Recorded]:
        """Yield the samples of a transcript; `first`: number of the first message that may be trained on."""
        tokenizer, options = self._tokenizer(where), options or self.options
        of_row = row.get("chat_template_kwargs")
        values = {**(of_row if isinstance(of_row, dict) else {}), **options.template_values}
        tools, facts = row.get("tools"), _facts(row, where)
        facts.setdefault("trajectory", number)
        for sample in samples(tokenizer, messages, tools, values, options, first, where):
            turn = sample.turn if options.turns == "each" else facts.get("turn", sample.turn)
            name = f"talk {facts['trajectory']} · turn {turn}"
            yield dataclasses.replace(sample, **{**facts, "turn": turn, "name": name})

    def _tokenizer(self, where: str) -> Tokenizer:
        if self.tokenizer is None:
            raise OptionError(
                "text needs a tokenizer",
                where=where,
                expected="--tokenizer with a name or folder for transformers' AutoTokenizer, or a tokenizer.json",
            )
        return self.tokenizer


def _of_tokens(row: dict[str, Any], keys: Sequence[str], where: str) -> Recorded:
    """Return the sequence of a row's token ids, with its routes, images and loss spans.

    Padding is dropped (see `_real`).

    Args:
        keys: key of all tokens, or keys of the prompt's and of the completion's.
    """
    parts = [_ids(row[key], where) for key in keys]
    tokens: Any = [token for part in parts for token in part]
    completion = len(parts[-1])
    mask = _first(row, LOSS_MASKS)
    routes = None if row.get("routes") is None else _routes(row["routes"], len(tokens), where)
    images = _images(row, len(tokens), where)
    spans: Sequence[tuple[int, int]] | None = ((len(tokens) - completion, len(tokens)),) if len(keys) > 1 else None
    if row.get("spans") is not None:
        spans = _spans(row["spans"], len(tokens), where)
    elif mask is not None:
        spans = spans_of_mask(_loss_mask(row, mask, len(tokens), completion, where))
    elif isinstance(row.get("labels"), list):
        spans = spans_of_mask(_per_token(row, "labels", len(tokens), where) != IGNORED_LABEL)
    real = _real(row, list(map(len, parts)), mask, where)
    if real is not None:
        if spans is not None:
            spans = spans_of_mask(Recorded(tokens, spans=tuple(spans)).loss_mask()[real])
        tokens = np.asarray(tokens, np.int64)[real]
        routes = None if routes is None else routes[real]
        images = tuple((int(real[:start].sum()), int(real[:stop].sum()), image) for start, stop, image in images)
    return Recorded(tokens, routes, spans=None if spans is None else tuple(spans), images=images, **_facts(row, where))


def _real(row: dict[str, Any], lengths: Sequence[int], mask: str | None, where: str) -> NDArray[np.bool_] | None:
    """Return a mask `[tokens]` of the tokens that are no padding; None: the row says of none that it is.

    Args:
        lengths: of all tokens, or of the prompt and of the completion.
        mask: key of the loss mask. In a batch of TRL, which also has a `prompt_mask`, it is zero for padding behind the
            completion, and for all of a completion that was cut off.
    """
    if row.get("attention_mask") is not None:
        return np.asarray(_per_token(row, "attention_mask", sum(lengths), where) > 0)
    if row.get("prompt_mask") is None or len(lengths) < 2:
        return None
    prompt, completion = lengths
    real = np.concatenate([_per_token(row, "prompt_mask", prompt, where) > 0, np.ones(completion, np.bool_)])
    if mask is not None and (trained := np.flatnonzero(_loss_mask(row, mask, len(real), completion, where))).size:
        real[max(prompt, trained[-1] + 1) :] = False
    return real


def _loss_mask(row: dict[str, Any], key: str, tokens: int, completion: int, where: str) -> NDArray[np.bool_]:
    """Return the loss mask `[tokens]` from a row's own, which covers all tokens or those of the completion alone."""
    given = len(row[key]) if isinstance(row[key], list) else 0
    is_shorter = given == completion < tokens or (key in OF_COMPLETIONS and 0 < given < tokens == completion)
    covered = given if is_shorter else tokens
    mask = np.zeros(tokens, bool)
    mask[tokens - covered :] = _per_token(row, key, covered, where) > 0
    return mask


def _facts(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row's trajectory, turn and reward, as far as it has them; rewards by token (lists) are ignored."""
    facts: dict[str, Any] = {}
    if (name := _first(row, TRAJECTORIES)) is not None:
        facts["trajectory"] = row[name] if isinstance(row[name], str) else _integer(row, name, where)
    if row.get("turn") is not None:
        facts["turn"] = _integer(row, "turn", where)
    reward = next((key for key in REWARDS if row.get(key) is not None and not isinstance(row[key], list)), None)
    if reward is not None:
        facts["reward"] = _number(row, reward, where)
    return facts


def _number(row: Mapping[str, Any], key: str, where: str) -> float:
    value = row[key]
    if type(value) not in (int, float, bool) or not -FINITE <= value <= FINITE:
        raise _bad(f"{key} is no finite number", where, "a number, or null where it is not known", value)
    return float(value)


def _integer(row: Mapping[str, Any], key: str, where: str) -> int:
    """Return an integer field; tables with missing values store integers as floats."""
    value = row[key]
    if type(value) not in (int, float) or not -MOST_ID <= value < MOST_ID or value != int(value):
        raise _bad(f"{key} is no integer", where, "an integer of 64 bits, or null where it is not known", value)
    return int(value)


def _first(row: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """Return the first of some keys that has a value in the row."""
    return next((key for key in keys if row.get(key) is not None), None)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _ids(value: Any, where: str) -> Any:
    # bool is a subclass of int in Python, but true and false are no token ids.
    if isinstance(value, list) and all(type(token) is int and 0 <= token < MOST_ID for token in value):
        return value
    raise _bad("a line is not a list of token ids", where, EXPECTED, value)


def _per_token(row: dict[str, Any], key: str, tokens: int, where: str) -> Any:
    """Return the numbers of field `key`, float64 `[tokens]`; raise PlanError unless it has one for each token."""
    value = row[key]
    is_list = isinstance(value, list) and len(value) == tokens
    if not is_list or not all(type(number) in (int, bool, float) and -FINITE <= number <= FINITE for number in value):
        raise _bad(f"{key} does not fit the tokens", where, f"{tokens} numbers, one for each token", value)
    return np.asarray(value, np.float64)


def _spans(value: Any, tokens: int, where: str) -> tuple[tuple[int, int], ...]:
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 and _ascends([0, *pair, tokens]) for pair in pairs):
        raise _bad("spans do not fit the tokens", where, f"pairs [start, stop] within [0, {tokens}]", value)
    return tuple((start, stop) for start, stop in pairs)


def _images(row: dict[str, Any], tokens: int, where: str) -> tuple[tuple[int, int, int | str], ...]:
    value = row.get("images")
    if not isinstance(value, (list, type(None))) or not all(_is_image(image, tokens) for image in value or ()):
        expected = f'"images": [start, stop, name or number] of each, with its tokens within [0, {tokens}]'
        raise _bad("images do not say which tokens are theirs", where, expected, value)
    return tuple((start, stop, image) for start, stop, image in value or ())


def _is_image(value: Any, tokens: int) -> bool:
    is_triple = isinstance(value, list) and len(value) == 3 and type(value[2]) in (int, str)
    return is_triple and _ascends([0, *value[:2], tokens]) and value[0] < value[1]


def _ascends(values: list[Any]) -> bool:
    return all(type(value) is int for value in values) and values == sorted(values)


def _routes(value: Any, tokens: int, where: str) -> Any:
    routes = None
    with contextlib.suppress(Exception):  # numpy's errors, and those of lists nested too deep
        entries = np.array(value, dtype=object)
        routes = entries.astype(np.int64) if set(map(type, entries.flat)) <= {int} else None  # no bools
    if not isinstance(value, list) or routes is None or len(routes) != tokens:
        expected = f'"routes": an entry for each of {tokens} tokens, such as experts by layer [[0, 5], [3, 1]]'
        raise _bad("routes are not integers of one shape for every token", where, expected, value)
    return routes


def _bad(what: str, where: str, expected: str, value: Any) -> PlanError:
    return PlanError(what, where=where, expected=expected, got=_shown(value))


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
