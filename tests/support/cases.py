"""Drawn batches, options and losses for `TinyLM`, and the check of one training step against every row alone.

check_transparent(model, compiled, make_case(chain(9), "left"), Options(chunk_size=2), "entropy")
"""

import dataclasses

import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st

import dta_compile
from dta_compile.options import Options
from dta_compile.plan.verify import verify
from tests.support.inside import inside
from tests.support.tiny import after, assert_same, weights_like

QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """Batch: ids and mask of real tokens `[B, S]`, and whether the model gets the mask."""

    sequences: list[list[int]]
    ids: torch.Tensor
    mask: torch.Tensor
    padded: bool

    def __repr__(self):
        side = "left" if self.padded and bool(self.mask[:, -1].all()) else "right" if self.padded else "none"
        return f"Case({self.sequences}, padding {side})"

    @property
    def arguments(self):
        return (self.ids, self.mask) if self.padded else (self.ids,)

    @property
    def prefixes(self):
        return {tuple(sequence[: i + 1]) for sequence in self.sequences for i in range(len(sequence))}


def make_case(sequences, padding):
    longest = max(2, *map(len, sequences))
    if padding == "none":
        sequences = [(sequence + [0] * longest)[:longest] for sequence in sequences]
    elif not any(sequences):
        sequences = [*sequences[:-1], [1]]
    ids, mask = torch.zeros(len(sequences), longest, dtype=torch.int64), torch.zeros(len(sequences), longest).bool()
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence) if padding == "left" else 0
        ids[row, start : start + len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, start : start + len(sequence)] = True
    return Case(sequences, ids, mask, padding != "none")


@st.composite
def rollouts(draw):
    """Draw sequences grown from others: cut anywhere (empty rows, prefixes, duplicates, forks), then extended."""
    tokens = st.integers(0, 3)
    sequences = [draw(st.lists(tokens, min_size=1, max_size=12))]
    for _ in range(draw(st.integers(1, 8))):
        source = draw(st.sampled_from(sequences))
        length = draw(st.sampled_from([0, 1, len(source) - 1, len(source), draw(st.integers(0, len(source)))]))
        sequences.append((source[: max(length, 0)] + draw(st.lists(tokens, max_size=4)))[:24])
    return sequences


def chain(length):
    return [[i % 5 for i in range(stop)] for stop in range(length, 0, -1)]


def fan(width):
    return [[1, 2, 3, *divmod(i, 7)] for i in range(width)]


cases = st.builds(make_case, rollouts(), st.sampled_from(["right", "left", "none"]))
options = st.builds(
    Options,
    chunk_size=st.sampled_from([1, 2, 3, 5, 7, 10_000]),
    strategy=st.sampled_from(["packed", "packed", "packed", "vanilla", "dfs", "dense", "auto"]),
    order=st.sampled_from(["backward_dfs", "lexicographic", "random"]),
    sweep=st.sampled_from(["auto", "chunks", "stages"]),
    memory_budget=st.none() | st.just(0) | st.integers(1_000, 150_000),
)


def group(logits, mask):
    """Deviate from the mean of a group, which alone has a gradient of zero for biases if rows are of one length."""
    sums = logits.sum((1, 2))
    return (sums - sums.mean()).pow(2).mean().add(1).sqrt() + (logits * weights_like(logits)).mean()


# Losses of logits `[B, S, V]`, which are zero at padding; the last two mix sequences.
LOSSES = {
    "weights": lambda logits, mask: (logits * weights_like(logits)).sum(),
    "a third": lambda logits, mask: (logits[:, ::3] * weights_like(logits)[:, ::3]).sum(),
    "one token": lambda logits, mask: logits.flatten()[int(mask.flatten().long().argmax()) * logits.shape[-1] + 3],
    "entropy": lambda logits, mask: (torch.where(mask, (logits.softmax(-1) * logits).sum(-1), 0.0)).mean(),
    "group": group,
    "pairs": lambda logits, mask: (logits.flatten(1) @ logits.flatten(1).T).tanh().sum(),
}


def with_options(compiled, chosen):
    """Set options, which affect only plans, so that one compilation serves all of them."""
    inside(compiled).use(chosen)
    return compiled


def reference(model, case):
    """Compute the logits `[B, S, V]` of every row alone and unpadded; zero at padding."""
    rows = []
    for ids, mask in zip(case.ids, case.mask, strict=True):
        row = torch.zeros(*ids.shape, 31, dtype=torch.float64)
        rows.append(row.masked_scatter(mask[:, None], model(ids[mask][None])) if mask.any() else row)
    return torch.stack(rows)


def check_plan(compiled, case, chosen, mode):
    plan = dta_compile.last_plan(compiled)
    verify(plan.prefix_tree, plan.schedule)
    assert plan.schedule.mode == mode and plan.stats.tokens == int(case.mask.sum())
    assert str(plan) and type(plan.schedule).parse(str(plan.schedule)) == plan.schedule
    if chosen.strategy != "auto":
        assert plan.schedule.strategy == chosen.strategy
    shared = len(case.prefixes)
    assert plan.stats.tree_tokens == (plan.stats.tokens if plan.schedule.strategy == "dense" else shared)


def check_transparent(model, compiled, case, chosen, loss):
    def step(logits):
        value = LOSSES[loss](torch.where(case.mask[..., None], logits, 0.0), case.mask)
        value.backward()
        return value.detach(), torch.where(case.mask[..., None], logits, 0.0).detach()

    if not inside(compiled).engines:  # with the options still those of torch.compile
        compiled(torch.zeros(3, 5, dtype=torch.int64)), compiled(case.ids, case.mask)
    known = None
    while known != inside(compiled).engines:  # again where a graph was compiled, with the options of `torch.compile`
        known = inside(with_options(compiled, chosen)).engines
        actual = after(model, lambda: step(compiled(*case.arguments)))
    check_plan(compiled, case, chosen, "transparent")
    assert_same(actual, after(model, lambda: step(reference(model, case))))


def check_streaming(model, compiled, case, chosen):
    """A streaming step equals the reference: losses of every row and gradients of all parameters."""
    weights = weights_like(torch.zeros(*case.ids.shape, 31, dtype=torch.float64))

    def loss_of_row(row, logits):
        return (torch.where(case.mask[row, :, None], logits.log_softmax(-1), 0.0) * weights[row]).sum()

    def eager():
        losses = [loss_of_row(row, logits) for row, logits in enumerate(reference(model, case))]
        sum(losses).backward()
        return [loss.detach() for loss in losses]

    dta_compile.streaming_step(compiled, lambda row, logits: logits.sum() * 0, torch.zeros(3, 5, dtype=torch.int64))
    with_options(compiled, chosen)
    actual = after(model, lambda: dta_compile.streaming_step(compiled, loss_of_row, *case.arguments))
    check_plan(compiled, case, chosen, "streaming")
    assert_same(actual, after(model, eager))
