"""Plans: the prefix tree of a batch, the verified schedule over it, and the figures that show whether sharing pays.

`plan` is the public entry point, without a model; the runtime calls `make_plan` for every call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from dta_compile.errors import OptionError, PlanError
from dta_compile.files import write_output
from dta_compile.options import MOST_BYTES, Options, as_integer
from dta_compile.plan.choice import Candidates
from dta_compile.plan.cost import BY_STAGES, Limits, chunk_sizes
from dta_compile.plan.division.pieces import Dealing
from dta_compile.plan.one_tree import LATENCY, NVLINK, deal_out, exchange_seconds, schedule_of
from dta_compile.plan.peak_memory import Footprint, PartBytes
from dta_compile.plan.schedule import Schedule
from dta_compile.plan.simulate import Simulation, causal_pairs, simulate
from dta_compile.plan.summary import Estimates, Stats, scalars, summarize
from dta_compile.plan.timeline import processes, tree_as_speedscope
from dta_compile.plan.tree.lexicographic import each
from dta_compile.plan.tree.prefix_tree import PrefixTree
from dta_compile.plan.tree.split_prefixes import Images, SplitPrefixes, with_keys
from dta_compile.plan.verify import check
from dta_compile.trace_files import Process, as_chrome_trace

ONE_TREE_MODES = ("score", "transparent")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Verified plan; `print(plan)` shows a summary, `print(plan.schedule)` the ops.

    Attributes:
        prefix_tree: the tree that is run; an unshared one if the strategy is dense.
        schedule: the ops, verified against the tree.
        simulation: counts of the schedule.
        options: the options as given; the strategy that "auto" chose is `schedule.strategy`.
        explain: returns why this strategy was chosen, in words (see `reason`).
        estimates: predicted and measured time and memory.
        segments: `(row, segment)` of every sequence if rows of the batch are packed; None: sequence i is row i.
        split: keys that split prefixes of equal tokens; None: there are none.
        limits: what the planner knew of the model and the machine: memory, rates, bytes of a token.
        sequences: token ids of every sequence, if known (a compiled call does not keep them).
        images: images of every sequence, if known (a compiled call only counts them, in `estimates.notes`).
        dealing: pieces of the tree by rank; the schedule runs those of `rank`. None: it runs the whole tree.
    """

    prefix_tree: PrefixTree
    schedule: Schedule
    simulation: Simulation
    options: Options
    explain: Callable[[], str]
    estimates: Estimates
    segments: Sequence[tuple[int, int]] | None = None
    split: SplitPrefixes | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    sequences: Sequence[Any] | None = None
    images: Images | None = None
    dealing: Dealing | None = None
    rank: int = 0
    # Draws the page of `to_html`: `views.page_data.picture`, lent by `dta_compile/__init__.py`, as views know plans.
    picture: ClassVar[Callable[..., str]]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, with the reason in words: what explains it refers to other plans."""
        return {**self.__dict__, "explain": partial(str, self.reason)}

    @cached_property
    def reason(self) -> str:
        """Why this strategy was chosen; computed when it is read."""
        return self.explain()

    @cached_property
    def tokens_lost(self) -> dict[str, int]:
        """Extra tokens that are run because keys other than token ids split prefixes, by name of the keys.

        Replayed routes of experts are such a key: a token with two recorded routes is run twice.
        """
        return self.split.tokens() if self.split else {}

    @cached_property
    def tree(self) -> Any:
        """Prefix tree as a `networkx.DiGraph` (see `PrefixTree.graph`)."""
        return self.prefix_tree.graph()

    @cached_property
    def stats(self) -> Stats:
        """Figures of the tree and the schedule."""
        tree, simulation = self.prefix_tree, self.simulation
        tokens = int(tree.lengths.sum())
        tree_pairs = causal_pairs(tree.stop) - causal_pairs(tree.start)
        return Stats(
            sequences=len(tree.lengths),
            tokens=tokens,
            tree_tokens=tree.num_rows,
            compression=_ratio(tokens, tree.num_rows),
            leaf_compression=_ratio(int(tree.stop[tree.leaves].sum()), tree.num_rows),
            attention_compression=_ratio(causal_pairs(tree.lengths), tree_pairs),
            leaves=len(tree.leaves),
            longest_path=int(tree.stop.max(initial=0)),
            ops=simulation.ops,
            launches=simulation.launches,
            tokens_forwarded_twice=simulation.recomputed_tokens,
            **simulation.peaks,
        )

    @property
    def keeps(self) -> bool:
        """Whether activations of more than one chunk are kept from forward to backward."""
        return self.schedule.keeps

    def to_html(
        self,
        path: str | PathLike[str],
        *,
        sequences: Iterable[Any] | None = None,
        tokenizer: Any = None,
        rewards: Iterable[float] | None = None,
        loss_masks: Iterable[Any] | None = None,
        names: Iterable[str] | None = None,
        images: Iterable[Any] | None = None,
        thumbnails: Mapping[Hashable, bytes | PathLike[str]] | None = None,
        losses: Any = None,
        device: tuple[str, float, float] | None = None,
        title: str = "dta plan",
    ) -> None:
        """Write the plan as one HTML file that opens from disk and needs no network.

        The page links the tree, the schedule, and the tokens and bytes held. One tree over ranks is coloured by the
        rank that runs a token; the schedule is that of this plan's rank. For huge plans it has only the first and last
        tokens of each segment, and says so.

        Args:
            path: the file to write.
            sequences: token ids of every sequence, as planned; by default `self.sequences`.
            tokenizer: decodes tokens to text: anything with `decode(list[int]) -> str`, such as a tokenizer of
                transformers or a `tokenizers.Tokenizer`.
            rewards: a number for every sequence, to colour by.
            loss_masks: for every sequence the tokens that are trained on, to colour by: a mask `[n]` of booleans or of
                zeros and ones, or half-open ranges `(start, stop)` such as `Rollout.spans`.
            names: name of every sequence; by default s0, s1, ...
            images: for every sequence, `(start, stop, image)` of the tokens of each image, as in `plan`; with a
                tokenizer, each is shown as one unit. By default `self.images`.
            thumbnails: by `image`, a small picture to show it by: the path of a PNG, JPEG, GIF or WebP file of at most
                128 KiB, or its content. With `tokenizer`, as parts of the text.
            losses: what `dta_compile.divergence.find_losses` found in the sequences, to show as a table and a colour.
            device: name and bytes of a device, and the peak bytes predicted for a step: bytes are then drawn on top of
                what a step holds besides them, and beneath the device's.
            title: title of the page.

        Raises:
            PlanError: an argument does not fit the plan's sequences, or the tokenizer cannot decode.
            OSError: the file cannot be written.
        """
        ids = self.sequences if sequences is None else sequences
        pictures = Images.of(images) if images else self.images
        known = ids, tokenizer, rewards, loss_masks, names, pictures, thumbnails, losses, device
        write_output(path, self.picture(title, *known))

    def scalars(self) -> dict[str, float]:
        """Return the figures as numbers by flat names such as `dta/compression`, for TensorBoard, wandb and the like.

        For a compiled call, seconds and throughput are included once it was measured (`last_plan` waits for that).
        """
        return scalars(self.stats, self.estimates, self.dealing, self.rank)

    def trace_processes(self, rank: int | None = None, epoch: float | None = None) -> list[Process]:
        """Return one rank's part of `to_chrome_trace`, timed from `epoch` (seconds since 1970) or its own start."""
        rank = self.rank if rank is None or self.dealing is not None else rank
        planned = self.prefix_tree, self.schedule, self.limits, self.estimates
        return processes(*planned, rank, epoch, self.dealing)

    def to_chrome_trace(self, path: str | PathLike[str], rank: int | None = None) -> None:
        """Write the schedule's timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

        Contains the timeline that the cost model predicts and, after a run, the measured one: a track per stream, and
        curves of the tokens on the stack, with live graphs and with only KV kept, and of bytes where they are known.
        `dta_compile.distributed.to_chrome_trace` writes the traces of all ranks into one file.

        Args:
            path: the file to write.
            rank: rank that the tracks are named after; by default the plan's own, as always for one tree over ranks.

        Raises:
            OSError: the file cannot be written.
        """
        write_output(path, as_chrome_trace(self.trace_processes(rank), self.scalars()))

    def to_speedscope(self, path: str | PathLike[str]) -> None:
        """Write the prefix tree as a flame graph for https://www.speedscope.app, weighted by tokens.

        It has two profiles: tokens of the tree, and tokens of all sequences.

        Raises:
            OSError: the file cannot be written.
        """
        write_output(path, tree_as_speedscope(self.prefix_tree, "dta prefix tree"))

    def __str__(self) -> str:
        facts = self.stats, self.prefix_tree, self.schedule, self.reason, self.estimates
        return summarize(*facts, self.segments, self.tokens_lost, self.images, self.dealing, self.rank)

    def __repr__(self) -> str:
        sequences, ops = len(self.prefix_tree.lengths), len(self.schedule.ops)
        return f"<Plan {self.schedule.strategy}: {sequences} sequences, {ops} ops>"


