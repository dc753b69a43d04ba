"""Options are checked at once, and errors say what, where, expected, got and what to do."""

import numpy as np
import pytest
import torch

from dta_compile.errors import DTAError, OptionError, PlanError, RefusalError
from dta_compile.options import CHOICES, Options


def test_defaults():
    options = Options.parse(None)
    assert options == Options.parse({}) == Options()
    assert options.chunk_size is None and options.chunk_tokens == 2048
    assert (options.strategy, options.order, options.verify) == ("auto", "backward_dfs", "auto")
    assert options.memory_budget is None
    assert (options.fallback, options.codegen) == ("raise", "auto")


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in CHOICES.items() for value in values])
def test_every_documented_choice_is_accepted(key, value):
    assert getattr(Options.parse({key: value}), key) == value


@pytest.mark.parametrize(
    ("typo", "meant"), [("chunksize", "chunk_size"), ("stratgy", "strategy"), ("memory_budge", "memory_budget")]
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(typo, meant):
    with pytest.raises(OptionError, match=f"(?s)unknown option '{typo}'.*did you mean '{meant}'"):
        Options.parse({typo: 1})


@pytest.mark.parametrize("word", ["seed", "mode", "trace", "retention"])
def test_another_word_of_like_letters_is_no_suggestion(word):
    with pytest.raises(OptionError) as raised:
        Options.parse({word: 1})
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", -1),
        ("chunk_size", 2.0),
        ("chunk_size", "2048"),
        ("chunk_size", True),
        ("chunk_size", np.bool_(True)),
        ("chunk_size", np.float64(2048)),
        ("cuda_graphs", 1),
        ("cuda_graphs", np.int64(1)),
        ("memory_budget", -1),
        ("memory_budget", 1.5),
        ("memory_budget", "much"),
        ("memory_budget", "8 apples"),
        ("memory_budget", "-1GB"),
        ("strategy", "fastest"),
        ("strategy", None),
        ("order", 3),
        ("order", ["random"]),
        ("verify", True),
        ("fallback", "eager"),
        ("codegen", "triton"),
        ("codegen", None),
    ],
)
def test_a_bad_value_is_named_with_its_key(key, value):
    with pytest.raises(OptionError) as raised:
        Options.parse({key: value})
    assert repr(key) in str(raised.value)
    assert repr(value) in str(raised.value)
    assert raised.value.expected


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path):
    given = {"chunk_size": np.int64(7), "memory_budget": np.array(9), "cuda_graphs": np.bool_(False)}
    parsed = Options.parse(given | {"cache_dir": tmp_path})
    assert parsed == Options(chunk_size=7, memory_budget=9, cuda_graphs=False, cache_dir=str(tmp_path))
    assert type(parsed.chunk_size) is int and type(parsed.memory_budget) is int and parsed.cuda_graphs is False
    assert Options(chunk_size=torch.tensor(7)).chunk_size == 7


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("1.5 GiB", 3 * 2**29), ("4096", 4096), ("0", 0), ("0.3kb", 300)]
)
def test_sizes_are_numbers_or_text(text, size):
    assert Options.parse({"memory_budget": text}).memory_budget == size


@pytest.mark.parametrize("key", ["zebra", "learning_rate"])
def test_what_is_like_no_option_is_not_compared_with_one(key):
    with pytest.raises(OptionError) as raised:
        Options.parse({key: 1})
    assert raised.value.hint == ""


def test_options_are_refused_before_anything_is_traced():
    def function(ids):
        raise AssertionError("traced")

    torch._dynamo.reset()
    with pytest.raises(OptionError) as raised:
        torch.compile(function, backend="dta", options={"chunksize": 8})(torch.ones(2, 3))
    assert str(raised.value).endswith("did you mean 'chunk_size'?")


def test_a_near_value_is_suggested():
    with pytest.raises(OptionError, match="did you mean 'lexicographic'"):
        Options.parse({"order": "lexicografic"})


@pytest.mark.parametrize("gone", ["flash_attn", "varlen"])
def test_a_choice_that_is_gone_says_what_serves_instead(gone):
    with pytest.raises(OptionError, match=f"(?s)'{gone}'.*attention='auto' takes Triton's kernels"):
        Options.parse({"attention": gone})


def test_zero_keeps_nothing_and_is_not_the_default():
    assert Options.parse({"memory_budget": 0}).memory_budget == 0


def test_options_are_frozen_and_hashable():
    options = Options.parse({"chunk_size": 7})
    with pytest.raises(AttributeError):
        options.chunk_size = 8
    assert hash(options) == hash(Options(chunk_size=7))


def test_errors_print_only_the_parts_they_have():
    error = DTAError("no attention", where="model.py:3", hint="use SDPA")
    assert str(error) == "no attention\n  where: model.py:3\n  what to do: use SDPA"
    assert str(DTAError("no attention")) == "no attention"


def test_errors_are_also_the_builtin_kind_that_callers_expect():
    assert issubclass(OptionError, ValueError) and issubclass(PlanError, ValueError)
    assert issubclass(RefusalError, RuntimeError)
    assert all(issubclass(kind, DTAError) for kind in (OptionError, PlanError, RefusalError))
