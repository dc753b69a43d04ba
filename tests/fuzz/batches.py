"""Rows as trainers and accidents make them: every argument that a drawn program may take, for one call."""

from __future__ import annotations

import dataclasses
import random

FORMATS = ("full", "right", "left", "packed", "holes", "empty row", "one length", "segments as mask")
VOCABULARY = 13


@dataclasses.dataclass(frozen=True)
class Batch:
    """The shape of a call; its contents follow from `seed`.

    Attributes:
        rows, tokens: B and S.
        format: where the real tokens are.
        seed: of ids and numbers.
    """

    rows: int
    tokens: int
    format: str
    seed: int

    def arguments(self) -> dict[str, tuple[object, str]]:
        """name: (nested lists or a number, dtype as source text, "" for a Python number)."""
        chance = random.Random(self.seed)
        ids = self._ids(chance)
        segments = [self._segments(chance) for _ in range(self.rows)]
        if self.format != "segments as mask":
            ids = [[i if s else 0 for i, s in zip(*both, strict=True)] for both in zip(ids, segments, strict=True)]
        pad = segments if self.format == "segments as mask" else [[int(s > 0) for s in row] for row in segments]
        window = chance.randint(1, 5)
        one = chance.random() < 0.5
        return {
            "ids": (ids, "torch.int64"),
            "codes": ([[[i, 3 * i % VOCABULARY] for i in row] for row in ids], "torch.int64"),
            "pad": (pad, "$pad"),
            "segments": (segments, "torch.int64"),
            "pos": ([_positions(row) for row in segments], "torch.int64"),
            "labels": ([_labels(row, chance) for row in ids], "torch.int64"),
            "advantage": ([[i / 10 + n / 7 for n, i in enumerate(row)] for row in ids], "torch.float64"),
            "window": (window, ""),
            "limit": (window, "torch.int64"),
            "windows": ([window if one else chance.randint(1, 5) for _ in range(self.rows)], "torch.int64"),
            "pairs": ([[_pairs(row)] for row in segments], "torch.bool"),
            "additive": ([[_additive(_pairs(row))] for row in segments], "torch.float64"),
            "factor": ([0.5 if one else chance.randint(1, 9) / 4 for _ in range(self.rows)], "torch.float64"),
        }

    def _ids(self, chance: random.Random) -> list[list[int]]:
        """Rows that fork from earlier ones at any depth; some are duplicates."""
        rows: list[list[int]] = []
        for _ in range(self.rows):
            depth = chance.randint(0, self.tokens) if rows else 0
            if rows and chance.random() < 0.2:
                depth = self.tokens
            start = chance.choice(rows)[:depth] if rows else []
            rows.append(start + [chance.randrange(1, VOCABULARY) for _ in range(self.tokens - depth)])
        return rows

    def _segments(self, chance: random.Random) -> list[int]:
        """The document of every token from 1, 0 at padding."""
        tokens, length = self.tokens, chance.randint(1, self.tokens)
        match self.format:
            case "right":
                return [1] * length + [0] * (tokens - length)
            case "left":
                return [0] * (tokens - length) + [1] * length
            case "holes":
                return [int(chance.random() < 0.7) for _ in range(tokens - 1)] + [1]
            case "empty row":
                return [int(chance.random() < 0.6)] * tokens
            case "one length":
                return [1] * ((tokens + 1) // 2) + [0] * (tokens // 2)
            case "packed" | "segments as mask":
                cut = chance.randint(0, tokens)
                end = chance.randint(cut, tokens)
                return [1] * cut + [2] * (end - cut) + [3 if self.format != "packed" else 0] * (tokens - end)
        return [1] * tokens


def _positions(segments: list[int]) -> list[int]:
    """Counted from 0 in every document, 0 at padding."""
    seen: dict[int, int] = {}
    found = []
    for segment in segments:
        found.append(seen.get(segment, 0) if segment else 0)
        seen[segment] = seen.get(segment, 0) + 1
    return found


def _labels(ids: list[int], chance: random.Random) -> list[int]:
    """The next token, -100 (ignored) before a random place and where there is none."""
    prompt = chance.randint(0, len(ids) // 2)
    following = [*ids[1:], 0]
    return [-100 if n < prompt or not i or not f else f for n, (i, f) in enumerate(zip(ids, following, strict=True))]


def _pairs(segments: list[int]) -> list[list[bool]]:
    """Causal within the documents of a row `[S, S]`; padding sees all real tokens before it."""
    tokens = range(len(segments))
    return [
        [key <= query and segments[key] > 0 and segments[query] in (0, segments[key]) for key in tokens]
        for query in tokens
    ]


def _additive(pairs: list[list[bool]]) -> list[list[float]]:
    return [[0.0 if pair else -1e9 for pair in row] for row in pairs]
