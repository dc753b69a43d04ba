"""What people have as token sequences: transcripts, dumps of trainers, tables; and refusals of what cannot be read."""

import json
import sys

import numpy as np
import pytest

from dta_compile.data import ReadOptions, bundled, load_rollouts, read
from dta_compile.errors import MissingPackageError, OptionError, PlanError
from tests.support.chat import KEEPING, STRIPPING, say, tokenizer, write_lines

TALK = [
    say("system", "Be brief."),
    say("user", "How many tokens are shared?"),
    say("assistant", "Seven.", reasoning_content="Count the prefix."),
    say("user", "And after that?"),
    say("assistant", "None at all.", reasoning_content="They part."),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    (path / "keep.jinja").write_text(KEEPING)
    return path


@pytest.fixture
def options(folder):
    return ReadOptions(tokenizer=str(folder))


def texts(recording):
    return [recording.tokenizer.decode(one.tokens) for one in recording.sequences]


def trained(recording):
    return [
        [recording.tokenizer.decode(one.tokens[start:stop]) for start, stop in one.spans] for one in recording.sequences
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        TALK,
        {"conversations": TALK},
        {"messages": [{**one, "tool_calls": None} for one in TALK]},
        {"messages": [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TALK]},
    ],
)
def test_each_turn_of_a_transcript_is_a_sample_that_trains_what_was_answered(row, options, tmp_path):
    found = read(write_lines(tmp_path / "talks.jsonl", [row]), options)
    rendered = (
        tokenizer().apply_chat_template(TALK[:3], tokenize=False),
        tokenizer().apply_chat_template(TALK, tokenize=False),
    )
    assert texts(found) == [*rendered]
    assert "Count" in rendered[0] and "Count" not in rendered[1]
    assert trained(found) == [
        ["<think>\nCount the prefix.\n</think>\n\nSeven.<|im_end|>\n"],
        ["<think>\nThey part.\n</think>\n\nNone at all.<|im_end|>\n"],
    ]
    assert [(one.trajectory, one.turn) for one in found.sequences] == [(0, 0), (0, 1)]


def test_sharegpt_in_its_own_words(options, tmp_path):
    words = {"system": "system", "user": "human", "assistant": "gpt"}
    row = {"conversations": [{"from": words[one["role"]], "value": one["content"]} for one in TALK]}
    for talk in (row, row["conversations"]):
        found = read(write_lines(tmp_path / "talks.jsonl", [talk]), options)
        assert trained(found) == [["Seven.<|im_end|>\n"], ["None at all.<|im_end|>\n"]]


def test_a_system_prompt_beside_the_messages(options, tmp_path):
    rows = [
        {"conversations": TALK[1:], "system": "Be brief."},
        {"conversations": [say("system", "Be brief."), *TALK[1:]], "system": "Be long."},
        {"conversations": [say("system", "Be brief."), *TALK[1:]]},
    ]
    beside, both, inside = (texts(read(write_lines(tmp_path / "talks.jsonl", [row]), options)) for row in rows)
    assert beside == both == inside and "Be brief." in inside[0]


def test_a_whole_transcript_trains_all_turns_also_where_the_template_changed_them(folder, tmp_path):
    path = write_lines(tmp_path / "talks.jsonl", [{"messages": TALK}])
    (kept,) = trained(read(path, ReadOptions(str(folder), str(folder / "keep.jinja"), turns="whole")))
    assert kept == [
        "<think>\nCount the prefix.\n</think>\n\nSeven.<|im_end|>\n",
        "<think>\nThey part.\n</think>\n\nNone at all.<|im_end|>\n",
    ]
    (stripped,) = trained(read(path, ReadOptions(str(folder), turns="whole")))
    assert stripped[0].startswith("Seven.") and stripped[1].endswith("None at all.<|im_end|>\n")
    (last,) = trained(read(path, ReadOptions(str(folder), turns="whole", loss="last")))
    assert last == stripped[1:]


