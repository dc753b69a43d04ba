"""What a page says of a plan: the same figures as the plan, its sequences, and all text unharmed."""

import dataclasses
import random

import numpy as np
import pytest

from dta_compile.errors import PlanError
from dta_compile.plan import Plan, Schedule, plan
from dta_compile.plan.interpret import interpret
from dta_compile.plan.peak_memory import bytes_by_op
from tests.support.pages import read_page
from tests.support.plans import peak_bytes

IN_GROUPS = plan([[1, 2], [1, 3]], sweep="stages", groups=2, strategy="packed", memory_budget=0)
SEQUENCES = [[5, 6, 7, 8], [5, 6, 7, 9, 10], [5, 6], [], [11], [5, 6, 7, 8]]


@pytest.fixture
def page_of(tmp_path):
    def write(made: Plan, **known):
        path = tmp_path / "plan.html"
        made.to_html(path, **known)
        return read_page(path)

    return write


def drawn_plans():
    chance = random.Random(3)
    known = {"chunk_size": 3, "bytes_per_token": 2, "kv_bytes_per_token": 1}
    return [
        plan(
            [[chance.randrange(3) for _ in range(chance.randrange(9))] for _ in range(12)],
            strategy=strategy,
            memory_budget=budget,
            **known,
        )
        for strategy in ("packed", "dfs", "vanilla", "dense")
        for budget in (None, 0, 60)
    ]


@pytest.mark.parametrize("made", drawn_plans(), ids=repr)
def test_sums_are_the_plans(made, page_of):
    page = page_of(made)
    columns, stats, tree = page.columns, made.stats, made.prefix_tree
    parent, stop = columns["parent"].astype(int), columns["stop"].astype(int)
    start = np.where(parent < 0, 0, stop[parent])
    assert (stop - start).sum() == stats.tree_tokens == len(columns["token"])
    assert columns["length"].sum() == stats.tokens
    times = np.diff(columns["forwardsStart"], append=stats.tree_tokens) * columns["forwardsValue"]
    assert times.sum() - stats.tree_tokens == stats.tokens_forwarded_twice
    assert max(columns["stack"], default=0) == stats.peak_stack_tokens
    assert max(columns["live"], default=0) == stats.peak_live_tokens
    assert max(columns["peakBytes"], default=0) == max(peak_bytes(tree, made.schedule, made.limits.footprint))
    ranges = (columns["rangeStop"].astype(int) - columns["rangeStart"]).sum()
    assert ranges == columns["partTokens"].sum(), "chunks and slices have as many tokens as their ranges"
    assert page.facts["stats"] == dataclasses.asdict(stats)


@pytest.mark.parametrize("made", [*drawn_plans(), IN_GROUPS], ids=repr)
def test_ops_are_as_printed_and_every_token_has_a_chunk(made, page_of):
    page = page_of(made)
    text = "\n".join([str(made.schedule).partition("\n")[0], *page.facts["ops"]])
    assert Schedule.parse(text) == dataclasses.replace(made.schedule, groups=())
    kinds = [page.facts["kinds"][kind] for kind in page.columns["kind"]]
    assert kinds == [line.split()[0] for line in page.facts["ops"]]
    assert (page.columns["ownerValue"] >= 0).all()


def test_levels_are_those_of_the_simulation():
    made = plan(SEQUENCES, chunk_size=2, memory_budget=30, bytes_per_token=10, kv_bytes_per_token=2)
    held = [event.held for event in interpret(made.prefix_tree, made.schedule)]
    live = list(bytes_by_op(made.prefix_tree, made.schedule, made.limits.footprint))
    assert len(held) == len(live) == made.stats.ops
    assert held[-1] == (0, 0, 0) and live[-1].kept == 0, "nothing is left in the end"
    assert max(level.live for level in held) == made.stats.peak_live_tokens
    assert all(level.kept <= level.peak for level in live)


def test_budget_and_bytes_are_there_if_they_are_known(page_of):
    known = page_of(plan(SEQUENCES, memory_budget=30, bytes_per_token=10))
    assert (known.facts["unit"], known.facts["budget"]) == ("bytes", 30)
    unknown = page_of(plan(SEQUENCES, memory_budget=0))
    assert (unknown.facts["unit"], unknown.facts["budget"]) == ("tokens", None)
    assert "peakBytes" not in unknown.columns


