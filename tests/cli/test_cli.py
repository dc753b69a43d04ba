"""The command line: what `dta plan` prints and writes, and how it refuses."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

from dta_compile.cli import main
from dta_compile.data import bundled, load_rollouts
from dta_compile.plan import Schedule, plan
from tests.support.pages import read_page

SEQUENCES = [[5, 6, 7, 8], [5, 6, 7, 9, 10], [5, 6], [11]]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, SEQUENCES)) + "\n\n")
    return str(path)


def test_plan_of_the_bundled_rollouts(capsys):
    assert main(["plan", str(bundled()), "--schedule", "--strategy", "dfs"]) == 0
    out = capsys.readouterr().out
    recorded = json.loads(bundled("airline_tiny.json").read_text())["statistics"]["full"]
    assert f"{recorded['tokens']:,} tokens" in out
    assert f"{recorded['tree_tokens']:,}" in out
    assert "prefix tree:" in out and "the 10 largest and what is above them" in out and "--html PAGE" in out
    assert re.search(r"^# dta schedule strategy=", out, re.MULTILINE)
    assert "more operations (--full shows all)" in out


def test_full_shows_every_segment_and_a_schedule_that_parses(capsys):
    assert main(["plan", str(bundled()), "--schedule", "--full", "--chunk-size", "128"]) == 0
    out = capsys.readouterr().out
    assert "--full" not in out
    schedule = Schedule.parse(out[out.index("# dta schedule") :])
    assert schedule.chunk_size == 128
    segments = int(re.search(r"prefix tree: .* (\d+) segments", out)[1])
    names = re.findall(r"── \[([\d,]+):([\d,]+)\]", out)
    assert len(names) == segments and max(names, key=lambda name: len(name[1]))[1].startswith("1,"), "as on the page"


def test_json_lines_and_options_reach_the_planner(lines, capsys):
    arguments = ["--strategy", "vanilla", "--order", "lexicographic", "--mode", "streaming", "--chunk-size", "2"]
    assert main(["plan", lines, *arguments, "--memory-budget", "0", "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    expected = plan(
        SEQUENCES, strategy="vanilla", order="lexicographic", mode="streaming", chunk_size=2, memory_budget=0
    )
    assert "\n".join(written["schedule"]) == str(expected.schedule)
    assert written["stats"]["tree_tokens"] == expected.stats.tree_tokens == 7
    assert written["options"]["memory_budget"] == 0
    edges = [(node["parent"], node["node"]) for node in written["tree"] if node["parent"] is not None]
    assert sorted(edges) == sorted(expected.tree.edges)


def test_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("[1, 2]\n[1, 3]\n"))
    assert main(["plan", "-"]) == 0
    assert "prefix tree: 3 tokens, 3 segments" in capsys.readouterr().out


def test_leaf_only_leaves_prefixes_out(lines, capsys):
    assert main(["plan", lines, "--leaf-only", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["sequences"] == 3


def test_dot_has_the_segments_and_edges_of_the_tree(lines, tmp_path, capsys):
    out = tmp_path / "tree.dot"
    assert main(["plan", lines, "--dot", str(out)]) == 0
    assert capsys.readouterr().out == ""
    text = out.read_text()
    tree = plan(SEQUENCES).tree
    edges = {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+);", text)}
    assert edges == set(tree.edges)
    assert len(re.findall(r"\[label=", text)) == len(tree)
    assert nx.is_forest(tree)


def test_a_folder_of_dumps_has_a_batch_in_each_file(tmp_path, capsys):
    for number in (1, 2, 3):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, SEQUENCES)) + "\n")
    assert main(["plan", str(tmp_path), "--json", "-", "--memory-budget", "8GB", "--bytes-per-token", "9"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = plan(SEQUENCES).stats
    assert (found["batches"], found["tree_tokens"], found["tokens"]) == (3, 3 * one.tree_tokens, 3 * one.tokens)
    assert found["together"] == one.tree_tokens
    assert main(["plan", str(tmp_path)]) == 0
    assert "a file a batch" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 2
    assert "name one of its files" in capsys.readouterr().err


def test_html_is_a_page_of_the_plan(lines, tmp_path, capsys):
    out = tmp_path / "plan.html"
    assert main(["plan", lines, "--html", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: ") and said.count("\n") == 1 and "MB" in said
    page = read_page(out)
    assert page.title == "batch.jsonl"
    assert page.facts["stats"]["tree_tokens"] == plan(SEQUENCES).stats.tree_tokens
    assert main(["plan", lines, "--html", "-"]) == 2
    assert "name of a file" in capsys.readouterr().err
    assert main(["plan", lines, "--html", str(out), "--thumbnails", str(tmp_path / "missing")]) == 2
    assert "no folder of thumbnails" in capsys.readouterr().err
    assert main(["plan", lines, "--html", str(tmp_path / "missing" / "plan.html")]) == 2
    assert str(tmp_path / "missing" / "plan.html") in capsys.readouterr().err


def test_html_of_rollouts_has_their_rewards_and_loss(tmp_path):
    out = tmp_path / "plan.html"
    assert main(["plan", str(bundled()), "--leaf-only", "--html", str(out)]) == 0
    page, leaves = read_page(out), 33
    assert len(page.facts["names"]) == len(page.columns["reward"]) == leaves
    assert page.columns["trainedValue"].max() >= 1
    assert page.facts["losses"][0]["gained"] > 0 and page.columns["causeValue"].max() >= 1


def test_a_configuration_puts_the_page_and_the_plan_on_a_device(tmp_path, capsys):
    config, out = tmp_path / "config.json", tmp_path / "plan.html"
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151_936}
    config.write_text(json.dumps({"model_type": "qwen3", **sizes}))
    command = ["plan", str(bundled()), "--config", str(config)]
    assert main([*command, "--device", "h200", "--html", str(out)]) == 0
    said, device = capsys.readouterr().out, read_page(out).facts["device"]
    assert device["memory"] == 141e9 and 0 < device["base"] < 141e9 and " of 141 GB at the peak" in said
    for more in (["--rows", "8"], ["--bytes-per-token", "8"]):
        assert main([*command, *more]) == 2
        assert "has no effect with --" in capsys.readouterr().err


def test_deep_and_wide_trees_are_cut_in_print(tmp_path, capsys):
    path = tmp_path / "deep.jsonl"
    path.write_text("\n".join(json.dumps(list(range(n))) for n in range(1, 500)))
    assert main(["plan", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 60
    path.write_text("\n".join(json.dumps([0, n]) for n in range(500)))
    assert main(["plan", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 80


@pytest.mark.parametrize("line", ["[1, 2", "{}", '["a"]', "[1.5]", "[true]", "7", "[[1]]"])
def test_a_bad_line_is_named(line, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"[1, 2]\n\n{line}\n")
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert "bad.jsonl, line 3" in error
    assert line in error


def test_a_file_may_have_images(tmp_path, capsys):
    path = tmp_path / "images.jsonl"
    rows = [
        {"tokens": [1, 9, 9, 2], "images": [[1, 3, "a.png"]]},
        {"input_ids": [0, 1, 9, 9, 3], "attention_mask": [0, 1, 1, 1, 1], "images": [[2, 4, "a.png"]]},
        {"prompt_ids": [1, 9, 9], "completion_ids": [2], "images": [[1, 3, "b.png"]]},
        [1, 4],
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["plan", str(path), "--html", str(tmp_path / "page.html")]) == 0
    for more in ([], ["--leaf-only"]):
        assert main(["plan", str(path), *more]) == 0
        shown = capsys.readouterr().out
        assert "14 tokens, 9 to run" in shown and "3 in the sequences, 2 different, each encoded once" in shown


def test_a_file_may_have_routes(tmp_path, capsys):
    path = tmp_path / "routed.jsonl"
    lines = [{"tokens": [1, 2, 3], "routes": [[0, 1], [0, last], [2, 3]]} for last in (1, 2)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["plan", str(path)]) == 0
    assert "2 tokens more because of routes" in capsys.readouterr().out
    assert main(["plan", str(path), "--leaf-only"]) == 0
    assert "2 sequences" in capsys.readouterr().out
    path.write_text(json.dumps(lines[0]) + "\n[1, 2]\n")
    assert main(["plan", str(path)]) == 2
    assert "none for sequence 1" in capsys.readouterr().err
    path.write_text('{"tokens": [1, 2], "routes": [[0, 1], [0]]}')
    assert main(["plan", str(path)]) == 2
    assert "routed.jsonl, line 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing.npz", "missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(name, tmp_path, capsys):
    assert main(["plan", str(tmp_path / name)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_binary_file_is_no_json_lines(tmp_path, capsys):
    path = tmp_path / "rollouts.npz"
    path.write_bytes(bytes(range(256)))
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert "rollouts.npz" in error and "a rollout file (.npz)" in error


def test_batches_and_variants_are_compared(capsys):
    file = str(bundled())
    assert main(["plan", file, "--rows", "8", "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main(["plan", file, "--rows", "8", "--compare", "arrange=prefix", "chunk-size=128", "--json", "-"]) == 0
    as_given, arranged = json.loads(capsys.readouterr().out)
    assert as_given == alone and as_given["batches"] == 5
    sequences = [rollout.tokens for rollout in load_rollouts(file)]
    batches = [plan(sequences[first : first + 8]).stats.tree_tokens for first in range(0, 40, 8)]
    assert as_given["tree_tokens"] == sum(batches) > arranged["together"]
    assert arranged["tree_tokens"] > as_given["together"] == arranged["together"]
    assert main(["plan", file, "--rows", "8", "--compare", "arrange=shuffled"]) == 0
    assert "arrange=shuffled" in capsys.readouterr().out
    for bad in ("color=red", "rows=many", "arrange=upwards", "rows=0"):
        assert main(["plan", file, "--compare", bad]) == 2
        assert bad.split("=")[0] in capsys.readouterr().err


GROUPED = "callbacks=[DTACallback(group_rows=True)]"
WHOLE = "args=DTACallback.whole_steps(args)"
UNPACKED = f"set packing=False, per_device_train_batch_size=4, {GROUPED}"
CHECKED = {  # C as set and with each advice, as docs/use/verl.md and docs/use/trainers.md have them
    "grpo": ("--trainer grpo", {"as set": 2.73}),
    "accumulated": (
        "num_generations=4 gradient_accumulation_steps=5",
        {"as set": 2.07, "set args=DTACallback.whole_steps(args)": 3.38},
    ),
    "generated": (
        "generation_batch_size=40",
        {
            "as set": 2.07,
            'set one update a generation ({"per_device_train_batch_size": 40, "steps_per_generation": 1})': 3.38,
        },
    ),
    "sft": ("train_sampling_strategy=random", {"as set": 2.07, f"set {GROUPED}": 2.79}),
    "sft on two": ("group_rows=true gradient_accumulation_steps=2 --ranks 2", {"as set": 2.79, f"set {WHOLE}": 3.07}),
    "packed": (
        "packing=true max_length=2048 per_device_train_batch_size=2",
        {"as set": 1.73, UNPACKED: 2.28},
    ),
    "dpo": ("use_weighting=true per_device_train_batch_size=4", {"as set": 2.24, f"set {GROUPED}": 2.59}),
    "verl": ("{verl} +actor_rollout_ref.rollout.n=8", {"as set": 1.54, "set actor.strategy=dta": 3.23}),
    "verl on eight": ("rollout.n=8 strategy=dta --ranks 8", {"as set": 2.53}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_the_batching_of_a_trainer_leaves(name, tmp_path, capsys):
    words, expected = CHECKED[name]
    actor = "{strategy: fsdp2, ppo_micro_batch_size_per_gpu: 2, ppo_max_token_len_per_gpu: '${elsewhere}'}"
    settings = "{trainer: {n_gpus_per_node: 2, balance_batch: false}, actor_rollout_ref: {actor: %s}}"
    (tmp_path / "verl.yaml").write_text(settings % actor)
    command = ["check", str(bundled()), *words.format(verl=tmp_path / "verl.yaml").split()]
    assert main([*command, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["together"] == 10_267
    assert {one["title"]: round(one["compression"], 2) for one in found["variants"]} == expected
    assert main(command) == 0
    assert ("nothing that can be set" in capsys.readouterr().out) == (len(expected) == 1)


def test_a_checked_step_has_a_price_and_bad_settings_are_refused(tmp_path, capsys):
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
    config.write_text(json.dumps({"model_type": "qwen3", **sizes}))
    assert main(["check", str(bundled()), "--config", str(config), "--ranks", "2"]) == 0
    assert "then the largest step, 16 rows: verdict: fits 2 x NVIDIA H100" in capsys.readouterr().out
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "unknown.yaml").write_text("defaults: [ppo_trainer]\n")
    for bad, told in (
        ("gradient_accumulation_steps=0", "1 or more"),
        ("bad.yaml", "cannot be read"),
        ("unknown.yaml", "--trainer"),  # verl's own file says more than its defaults
        ("packing=yes", "true or false"),
        ("train_sampling_strategy=group_by_length", "random, sequential"),
        ("acumulation=2", "gradient_accumulation_steps"),
    ):
        assert main(["check", str(bundled()), "--ranks", "2", bad if "=" in bad else str(tmp_path / bad)]) == 2
        assert told in capsys.readouterr().err
    rows = tmp_path / "rows.jsonl"
    rows.write_text("[1, 2]\n[]\n")
    assert main(["check", str(rows), "rollout.n=1", "use_dynamic_bsz=true", "n_gpus_per_node=2"]) == 0
    assert main(["check", str(rows), "rollout.n=1", "n_gpus_per_node=100000000"]) == 2
    rows.write_text("[]\n")
    assert main(["check", str(rows)]) == 2
    assert "no sequences to check" in capsys.readouterr().err
    rows.write_text("[1, 2, 3]\n[1, 2]\n[1, 2, 4, 5]\n")
    assert main(["check", str(rows), "--trainer", "dpo"]) == 2
    assert "a row without the other one of its pair" in capsys.readouterr().err
    assert main(["check", str(rows), "packing=true", "max_length=3", "group_rows=true"]) == 0
    assert "3 sequences, 8 tokens, 4 in one tree" in capsys.readouterr().out
    images = [{"tokens": [1, 7, 7, 7], "images": [[1, 4, name]]} for name in "ab"]
    rows.write_text("\n".join(map(json.dumps, images)))
    assert main(["check", str(rows), "max_length=3"]) == 0
    assert "2 sequences, 6 tokens, 5 in one tree" in capsys.readouterr().out


def test_bad_options_are_refused_with_a_suggestion(lines, capsys):
    assert main(["plan", lines, "--strategy", "vanila"]) == 2
    assert "did you mean 'vanilla'?" in capsys.readouterr().err
    assert main(["plan", lines, "--chunk-size", "0"]) == 2
    assert "chunk_size" in capsys.readouterr().err
    for command in ("plan", "why", "estimate config.json"):
        assert main([*command.split(), lines, "--chunk-sizes", "8"]) == 2
        told = capsys.readouterr().err
        assert "--chunk-sizes" in told and f"dta {command.split()[0]} --help says" in told
    assert main(["plan", lines, "--memory-budget", "100"]) == 2
    assert "bytes_per_token" in capsys.readouterr().err
    assert main(["plan", lines, "--memory-budget", "100", "--bytes-per-token", "10"]) == 0
    assert main(["plan", lines, "--mode", "backwards"]) == 2
    assert "'backwards'" in capsys.readouterr().err
    assert main(["demo", "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *("--rank 1", "--link 1", "--device a100", "--optimizer adamw", "--thumbnails .", "--arrange prefix"),
        *("--compare arrange=prefix", "--rows 2 --html OUT", "--compare chunk-size=8 --dot OUT", "--rows 2 --schedule"),
        *("--config C --mode score", "--config C --kv-bytes-per-token 1", "--json - --dot -"),
        "check --shard fsdp",
    ],
)
def test_options_that_would_have_no_effect_are_refused(words, lines, capsys):
    command = words.split()
    name = command.pop(0) if command[0] == "check" else "plan"
    assert main([name, lines, *command]) == 2
    assert "has no effect with" in (error := capsys.readouterr().err) or "cannot both" in error


def test_what_is_on_standard_output_is_all_of_it_and_what_is_on_standard_input_is_read_once(
    lines, tmp_path, monkeypatch, capsys
):
    assert main(["plan", lines, "--json", "-", "--html", str(tmp_path / "page.html")]) == 0
    count = json.loads(capsys.readouterr().out)["stats"]["sequences"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path(lines).read_text()))
    assert main(["plan", "-", "--compare", "order=lexicographic", "--json", "-"]) == 0
    assert [one["sequences"] for one in json.loads(capsys.readouterr().out)] == [count, count]
    assert main(["plan", "-", "--compare", "turns=whole"]) == 2
    assert "standard input can be read once" in capsys.readouterr().err


def test_a_chunk_size_that_is_the_default_is_obeyed_over_ranks(lines, capsys):
    assert main(["plan", lines, "--ranks", "2", "--chunk-size", "2048", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["chunk_size"] == 2048


def test_demo_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "dta_compile.cli.demo", raising=False)
    monkeypatch.delattr("dta_compile.cli.demo", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "transformers" in error and "dta-compile[hf]" in error


def test_plan_does_not_import_torch():
    code = (
        "import sys; from dta_compile.cli import main; from dta_compile.data import bundled;"
        "assert main(['plan', str(bundled())]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_pipes_and_devices_are_not_waited_for(tmp_path, lines, capsys):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for command in (
        ["plan", pipe],
        ["plan", "/dev/zero"],
        ["plan", lines, "--compare", f"file={pipe}"],
    ):
        assert main(command) == 2
        assert "not a regular file" in capsys.readouterr().err
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run([sys.executable, "-m", "dta_compile", "plan", "-"], stdin=endless, capture_output=True)
    assert done.returncode == 2 and b"standard input" in done.stderr


def test_numbers_out_of_range_are_refused(lines, capsys):
    for option, value in (
        ("--chunk-size", "1" + "0" * 22),
        ("--memory-budget", "1" + "0" * 22),
        ("--kv-bytes-per-token", "-1"),
        ("--rows", "0"),
    ):
        assert main(["plan", lines, option, value]) == 2
        assert option.strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
    assert main(["plan", lines, "--compare", "turns=some"]) == 2
    error = capsys.readouterr().err
    assert "--turns" in error and "each" in error and "whole" in error
    assert main(["split", "--gpus", "99999999", "--train", "1", "--roll", "1"]) == 2
    assert "16384" in capsys.readouterr().err
    assert main(["plan", "a\0b"]) == 2
    assert "NUL" in capsys.readouterr().err


def test_a_terminal_is_sent_nothing_that_a_file_says(tmp_path, capsys):
    red = "\x1b[31m"
    path = tmp_path / f"{red}.jsonl"
    path.write_text(f'"{red}"')
    assert main(["plan", str(path)]) == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and "\\x1b[31m" in captured.err


def test_an_output_is_there_as_a_whole_or_as_it_was(tmp_path, lines, monkeypatch, capsys):
    out, link = tmp_path / "out.json", tmp_path / "link.json"
    out.write_text("before")
    out.chmod(0o640)
    link.symlink_to(out)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        assert main(["plan", lines, "--json", str(link)]) == 2
    assert out.read_text() == "before" and "no space" in capsys.readouterr().err
    assert main(["plan", lines, "--json", str(link)]) == 0
    assert json.loads(out.read_text()) and link.is_symlink() and out.stat().st_mode & 0o777 == 0o640
    assert main(["plan", lines, "--json", "/dev/null"]) == 0
    assert {one.name for one in tmp_path.iterdir()} == {"out.json", "link.json", Path(lines).name}


def test_whatever_else_goes_wrong_is_one_message(lines, monkeypatch, capsys):
    def fail(*_, **__):
        raise OverflowError("too much")

    monkeypatch.setattr("dta_compile.cli.command.read_source", fail)
    assert main(["plan", lines]) == 2
    error = capsys.readouterr().err
    assert "OverflowError: too much" in error and lines in error and "DTA_DEBUG" in error
    monkeypatch.setenv("DTA_DEBUG", "somewhere")
    with pytest.raises(OverflowError):
        main(["plan", lines])


def test_one_tree_over_ranks_beside_own_trees(tmp_path, capsys):
    """Tokens run in all are those of the tree; the graph and the figures are of all ranks."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{[1] * 60 + [number] * 20}\n" for number in range(2, 10)))
    assert main(["plan", str(file), "--ranks", "4", "--rank", "3", "--kv-bytes-per-token", "100"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith(("own trees", "one tree"))}
    assert "400" in rows["own"] and "81.8%" in rows["own"] and "220" in rows["one"] and "0.0%" in rows["one"]
    assert "220 tokens run in all = tokens of the tree" in printed and "on rank 3" in printed
    assert main(["plan", str(file), "--ranks", "4", "--strategy", "one_tree", "--json", "-"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["ranks"]["tokens"]) == 220
    for wrong in (["--rank", "4"], ["--mode", "streaming"], ["--strategy", "dfs"], ["--rows", "2"]):
        assert main(["plan", str(file), "--ranks", "4", *wrong]) == 2
        assert capsys.readouterr().err.startswith("dta: ")