def test_an_answer_that_the_template_changed_is_not_found_in_its_question(folder, tmp_path):
    talk = [
        say("system", "Reply with yes, no or user."),
        say("user", "Answer yes or no: is 2 even?"),
        say("assistant", "yes", reasoning_content="2 = 2 * 1"),
        say("user", "Who answers user, or assistant?"),
        say("assistant", "assistant", reasoning_content="I do."),
        say("user", "And 3?"),
        say("assistant", "no"),
    ]
    path = write_lines(tmp_path / "talks.jsonl", [{"messages": talk}])
    found = read(path, ReadOptions(str(folder), turns="whole"))
    (one,) = found.sequences
    text, before = found.tokenizer.decode(one.tokens), [found.tokenizer.decode(one.tokens[:i]) for i, _ in one.spans]
    assert [text[: len(begin)].endswith("<|im_start|>assistant\n") for begin in before] == [True] * 3
    assert [words.split("<")[0] for words in trained(found)[0]] == ["yes", "assistant", "no"]


def test_tools_and_values_reach_the_template(folder, tmp_path):
    call = {"type": "function", "function": {"name": "look_up", "arguments": json.dumps({"id": 7})}}
    row = {
        "messages": [
            TALK[1],
            say("assistant", "", tool_calls=[call]),
            say("tool", "42"),
            say("assistant", "It is 42."),
        ],
        "tools": [{"type": "function", "function": {"name": "look_up"}}],
    }
    template = STRIPPING + "{% if loud %}!{% endif %}"
    options = ReadOptions(str(folder), template, {"loud": True})
    found = texts(read(write_lines(tmp_path / "talks.jsonl", [row]), options))
    assert len(found) == 2
    assert '<tools>\n{"type": "function"' in found[1]
    assert '{"name": "look_up", "arguments": {"id": 7}}' in found[1]
    assert found[1].endswith("It is 42.<|im_end|>\n!")


def test_verls_dumps(options, tmp_path):
    """Files `<step>.jsonl` with what `_write_generations` of verl 0.9.1 writes."""
    for step in (10, 9):
        rows = [
            {"input": "user\nQ\nassistant\n", "output": f"A {i}", "gts": None, "score": 0.5, "step": step}
            for i in range(2)
        ]
        write_lines(tmp_path / f"{step}.jsonl", rows)
    found = read(str(tmp_path), options)
    assert texts(found)[:2] == ["user\nQ\nassistant\nA 0", "user\nQ\nassistant\nA 1"]
    assert trained(found) == [["A 0"], ["A 1"]] * 2
    assert [one.reward for one in found.sequences] == [0.5] * 4
    assert "2 files" in found.kind and "input and output" in found.kind


