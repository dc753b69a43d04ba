"""Sequences with units: tokens that only come together."""

import itertools

import numpy as np


def with_units(sequences, least):
    """Take runs of tokens from `least` on for units; return the keys of all tokens, and the units of each sequence."""
    known, keys, units = {}, [], []
    for sequence in sequences:
        runs = [tuple(run) for _, run in itertools.groupby(sequence, lambda token: token >= least)]
        contents = [run if run[0] >= least else () for run in runs]
        keys.append(
            [
                known.setdefault((token, content), len(known))
                for run, content in zip(runs, contents, strict=True)
                for token in run
            ]
        )
        stops = list(itertools.accumulate(map(len, runs)))
        pairs = [(stop - len(content), stop) for stop, content in zip(stops, contents, strict=True) if len(content) > 1]
        units.append(np.array(pairs, np.int64).reshape(-1, 2))
    return keys, units
