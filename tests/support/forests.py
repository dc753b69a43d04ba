"""Forests of runs of tokens, as recurrences go over them."""

from dta_compile.plan.tree.segments import Segment


def segment(first, tokens, parents, parent=-1, above=0):
    """`tokens` tokens from `first` on, below the first `above` ones of segment `parent`."""
    return Segment(first, first + tokens, first + tokens, parents[parent].depth + above if parent >= 0 else 7, parent)


def draw_forest(rng, count, longest):
    """Segments in the order of a walk down the forest."""
    found, path, first = [], [], 0
    for number in range(count):
        tokens = rng.choice([1, rng.randint(1, longest)])
        parent = rng.choice([-1, *path])
        path = path[: path.index(parent) + 1] if parent >= 0 else []
        length = found[parent].last - found[parent].first if found else 0
        above = rng.choice([1, length, rng.randint(1, max(length, 1))])
        found.append(segment(first, tokens, found, parent, above))
        path.append(number)
        first += tokens
    return found
