"""The rollout format: the bundled file against its own statistics, spans, and padding."""

import dataclasses
import io
import json
import zipfile

import numpy as np
import pytest

from dta_compile.data import bundled, load_rollouts, pad_batch, vocab_size
from dta_compile.errors import PlanError


@pytest.fixture(scope="module")
def statistics():
    return json.loads(bundled("airline_tiny.json").read_text())


def test_bundled_samples_have_the_recorded_statistics(statistics):
    rollouts = load_rollouts(bundled())
    lengths = [len(rollout) for rollout in rollouts]
    full = statistics["statistics"]["full"]
    assert len(rollouts) == full["n_sequences"]
    assert sum(lengths) == full["tokens"]
    assert (min(lengths), max(lengths)) == (full["min_len"], full["max_len"])
    assert len({rollout.tokens.tobytes() for rollout in rollouts if rollout.is_leaf}) == full["n_leaves"]
    assert len({rollout.group for rollout in rollouts}) == statistics["statistics"]["n_groups"]


def test_leaf_only_keeps_every_trained_token_of_a_trajectory(statistics):
    leaves = load_rollouts(bundled(), leaf_only=True)
    assert len(leaves) == statistics["statistics"]["leaf_only"]["n_sequences"]
    assert sum(len(leaf) for leaf in leaves) == statistics["statistics"]["leaf_only"]["tokens"]
    trained = {
        (rollout.trajectory, stop, rollout.tokens[:stop].tobytes())
        for rollout in load_rollouts(bundled())
        for _, stop in rollout.spans
    }
    kept = {(leaf.trajectory, stop, leaf.tokens[:stop].tobytes()) for leaf in leaves for _, stop in leaf.spans}
    assert kept == trained


def test_dense_ids_rename_tokens_one_to_one(statistics):
    assert vocab_size(bundled()) == statistics["vocab"]["dense_size"]
    assert vocab_size(bundled(), multiple=64) == statistics["vocab"]["dense_size_padded_64"]
    names: dict[int, int] = {}
    for raw, dense in zip(load_rollouts(bundled()), load_rollouts(bundled(), dense=True), strict=True):
        assert dense.tokens.dtype == np.int32
        assert int(dense.tokens.max()) < vocab_size(bundled())
        for token, name in zip(raw.tokens.tolist(), dense.tokens.tolist(), strict=True):
            assert names.setdefault(token, name) == name
    assert len(set(names.values())) == len(names)


def test_advantages_are_normalised_within_their_group():
    trajectories = {r.trajectory: r for r in load_rollouts(bundled())}.values()
    for group in {r.group for r in trajectories}:
        rewards = np.array([r.reward for r in trajectories if r.group == group])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        np.testing.assert_allclose([r.advantage for r in trajectories if r.group == group], expected, rtol=1e-5)


def test_max_length_leaves_longer_samples_out():
    everything = load_rollouts(bundled())
    short = load_rollouts(bundled(), max_length=800)
    assert [len(r) for r in short] == [len(r) for r in everything if len(r) <= 800]
    assert 0 < len(short) < len(everything)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_aligns_labels_masks_and_tokens(side):
    rollouts = load_rollouts(bundled(), dense=True)[:5]
    width = max(map(len, rollouts)) + 3
    batch = pad_batch(rollouts, length=width, padding_side=side)
    assert batch.input_ids.shape == batch.labels.shape == batch.loss_mask.shape == (5, width)
    for row, rollout in enumerate(rollouts):
        here = batch.attention_mask[row].astype(bool)
        assert here.argmax() == (0 if side == "right" else width - len(rollout))
        np.testing.assert_array_equal(batch.input_ids[row, here], rollout.tokens)
        np.testing.assert_array_equal(batch.labels[row, here][:-1], rollout.tokens[1:])
        np.testing.assert_array_equal(
            batch.labels[row, batch.loss_mask[row]], rollout.tokens[1:][rollout.loss_mask[1:]]
        )
        assert not batch.loss_mask[row, ~here].any()
        assert batch.advantages[row] == np.float32(rollout.advantage)


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_empty_rollout_is_a_row_of_padding(side):
    first = load_rollouts(bundled())[0]
    empty = dataclasses.replace(first, tokens=first.tokens[:0], spans=())
    batch = pad_batch([empty, first], padding_side=side)
    assert not batch.attention_mask[0].any() and not batch.loss_mask[0].any() and not batch.labels[0].any()
    assert batch.attention_mask[1].all()


def test_padding_refuses_what_it_cannot_do():
    rollouts = load_rollouts(bundled())[:2]
    with pytest.raises(PlanError, match="at most 10 tokens"):
        pad_batch(rollouts, length=10)
    with pytest.raises(PlanError, match="padding_side"):
        pad_batch(rollouts, padding_side="middle")
    assert pad_batch([]).input_ids.shape == (0, 0)