def make_plan(
    sequences: Iterable[Any] | PrefixTree,
    options: Options,
    *,
    mode: str = "transparent",
    limits: Limits | None = None,
    segments: Sequence[tuple[int, int]] | None = None,
    split: SplitPrefixes | None = None,
) -> Plan:
    """Plan a batch: build its tree, choose strategy and schedule, and verify the schedule.

    Args:
        sequences: 1-D integer sequences (see `PrefixTree.build`), or their tree.
        mode: see `build_schedule`.
        limits: properties of the model and the machine, as far as known.
        segments, split: see `Plan`.

    Raises:
        PlanError: a sequence that is not a run of integers, or an unknown mode.
    """
    shared = sequences if isinstance(sequences, PrefixTree) else PrefixTree.build(sequences)
    limits = limits or Limits()
    chosen, explain = Candidates(shared, options, mode, limits).choose()
    tree, schedule, simulation = chosen.tree, chosen.schedule, chosen.simulation
    check(tree, schedule, limits.footprint.has_states)
    head_starts = limits.head_starts
    if tree is not shared:  # its head rows were estimated
        head_starts, simulation = None, simulate(tree, schedule)
    estimates = Estimates(limits.cost.estimate(simulation), limits.cost.source)
    limits = dataclasses.replace(limits, head_starts=head_starts)
    return Plan(tree, schedule, simulation, options, explain, estimates, segments, split, limits)