def test_trls_completions(options, tmp_path):
    """Parquet with the columns of GRPOTrainer 1.16: prompts and completions are messages, or text."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    more = {"step": [1], "reward_len": [0.1], "advantage": [1.0]}
    talk = {
        "prompt": [TALK[:2]],
        "completion": [[say("assistant", "Seven."), say("tool", "ok"), say("assistant", "So.")]],
    }
    for number, table in enumerate((talk, {"prompt": ["Q"], "completion": [" A"]})):
        parquet.write_table(arrow.table({**table, **more}), tmp_path / f"completions_{number:05d}.parquet")
    found = read(str(tmp_path), options)
    assert trained(found) == [["Seven.<|im_end|>\n", "So.<|im_end|>\n"], [" A"]]
    assert len(found.sequences) == 2


def test_folders_of_datasets(options, tmp_path):
    datasets = pytest.importorskip("datasets")
    talks = datasets.Dataset.from_list([{"messages": TALK}])
    talks.save_to_disk(str(tmp_path / "one"))
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]}).with_format("numpy")
    ids.save_to_disk(str(tmp_path / "ids"))
    assert [one.tokens for one in read(str(tmp_path / "ids")).sequences] == [[1, 2], [3]]
    assert len(read(str(tmp_path / "one"), options).sequences) == 2
    datasets.DatasetDict({"train": talks, "test": talks}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(OptionError, match="train, test"):
        read(str(tmp_path / "both"), options)
    assert len(read(str(tmp_path / "both"), ReadOptions(options.tokenizer, split="test")).sequences) == 2


def test_token_ids_with_what_says_what_is_trained(tmp_path):
    rows = [
        {"input_ids": [9, 9, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1], "labels": [-100, -100, -100, 6, 7]},
        {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1], "trajectory": "a", "turn": 3},
        {"tokens": [5, 6, 7], "spans": [[1, 3]]},
        {"prompt_ids": [5], "completion_ids": [6, 7]},
        {"prompt_token_ids": [5], "response_token_ids": [6, 7], "score": 2},
        {"prompt_token_ids": [5], "token_ids": [6, 7], "reward": True},
        {"prompts": [0, 5], "responses": [6, 7, 0], "attention_mask": [0, 1, 1, 1, 0], "response_mask": [1, 1, 0]},
        {"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0], "response_mask": [1, 1, 0]},
        {"tokens": 3, "prompt_ids": [5], "completion_ids": [6, 7], "labels": [-100, 6, 7]},
        {"prompt_ids": [0, 5], "prompt_mask": [0, 1], "completion_ids": [6, 7, 0], "completion_mask": [1, 1, 0]},
        {"input_ids": [5], "output_ids": [6, 7]},
    ]
    found = read(write_lines(tmp_path / "ids.jsonl", rows)).sequences
    assert [list(one.tokens) for one in found] == [[5, 6, 7]] * len(rows)
    assert [one.spans for one in found] == [((1, 3),)] * len(rows)
    assert (found[1].trajectory, found[1].turn, found[4].reward, found[5].reward) == ("a", 3, 2.0, 1.0)
    assert found[0].loss_mask().tolist() == [False, True, True]
    cut_off = {"prompt_ids": [0, 5], "prompt_mask": [0, 1], "completion_ids": [6, 7], "completion_mask": [0, 0]}
    (one,) = read(write_lines(tmp_path / "cut.jsonl", [cut_off])).sequences
    assert (list(one.tokens), one.spans) == ([5, 6, 7], ())


def test_a_rollout_file_is_known_by_its_content(tmp_path):
    path = tmp_path / "rollouts.bin"
    path.write_bytes(bundled().read_bytes())
    found = read(str(path)).sequences
    expected = load_rollouts(bundled())
    assert all(np.array_equal(a.tokens, b.tokens) and a.spans == b.spans for a, b in zip(found, expected, strict=True))


def test_lines_end_where_json_says(tmp_path):
    """Other characters that Python takes for the ends of lines may stand in strings."""
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"tokens": [1], "note": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n\r\n[2]", "utf-8")
    assert [one.tokens for one in read(str(path)).sequences] == [[1], [2]]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("rows", [[[1, 2], [3]], [{"tokens": [1, 2]}, {"tokens": [3]}]])
def test_one_json_list_of_rows_is_read_as_a_file_of_rows(rows, indent, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, indent=indent))
    assert [one.tokens for one in read(str(path)).sequences] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"messages": [{"role": "user", "content": "Q"}]}', "assistant"),
        ('{"messages": [{"content": "Q"}]}', "without a role"),
        ('{"messages": []}', "not a list of messages"),
        ('{"tokens": [1, 2], "loss_mask": [1]}', "2 numbers"),
        ('{"tokens": [1, 2], "spans": [[1, 3]]}', "within [0, 2]"),
        ('{"question": 1}', "prompt and completion"),
    ],
)
def test_a_bad_row_is_named(text, part, options, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"\n{text}\n")
    with pytest.raises(PlanError, match=r"bad\.jsonl, line 2") as caught:
        read(str(path), options)
    assert part in str(caught.value)


def test_text_without_a_tokenizer_says_what_to_give(folder, tmp_path):
    path = write_lines(tmp_path / "talks.jsonl", [{"messages": TALK}])
    with pytest.raises(OptionError, match="--tokenizer"):
        read(path)
    with pytest.raises(OptionError, match="cannot be loaded"):
        read(path, ReadOptions(str(tmp_path)))
    with pytest.raises(PlanError, match=r"(?s)does not take.*UndefinedError"):
        read(path, ReadOptions(str(folder), "{{ messages[9].role.x }}"))


@pytest.mark.parametrize(("module", "name"), [("pyarrow.parquet", "a.parquet"), ("datasets", "dataset_info.json")])
def test_a_missing_package_is_named(module, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(MissingPackageError, match=f"pip install {module.split('.')[0]}"):
        read(str(tmp_path))


def test_a_missing_tokenizer_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match="pip install transformers"):
        read(write_lines(tmp_path / "a.jsonl", [{"messages": TALK}]), ReadOptions("any"))


@pytest.mark.parametrize("given", [{"turns": "eech"}, {"loss": "lst"}, {"turns": None}])
def test_options_of_readers_are_checked(given):
    with pytest.raises(OptionError, match=f"bad value for {next(iter(given))}"):
        ReadOptions(**given)


def test_an_empty_file_has_no_sequences_and_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    assert read(str(tmp_path / "empty.jsonl")).sequences == []
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="without anything to read"):
        read(str(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"tokens": [1, 2], "reward": 1' + "0" * 400 + "}", "reward is no finite number"),
        ('{"tokens": [1, 2], "reward": NaN}', "reward is no finite number"),
        ('{"tokens": [1, 2], "turn": "3"}', "turn is no integer"),
        ('{"tokens": [1, 2], "trajectory": 0.5}', "trajectory is no integer"),
        ('{"tokens": [1, 2], "spans": [[0, Infinity]]}', "spans do not fit"),
        ('{"tokens": [1, 2], "spans": [[0, 1.5]]}', "spans do not fit"),
        ('{"tokens": [1, 2], "spans": "all"}', "spans do not fit"),
        ('{"tokens": [1, 2], "loss_mask": ["1", "0"]}', "loss_mask does not fit"),
        ('{"tokens": [1, 2], "routes": [[0], [true]]}', "routes are not integers of one shape"),
        ('{"tokens": [1, 2], "routes": [[0], [9223372036854775808]]}', "routes are not integers of one shape"),
        ('{"tokens": [1, 2], "routes": [[0]]}', "routes are not integers of one shape"),
        ('{"tokens": [1, 2], "images": ["a.png"]}', "images do not say which tokens are theirs"),
        ('{"tokens": [1, 2], "images": [[1, 3, "a.png"]]}', "images do not say which tokens are theirs"),
        ('{"input_ids": [1, 2], "attention_mask": [1, NaN]}', "attention_mask does not fit"),
        ('{"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1, 0, 1]}', "completion_mask does not fit"),
        ('{"prompt_ids": [1], "completion_ids": [2], "completion_mask": ["1"]}', "completion_mask does not fit"),
        ('{"tokens": [1, -1]}', "not a list of token ids"),
        ('{"tokens": [9223372036854775808]}', "not a list of token ids"),
        ('{"tokens": ' + "[" * 100_000 + "]" * 100_000 + "}", "a line is no JSON"),
    ],
)
def test_a_value_that_means_nothing_is_refused_and_not_left_out(row, what, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"[1]\n{row}\n")
    with pytest.raises(PlanError, match=what) as refused:
        read(str(path))
    assert refused.value.where.endswith("line 2")


def test_damaged_tables_are_refused_by_name(tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    path = tmp_path / "late.parquet"
    table = pa.table({"tokens": [[1, 2]], "when": pa.array([2**63 - 1], pa.timestamp("us"))})
    pyarrow.write_table(table, path)
    with pytest.raises(PlanError, match="not a parquet file"):
        read(str(path))
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text("[1]")
    with pytest.raises(PlanError, match="not a dataset"):
        read(str(folder))