def test_other_files_are_named_in_the_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_rollouts(tmp_path / "missing.npz")
    text = tmp_path / "text.npz"
    text.write_text("no archive")
    with pytest.raises(PlanError, match=r"text\.npz"):
        load_rollouts(text)
    other = tmp_path / "other.npz"
    for arrays in ({"tokens": np.arange(3)}, {**np.load(bundled()), "rout\x00s": np.arange(3)}, {}):
        np.savez(other, **arrays)
        with pytest.raises(PlanError, match="suffix_tokens"):
            load_rollouts(other)


DAMAGES = {
    "suffix_tokens: integers in": lambda a: a["suffix_tokens"].__setitem__(5, 2**62),
    "suffix_tokens: 10267 integers": lambda a: a.update(suffix_tokens=a["suffix_tokens"].astype(float)),
    "suffix_offsets: ascends": lambda a: a["suffix_offsets"].__setitem__(2, 1),
    "suffix_offsets: integers in": lambda a: a["suffix_offsets"].__setitem__(1, -1),
    "suffix_offsets: a token at least": lambda a: (
        a["suffix_offsets"].__setitem__(1, 0),
        a["leaf_lcp"].__setitem__(1, 0),
        a["length"].__setitem__(a["leaf"] == 0, 0),
    ),
    "leaf_lcp: integers in": lambda a: a["leaf_lcp"].__setitem__(3, -1),
    "leaf_lcp: 0 for the first leaf": lambda a: a["leaf_lcp"].__setitem__(1, 2**40),
    "lexicographic": lambda a: a["suffix_tokens"].__setitem__(a["suffix_offsets"][1], 0),
    "length: at most": lambda a: a["length"].__setitem__(0, 2**31),
    "loss_ptr: ascends": lambda a: a["loss_ptr"].__setitem__(1, 3),
    "loss_ptr: 41 integers": lambda a: a.update(loss_ptr=a["loss_ptr"][:-1]),
    "loss_start: at most loss_end": lambda a: a["loss_start"].__setitem__(0, 2**31),
    "loss_end: at most the length": lambda a: a["loss_end"].__setitem__(0, 2**31),
    "leaf: one of 33 leaves": lambda a: a["leaf"].__setitem__(0, 33),
    "leaf: each leaf is a sample": lambda a: a.update(
        leaf=a["leaf"] * 0, length=a["length"] * 0, loss_start=a["loss_start"] * 0, loss_end=a["loss_end"] * 0
    ),
    "dense_vocab: has all": lambda a: a.update(dense_vocab=a["dense_vocab"][:-1]),
    "reward: finite numbers": lambda a: a["reward"].__setitem__(0, np.nan),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damaged_arrays_are_named_and_nothing_is_made_of_the_rest(said, tmp_path):
    with np.load(bundled()) as archive:
        arrays = {name: a.astype(np.int64) if a.dtype.kind == "i" else a for name, a in archive.items()}
    DAMAGES[said](arrays)
    np.savez(tmp_path / "damaged.npz", **arrays)
    with pytest.raises(PlanError, match=said) as refused:
        load_rollouts(tmp_path / "damaged.npz")
    assert refused.value.where.endswith("damaged.npz") and refused.value.got


def test_an_array_that_claims_more_than_the_file_has_is_not_allocated(tmp_path):
    path, header = tmp_path / "huge.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("suffix_tokens.npy", header.getvalue())
    with pytest.raises(PlanError, match="1000000000000000"):
        load_rollouts(path)


def test_every_byte_of_a_file_counts(tmp_path):
    content, path = bytearray(bundled().read_bytes()), tmp_path / "flipped.npz"
    expected = [rollout.tokens.tolist() for rollout in load_rollouts(bundled())]
    for at in range(4, len(content), len(content) // 40):
        content[at] ^= 255
        path.write_bytes(content)
        content[at] ^= 255
        try:
            found = load_rollouts(path)
        except PlanError:
            continue
        assert [rollout.tokens.tolist() for rollout in found] == expected


def test_a_file_may_have_routes_of_every_token(tmp_path):
    with np.load(bundled()) as archive:
        arrays = dict(archive)
    lengths = arrays["length"]
    path = tmp_path / "routed.npz"
    np.savez(path, **arrays, routes=np.arange(2 * lengths.sum()).reshape(-1, 1, 2))
    first, second, *_ = load_rollouts(path)
    assert first.routes[0].tolist() == [[0, 1]] and len(first.routes) == len(first)
    assert second.routes[0, 0, 0] == 2 * len(first) and len(second.routes) == len(second)
    assert load_rollouts(bundled())[0].routes is None
    np.savez(path, **arrays, routes=np.zeros((3, 2), np.int64))
    with pytest.raises(PlanError, match="routes of a rollout file do not fit"):
        load_rollouts(path)