def plan_one_tree(
    tree: PrefixTree,
    options: Options,
    limits: Limits,
    mode: str,
    rank: int,
    ranks: int,
    link: float = math.inf,
    latency: float = LATENCY,
) -> Plan:
    """Plan one tree over ranks: deal its pieces out, and verify the schedule of one rank.

    Args:
        tree: tree of the sequences of all ranks.
        limits: as in `make_plan`, the same on all ranks; `head_starts` of this tree.
        link, latency: bytes a second that a rank receives from others, and seconds of a message.
    """
    dealing, kept = deal_out(tree, options, limits, mode, ranks)

    def of_rank(number: int) -> tuple[Schedule, Simulation]:
        schedule = schedule_of(dealing, number, options, mode, len(limits.parts), kept)
        counts = simulate(tree, schedule, limits.head_starts)
        recomputed = counts.forward.tokens - dealing.tokens[number]
        return schedule, dataclasses.replace(
            counts, recomputed_tokens=recomputed, peak_stack_tokens=dealing.held[number]
        )

    schedule, simulation = of_rank(rank)
    check(tree, schedule, limits.footprint.has_states, dealing, rank)
    of_slowest, counts = of_rank(int(np.argmax(dealing.costs)))
    exchange = exchange_seconds(dealing, of_slowest, limits, link, latency)
    estimates = Estimates(limits.cost.estimate(counts) + exchange, limits.cost.source)

    def explain() -> str:
        seconds = f"{estimates.seconds:.3g} s by estimated cost ({limits.cost.source})"
        return f"one tree over {ranks} ranks, {seconds}, {exchange:.2g} s of it for what they exchange"

    return Plan(tree, schedule, simulation, options, explain, estimates, limits=limits, dealing=dealing, rank=rank)