def test_sequences_are_found_again(page_of):
    """By the parents of the segment that each ends with, and the tokens of these."""
    page = page_of(plan(SEQUENCES))
    columns = page.columns
    ids = columns["vocabulary"][columns["token"]].astype(int).tolist()
    parent, stop = columns["parent"].tolist(), columns["stop"].tolist()
    sizes = [end - (stop[up] if up >= 0 else 0) for end, up in zip(stop, parent, strict=True)]
    first = np.cumsum([0, *sizes]).tolist()
    for sequence, node in zip(SEQUENCES, columns["endNode"].tolist(), strict=True):
        path = []
        while node >= 0:
            path = ids[first[node] : first[node + 1]] + path
            node = parent[node]
        assert path == sequence
    assert sorted(columns["order"].tolist()) == list(range(len(SEQUENCES)))


def test_rewards_and_loss(page_of):
    masks = [[(1, 3)], np.array([False, True, True, False, True]), (), [], [1.0], [0, 0, 0, 0]]
    page = page_of(plan(SEQUENCES), rewards=[0, 1, 0.5, 0, -1, 2], loss_masks=masks)
    assert page.columns["reward"].tolist() == [0, 1, 0.5, 0, -1, 2]
    runs = np.diff(page.columns["trainedStart"], append=7)
    # The tree's tokens are 5 6, 7, 8, 9 10, 11.
    assert np.repeat(page.columns["trainedValue"], runs).tolist() == [0, 2, 2, 0, 0, 1, 1]


WORDS = ["<|im_start|>", "<|im_end|>", "sys", "tem", "user", "assistant", "<think>", "</think>", "tool", " hm"]


class Template:
    def decode(self, ids):
        return "".join(WORDS[one] for one in ids)


def test_tokens_have_the_role_of_the_message_that_they_are_of(page_of):
    """From one segment to those after it, names of several tokens or in another segment, thinking in an answer."""
    prompt = [9, 0, 2, 3, 9, 1, 0, 4, 9, 1]
    sequences = [[*prompt, 0, 5, 6, 9, 7, 9, 1], [*prompt, 0, 8, 9, 9, 1]]
    page = page_of(plan(sequences), tokenizer=Template(), sequences=sequences)
    columns, tree = page.columns, plan(sequences).prefix_tree
    lengths = np.diff(columns["roleStart"], append=tree.num_rows)
    counts = dict.fromkeys(page.facts["roles"], 0)
    for role, count in zip(columns["roleValue"].astype(int), lengths.astype(int), strict=True):
        counts[page.facts["roles"][role]] += int(count)
    assert counts == {"other": 2, "system": 5, "user": 4, "tool": 4, "thinking": 2, "answer": 4}
    assert "roleStart" not in page_of(plan([[2, 99]]), tokenizer=Template(), sequences=[[2, 99]]).columns


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"rewards": [1, 2]}, "rewards are not one for every sequence"),
        ({"rewards": [0, 0, float("nan"), 0, 0, 0]}, "sequence 2"),
        ({"rewards": [0, "many", 0, 0, 0, 0]}, "rewards are not numbers"),
        ({"rewards": [0, 10**400, 0, 0, 0, 0]}, "rewards are not numbers"),
        ({"names": "abc"}, "6 of them"),
        ({"loss_masks": [[(0, 9)], (), (), (), (), ()]}, "0:4"),
        ({"loss_masks": [np.zeros(3, bool), (), (), (), (), ()]}, "4 booleans"),
        ({"sequences": [[1]] * 6}, "sequence 0"),
        ({"sequences": [[5, 6, 7, 8], [4, 6, 7, 9, 10], [5, 6], [], [11], [5, 6, 7, 8]]}, "are not the plan's"),
        ({"tokenizer": "gpt2"}, "decode"),
        ({"loss_masks": [[[0, 1], [0]], *[[]] * 5]}, "a loss mask does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(known, message, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text("before")
    with pytest.raises(PlanError, match=message):
        plan(SEQUENCES).to_html(path, **known)
    assert path.read_text() == "before"


def test_text_cannot_become_markup(page_of):
    names = ["</script><script>alert(1)</script>", "<!--", "日本 é 😀", "a\ud800b", "{{data}}", "\u2028"]
    title = "<b>{{d3}}</title></script>"
    page = page_of(plan(SEQUENCES), names=names, title=title)
    assert page.facts["names"] == [name.replace("\ud800", "?") for name in names]
    assert page.facts["title"] == title
    plain = page_of(plan(SEQUENCES), title="plain")
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]


