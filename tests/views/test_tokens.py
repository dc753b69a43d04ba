"""The tokens that fit in a page, and their texts."""

import numpy as np
import pytest

from dta_compile.errors import PlanError
from dta_compile.views.page import decoder, tokens_in

PLENTY = 10**6


class Bytes:
    """A token is a byte, and 256 one that nobody knows."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


class WordsWithSpaces:
    """Words that begin with a space, which is left out at the beginning of a text."""

    words = ("<s>", " one", " two")

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.words[i] for i in ids if i or not skip_special_tokens).removeprefix(" ")


def texts(found):
    return [found.texts[entry] for entry in found.entries]


def test_all_tokens_if_they_fit():
    rows = np.array([7, 7, 9, 7, 12345678901])
    found = tokens_in(rows, np.array([2, 3]), None, PLENTY)
    assert found.ends is None and found.texts == ()
    assert found.ids[found.entries].tolist() == rows.tolist()
    assert found.ids[0] == 7, "the most frequent first"


def test_else_the_ends_of_segments():
    chance = np.random.default_rng(0)
    lengths = np.array([3000, 5, 0, 2000, 1])
    rows = chance.integers(0, 2**17, lengths.sum())
    found = tokens_in(rows, lengths, None, most=2000)
    assert 1 <= found.ends < 512
    firsts = np.cumsum(lengths) - lengths
    segments = [rows[first : first + length] for first, length in zip(firsts, lengths, strict=True)]
    cut = [one if len(one) <= 2 * found.ends else [*one[: found.ends], *one[-found.ends :]] for one in segments]
    assert found.ids[found.entries].tolist() == np.concatenate(cut).tolist()


@pytest.mark.parametrize("most", [0, 1])
def test_one_token_at_either_end_is_always_there(most):
    found = tokens_in(np.arange(100), np.array([100]), None, most)
    assert found.ids[found.entries].tolist() == [0, 99]


def test_characters_of_several_tokens_are_read_together():
    text = "a日本é😀\x00z"
    rows = np.array([*text.encode()])
    found = tokens_in(rows, np.array([len(rows)]), decoder(Bytes()), PLENTY)
    assert "".join(texts(found)) == text
    assert found.ids[found.entries].tolist() == rows.tolist()
    assert texts(found)[1:4] == ["日", "", ""], "a character is with the first of its tokens"


def test_characters_do_not_reach_into_another_segment():
    rows = np.array([*"é".encode()])
    assert texts(tokens_in(rows, np.array([1, 1]), decoder(Bytes()), PLENTY)) == ["\ufffd", "\ufffd"]


def test_spaces_before_words_and_special_tokens_stay():
    found = tokens_in(np.array([0, 1, 2, 2, 1]), np.array([5]), decoder(WordsWithSpaces()), PLENTY)
    assert "".join(texts(found)) == "<s> one two two one"


def test_ids_that_a_tokenizer_does_not_know_have_no_text():
    assert texts(tokens_in(np.array([97, 256, 98]), np.array([3]), decoder(Bytes()), PLENTY)) == ["a", "", "b"]


def test_no_tokenizer():
    with pytest.raises(PlanError, match=r"expected: .*decode\(list\[int\]\)"):
        decoder(["a", "b"])


def test_no_tokens():
    found = tokens_in(np.zeros(0, np.int64), np.zeros(0, np.int64), decoder(Bytes()), PLENTY)
    assert len(found.entries) == len(found.ids) == 0


def test_a_tokenizer_of_the_tokenizers_package():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|end|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the cat and the dog"], trainer)
    ids = np.array([*tokenizer.encode("the 猫 and the 🐶").ids, tokenizer.token_to_id("<|end|>")])
    found = tokens_in(ids, np.array([len(ids)]), decoder(tokenizer), PLENTY)
    assert "".join(texts(found)) == "the 猫 and the 🐶<|end|>"
