"""Forests of token segments, the input of recurrences."""

from dta_compile.plan.tree.segments import Segment


def segment(first, tokens, parents, parent=-1, above=0):
    """Return a segment of `tokens` tokens from `first` on, below the first `above` tokens of segment `parent`."""
    return Segment(first, first + tokens, first + tokens, parents[parent].depth + above if parent >= 0 else 7, parent)


def draw_forest(rng, count, longest):
    """Draw segments in depth-first order."""
    segments, path, first = [], [], 0
    for number in range(count):
        tokens = rng.choice([1, rng.randint(1, longest)])
        parent = rng.choice([-1, *path])
        path = path[: path.index(parent) + 1] if parent >= 0 else []
        length = segments[parent].last - segments[parent].first if segments else 0
        above = rng.choice([1, length, rng.randint(1, max(length, 1))])
        segments.append(segment(first, tokens, segments, parent, above))
        path.append(number)
        first += tokens
    return segments