def plan(
    sequences: Iterable[Any] | PrefixTree,
    *,
    mode: str = "transparent",
    ranks: int | None = None,
    rank: int = 0,
    link: float = NVLINK,
    bytes_per_token: float | None = None,
    kv_bytes_per_token: float = 0.0,
    state_bytes: float = 0.0,
    routes: Iterable[Any] | None = None,
    images: Iterable[Any] | None = None,
    **options: Any,
) -> Plan:
    """Plan a batch, without a model and without torch.

    With `ranks` the sequences, those of all ranks, run as one tree that is dealt out over the ranks, as compiled calls
    do by `options={"mesh": ...}` (see `Dealing`). The plan is that of one rank, and `dealing` says what the others run.
    `balance` divides sequences instead, so that every rank runs a tree of its own.

    Args:
        sequences: token ids of every sequence: 1-D arrays, lists or tensors of integers; or a `PrefixTree`.
        mode: "score", "transparent" or "streaming" (see `build_schedule`).
        ranks: number of ranks that run one tree; None: the batch is planned for one device.
        rank: rank whose schedule is returned, counted from 0.
        link: bytes a second that a rank receives from others, for the estimate; by default, NVLink of an H100 node.
            What ranks exchange takes `kv_bytes_per_token`.
        bytes_per_token: bytes of activations that the graph keeps for one token; a `memory_budget` is spent on them.
        kv_bytes_per_token: bytes of keys and values of one token, all layers; 0: KV is not kept without its graph.
        state_bytes: bytes of the running states of the recurrent layers at one depth; 0: the model has none.
        routes: for every sequence, integers `[n, ...]` that were recorded for its tokens and are replayed, such as the
            experts of every layer. Tokens are shared only where they are equal.
        images: for every sequence, `(start, stop, image)` of the placeholder tokens of each image (or another medium).
            Equal images have an equal `image`, which may be a number, a hash or a path; only these share tokens.
        options: as in `torch.compile(..., options={...})` (see `Options`). Without a `memory_budget` all graphs are
            kept from forward to backward. Without a `chunk_size`, `ranks` run pieces of up to 65,536 tokens.

    Raises:
        OptionError: an unknown option, a bad value, or one that does not fit one tree over ranks.
        PlanError: a sequence that is not a run of integers, routes or images that do not fit, or an unknown mode.
    """
    if ranks is not None and "mesh" in options:
        raise OptionError("ranks and a mesh", expected="plan(..., ranks=8) alone", got=f"mesh={options['mesh']!r}"[:80])
    parsed = Options.parse(options if ranks is None else {**options, "mesh": _ranks(ranks, rank, mode)})
    if ranks is None and (parsed.is_over_ranks or rank):
        raise OptionError("one tree over how many ranks?", expected="plan(..., ranks=8)", got="no number of ranks")
    sizes = {"bytes_per_token": bytes_per_token or 0, "kv_bytes_per_token": kv_bytes_per_token}
    for name, value in {**sizes, "state_bytes": state_bytes, "link": link}.items():
        is_number = isinstance(value, (int, float)) and 0 <= value <= MOST_BYTES
        if not is_number or (name == "link" and value == 0):
            least = "more than 0, up to" if name == "link" else "from 0 to"
            raise OptionError(f"bad value for {name}", expected=f"a number {least} {MOST_BYTES}", got=str(value)[:80])
    if parsed.memory_budget and not bytes_per_token:
        raise OptionError(
            "memory_budget is in bytes, and a plan counts tokens",
            expected="bytes_per_token > 0, or a memory_budget of None (keep all) or 0 (keep nothing)",
            got=f"memory_budget={parsed.memory_budget}, bytes_per_token={bytes_per_token}",
        )
    footprint = Footprint(graph_token=bytes_per_token or 1.0, kv_token=kv_bytes_per_token, state=state_bytes)
    limits, split = Limits(parsed.memory_budget, footprint), None
    ids = None if isinstance(sequences, PrefixTree) else each(sequences)
    tree: Iterable[Any] | PrefixTree = sequences if ids is None else ids
    numbered = None if images is None else Images.of(images)
    if routes is not None or numbered is not None:
        tree, split = with_keys(tree, routes, numbered)
    if ranks is None:
        planned = make_plan(tree, parsed, mode=mode, limits=limits, split=split)
    else:
        budget = math.inf if parsed.memory_budget is None else parsed.memory_budget
        allowed = chunk_sizes(budget, footprint.graph_token, BY_STAGES)
        limits = dataclasses.replace(limits, parts=(PartBytes(footprint),), chunk_sizes=allowed)
        shared = tree if isinstance(tree, PrefixTree) else PrefixTree.build(tree)
        planned = plan_one_tree(shared, parsed, limits, mode, int(rank), int(ranks), link)
    return dataclasses.replace(planned, sequences=ids, images=numbered, split=split)


def _ranks(ranks: object, rank: object, mode: str) -> tuple[int, ...]:
    """Return the numbers of the ranks of one tree.

    Raises:
        PlanError: `ranks` is no positive integer, `rank` is out of range, or each rank runs its own tree in this mode.
    """
    count, number = as_integer(ranks), as_integer(rank)
    if count is None or count < 1:
        raise PlanError("cannot plan one tree over this number of ranks", expected="an integer >= 1", got=repr(ranks))
    if number is None or not 0 <= number < count:
        raise PlanError("rank is out of range", expected=f"an integer from 0 to {count - 1}", got=repr(rank))
    if mode not in ONE_TREE_MODES:
        raise PlanError("one tree over ranks has no such mode", expected=", ".join(ONE_TREE_MODES), got=repr(mode))
    return tuple(range(count))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 1.0