def test_nothing_is_loaded(page_of):
    for tag, attributes in page_of(plan(SEQUENCES)).tags:
        assert not {"src", "href"} & attributes.keys(), tag


def test_a_plan_of_a_tree_knows_where_branches_part(page_of):
    tree = plan(SEQUENCES).prefix_tree
    page = page_of(plan(tree))
    assert "token" not in page.columns
    assert page.columns["fork"].reshape(-1, 2).tolist() == tree.forks.tolist()
    page = page_of(plan(tree), sequences=SEQUENCES)
    assert len(page.columns["token"]) == tree.num_rows


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [64, 2048])
def test_thousands_of_rollouts_without_any_order_fit_in_3_megabytes(chunk_size, tmp_path):
    """Random tokens do not compress; and small chunks make many operations, each with its text."""
    chance = np.random.default_rng(0)
    prompt = chance.integers(0, 150_000, 4000)
    lengths = chance.integers(500, 3000, 2500)
    sequences = [np.concatenate([prompt, chance.integers(0, 150_000, length)]) for length in lengths]
    path = tmp_path / "plan.html"
    plan(sequences, chunk_size=chunk_size).to_html(path, rewards=chance.normal(size=len(sequences)))
    assert path.stat().st_size < 3_000_000
    assert read_page(path).facts["ends"] >= 16


@pytest.mark.parametrize("sequences", [[], [[]], [[1]], [[2, 2]] * 3])
def test_small_plans(sequences, page_of):
    page = page_of(plan(sequences))
    assert len(page.columns["order"]) == len(sequences)


class Letters:
    def decode(self, ids):
        return "".join(chr(96 + number) for number in ids)


def test_an_image_is_one_unit_and_different_images_fork(page_of):
    """Two sequences begin with one image, the third with another of the same tokens."""
    sequences = [[1, 9, 9, 9, 2], [1, 9, 9, 9, 3, 9, 9], [1, 9, 9, 9, 2]]
    images = [[(1, 4, "x")], [(1, 4, "x"), (5, 7, "y")], [(1, 4, "z")]]
    made = plan(sequences, images=images)
    assert made.prefix_tree.num_rows == 1 + 3 + 1 + 3 + 3 + 1
    assert "images    4 in the sequences, 3 different, each encoded once" in str(made)
    page = page_of(made, tokenizer=Letters(), thumbnails={"y": b"\x89PNG...", "not there": b""})
    assert page.facts["thumbnails"] == {"2": "data:image/png;base64,iVBORy4uLg=="}
    for content in (b"<svg/>", None):
        with pytest.raises(PlanError, match=r"a thumbnail that a page cannot hold[\s\S]*image y"):
            page_of(made, tokenizer=Letters(), thumbnails={"y": content})
    texts = [page.facts["texts"][entry] for entry in page.columns["token"]]
    assert "".join(texts) == "a⟨image 1, 3 tokens⟩bc⟨image 2, 2 tokens⟩⟨image 3, 3 tokens⟩b"
    assert set(page.facts["texts"][:4]) == set("abci"), "texts of whole ids come first"
    assert plan(sequences).prefix_tree.num_rows == 8


@pytest.mark.parametrize(
    "images",
    [
        [[(1, 4, 0)]],
        [[], [], [(4, 6, 0)]],
        [[], [(3, 5, 0), (1, 4, 1)], []],
        [[], [(1, 4, [0])], []],
        [[], [(1.0, 4.0, 0)], []],
        [[], [(1, 4)], []],
        [[], None, []],
    ],
)
def test_images_that_do_not_fit_are_refused(images):
    with pytest.raises(PlanError, match="images do not fit"):
        plan([[1, 9, 9, 9, 2]] * 3, images=images)
