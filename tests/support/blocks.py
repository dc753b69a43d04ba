"""A model with blocks of tokens that attend to each other both ways, and batches of them.

check_transparent(BlockLM(), compiled, make([[1, 8, 8, 2], [1, 8, 8, 3]], "right"), Options(), "weights")
"""

import dataclasses
import itertools

import torch
from hypothesis import strategies as st

from tests.support.cases import Case, make_case
from tests.support.tiny import TinyLM

IMAGE = 8  # ids from here on are of images; a run of them is one
WINDOW = 3


def numbered(ids):
    """Number the runs of image tokens, -1 elsewhere, as transformers does."""
    is_image = ids >= IMAGE
    begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    return torch.where(is_image, begins.int().cumsum(1) - 1, -1)


class BlockLM(TinyLM):
    """`TinyLM` of three layers: with blocks, with blocks in a sliding window, and causal."""

    def __init__(self):
        super().__init__(layers=3)

    def masks(self, ids, mask):
        blocks, places = numbered(ids)[:, None], torch.arange(ids.shape[1])
        causal = (places[:, None] >= places).expand(len(ids), 1, -1, -1)
        near = places[:, None] - places < WINDOW
        both = causal | ((blocks[..., :, None] == blocks[..., None, :]) & (blocks[..., None] >= 0))
        return [pairs & (True if mask is None else mask[:, None, None]) for pairs in (both, near & both, causal)]

    def hidden(self, ids, mask=None):
        positions = torch.arange(ids.shape[1]) if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.embedding(ids) + self.position(positions)
        for block, pairs in zip(self.blocks, self.masks(ids, mask), strict=True):
            x = block(x, pairs)
        return self.norm(x)


@dataclasses.dataclass(frozen=True, repr=False)
class BlockCase(Case):
    """Batch whose rows share whole blocks."""

    @property
    def prefixes(self):
        found = set()
        for ids, mask in zip(self.ids, self.mask, strict=True):
            row, numbers = ids[mask].tolist(), numbered(ids[mask][None])[0].tolist()
            pairs = list(zip(row, numbers, strict=True))
            keys = [(t, *(token for token, other in pairs if other == n >= 0)) for t, n in pairs]
            found |= {tuple(keys[: i + 1]) for i in range(len(keys))}
        return found


def make(sequences, padding):
    case = make_case(sequences, padding)
    return BlockCase(**{field.name: getattr(case, field.name) for field in dataclasses.fields(case)})


@st.composite
def rollouts(draw):
    """Draw sequences grown from others, cut anywhere, also inside of blocks."""
    text, image = st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(IMAGE, IMAGE + 1), max_size=5)
    grown = st.lists(st.one_of(text, image), max_size=3).map(lambda parts: list(itertools.chain(*parts)))
    sequences = [draw(grown)]
    for _ in range(draw(st.integers(1, 7))):
        source = draw(st.sampled_from(sequences))
        sequences.append((source[: draw(st.integers(0, len(source)))] + draw(grown))[:30])
    return sequences


cases = st.builds(make, rollouts(), st.sampled_from(["right", "left", "none"]))
