"""Predictions from a configuration: sizes as the model has them, and times and bytes that follow from them."""

import dataclasses
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config, Qwen3MoeConfig

import dta_compile
from dta_compile.cli import main
from dta_compile.cli.estimate_command import verdict
from dta_compile.data import Recorded, bundled, read
from dta_compile.errors import OptionError
from dta_compile.estimate.devices import device_named
from dta_compile.estimate.over_ranks import OverRanks
from dta_compile.estimate.predict import (
    USABLE,
    Ranks,
    cost_of,
    estimate,
    head_starts_of,
    model_shape,
    parts_of,
    tree_of,
)
from dta_compile.options import Options
from dta_compile.plan import PrefixTree, Work
from dta_compile.runtime.measure.calibration import Calibration

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 500, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
H100 = device_named("h100")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config")
    Qwen3Config(**SIZES).save_pretrained(path)
    return path / "config.json"


@pytest.fixture(scope="module")
def sequences():
    return read(str(bundled())).sequences


def test_a_configuration_has_the_sizes_of_its_model(config):
    shape = model_shape(str(config))
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))
    products = [one for one in model.model.modules() if isinstance(one, torch.nn.Linear)]
    assert shape.parameters == model.num_parameters()
    assert shape.active == sum(one.weight.numel() for one in products)
    assert shape.outputs == sum(one.out_features for one in products) + 3 * 4 * 16
    assert (shape.head, shape.layers, shape.kv_width) == (500 * 64, 3, 2 * 2 * 16)
    assert shape.parameters == 3 * shape.layer + shape.outside and shape.outside == 2 * 500 * 64 + 64


def test_a_token_takes_some_of_the_experts(tmp_path):
    Qwen3MoeConfig(**SIZES, **EXPERTS).save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    experts = 3 * 8 * 3 * 48 * 64  # layers, experts, products of each
    others = 3 * (64 * (64 + 32 + 32 + 64) + 8 * 64)
    assert shape.active == experts / 4 + others


def test_outputs_of_experts_do_not_depend_on_how_their_matrices_are_stored(tmp_path):
    sizes = {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}  # 2 * 32 is the width
    GptOssConfig(**sizes).save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert shape.outputs == 3 * (2 * (2 * 32 + 64) + 64 + 32 + 32 + 64 + 8 + 64)


def test_a_model_of_one_layer_sums_all_gradients_in_one_part(config):
    shape = dataclasses.replace(model_shape(str(config)), layers=1)
    (part,) = parts_of(shape, Ranks())
    assert part.sums == 4 * (shape.layer + shape.outside)


def test_a_size_may_be_listed_by_layer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n_text", "intermediate_size": [16384] * 35}))
    assert model_shape(str(tmp_path)).layers == 35


def test_times_follow_from_operations_and_peaks(config):
    shape = model_shape(str(config))
    work = Work(tokens=10_000, pairs=10**9)
    once, twice = (cost_of(shape, device_named("any", t, b, 1e9)) for t, b in ((100, 1e12), (200, 2e12)))
    assert once.forward.seconds(work) == pytest.approx(2 * twice.forward.seconds(work))
    operations = 2 * shape.active * 10_000 / 70e12 + 4 * 64 * 3 * 1e9 / 30e12
    assert once.forward.seconds(work) > operations


def test_head_rows_are_distinct_uses():
    sequences = [Recorded([1, 2, 3], spans=((1, 3),)), Recorded([1, 2, 4], spans=((2, 3),)), Recorded([1, 2, 3])]
    starts = head_starts_of(PrefixTree.build([one.tokens for one in sequences]), sequences)
    assert starts.tolist() == [0, 1, 3, 3, 3]


def test_budgets_trade_memory_for_time(config, sequences):
    options = Options(memory_budget=2_000_000, chunk_size=512, sweep="chunks")
    found = estimate(sequences, model_shape(str(config)), H100, options)
    some, nothing, everything = found.ours
    assert everything.bytes > some.bytes > nothing.bytes
    assert everything.seconds < some.seconds < nothing.seconds
    assert everything.forwarded_twice == 0 < nothing.forwarded_twice
    dense = found.others[0]
    assert dense.seconds > everything.seconds
    assert (
        found.uncertainty < estimate(sequences, model_shape(str(config)), device_named("a100"), Options()).uncertainty
    )


def test_the_command_says_what_its_times_rest_on(config, tmp_path, capsys):
    assert main(["estimate", str(config), str(bundled())]) == 0
    out = capsys.readouterr().out
    assert "roofline of NVIDIA H100" in out and "989 TFLOP/s" in out and "dense, checkpointed" in out
    assert main(["estimate", str(config.parent), str(bundled()), "--device", "l40s", "--json", "-"]) == 0
    roofline = json.loads(capsys.readouterr().out)
    assert roofline["stats"]["tree_tokens"] == 10_267 and len(roofline["ours"]) == 6

    calibration = Calibration()
    for _ in range(3):
        calibration.record([(kind, Work(1, 1, 9, 9, 9), 2.0) for kind in ("forward", "backward") for _ in range(20)])
    (tmp_path / "rates.json").write_text(calibration.to_json())
    given = ["--calibration", str(tmp_path / "rates.json"), "--json", "-"]
    assert main(["estimate", str(config), str(bundled()), *given]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["source"].startswith("calibrated on 80 runs")
    assert measured["ours"][0]["seconds"] > 1 > roofline["ours"][0]["seconds"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["CONFIG", "--device", "h1000"], "h100-pcie, h200"),
        (["CONFIG", "--tflops", "-1"], "--tflops"),
        (["CONFIG", "--calibration", "CONFIG"], "not a calibration"),
        (["missing.json"], "missing.json"),
        ([str(bundled("airline_tiny.json"))], "causal language model"),
    ],
)
def test_what_cannot_be_used_is_named(arguments, part, config, capsys):
    first, *more = [one.replace("CONFIG", str(config)) for one in arguments]
    assert main(["estimate", first, str(bundled()), *more]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("lines", ["", "[]\n[]\n"])
def test_a_file_without_tokens_has_no_estimate(lines, config, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    assert main(["estimate", str(config), str(path)]) == 2
    assert "no sequences to estimate" in capsys.readouterr().err


def test_a_configuration_is_an_object(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("[]")
    assert main(["estimate", str(path), str(bundled())]) == 2
    assert "the file holds no JSON object" in capsys.readouterr().err


def test_a_device_of_ones_own_needs_all_figures():
    assert device_named("mine", 100, 1e12, 1e10).tflops == 100
    assert device_named("a100", memory=40e9).memory == 40e9
    with pytest.raises(OptionError, match="--tflops, --bandwidth and --memory"):
        device_named("mine", 100)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**11), ("hidden_size", 0), ("vocab_size", "many")])
def test_a_size_that_no_model_has_is_refused_before_anything_is_built(key, value, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3", **SIZES, key: value}))
    assert main(["estimate", str(path), str(bundled())]) == 2
    assert f"{key} must be an integer" in capsys.readouterr().err


def test_bytes_of_parts_are_those_that_the_planner_has_of_the_model(config):
    """Of a compiled call that sweeps stages; activations are predicted from sizes, and the planner reads the graphs."""
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.bfloat16)
    model.compile(backend="dta", options={"sweep": "stages", "memory_budget": 0, "verify": "off", "chunk_size": 32})
    ids = torch.arange(96).remainder(7).view(4, 24)
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    measured = dta_compile.last_plan(model).limits.parts
    predicted = parts_of(model_shape(str(config)), Ranks())
    layers = [part for part in measured if part.footprint.kv_token]
    assert [part.footprint.kv_token for part in layers] == [part.footprint.kv_token for part in predicted]
    assert [part.sent for part in layers[:-1]] == [part.sent for part in predicted[:-1]]
    assert sum(part.sums for part in measured) == sum(part.sums for part in predicted)
    assert layers[1].sums == predicted[1].sums
    head = measured[-1].footprint.graph_head  # with what follows the last attention: only head rows need it
    kept = [part.footprint.graph_token + head * (part is layers[-1]) for part in layers]
    for mine, theirs in zip(predicted, kept, strict=True):
        assert 0.7 < mine.footprint.graph_token / theirs < 1.4


BRANCHES = [Recorded([*range(40), *range(100 * one, 100 * one + 60)]) for one in range(1, 9)]


def best_of(config, memory, ranks=None, **options):
    found = estimate(
        BRANCHES, model_shape(str(config)), device_named("any", 100, 1e12, memory), Options(**options), ranks=ranks
    )
    assert found.best is None or found.best.bytes <= found.usable < memory
    return found


def test_what_does_not_fit_is_never_recommended(config):
    shape = model_shape(str(config))
    held = 4.0 * shape.parameters
    roomy, tight = (best_of(config, times * held, chunk_size=64) for times in (100, 2.2))
    assert roomy.best.name.endswith("all kept") and tight.best.sweep == "stages"
    assert any(one.bytes > tight.usable and one.seconds < tight.best.seconds for one in tight.ours)
    assert roomy.batches == 1
    too_little = best_of(config, 4 * held, Ranks(optimizer="adamw"), chunk_size=64)
    assert too_little.best is None
    words = verdict(too_little, device_named("any", 100, 1e12, 4 * held))
    assert "does not fit" in words and f"--ranks {too_little.ranks_needed} --shard fsdp" in words
    divided = best_of(config, 4 * held, Ranks(too_little.ranks_needed, "fsdp", "adamw"), chunk_size=64)
    assert divided.best is not None


def test_weights_and_sums_of_gradients_are_what_a_sweep_of_chunks_holds(config):
    """2 + 4 bytes a parameter, beside shards of 16 / N where they are gathered (docs/production.md)."""
    shape = model_shape(str(config))
    for ranks, held in ((Ranks(), 0), (Ranks(4, "fsdp", "adamw"), 4)):
        found = estimate([], shape, H100, Options(sweep="chunks", memory_budget=0), ranks=ranks)
        assert found.ours[0].bytes == (6 + held) * shape.parameters


def test_ranks_divide_the_model_and_gather_what_runs(config):
    """All of it where chunks are swept, two layers and what is of no layer where stages are."""
    shape = model_shape(str(config))
    alone, divided = (best_of(config, 1e9, Ranks(4, shard, "adamw")) for shard in ("none", "fsdp"))
    assert alone.fixed_bytes == 16 * shape.parameters == 4 * divided.fixed_bytes
    by_name = [{one.name: one.bytes for one in found.ours} for found in (alone, divided)]
    for sweep, parts in (("chunks", shape.parameters), ("stages", shape.outside + 2 * shape.layer)):
        whole = 4 * shape.parameters if sweep == "chunks" else 0
        less = by_name[0][f"{sweep}, all kept"] - by_name[1][f"{sweep}, all kept"]
        # Alone, gradients take the place of their sums; layer by layer, a reduction has an input beside the sums.
        gradients = 2 * shape.parameters if sweep == "chunks" else 2 * (shape.layer + shape.head)
        assert less == pytest.approx(12 * shape.parameters - 2 * parts - gradients, abs=whole / 50 or 2e5)


def test_batches_run_one_after_another_where_hidden_states_of_one_are_too_much(config):
    shape = model_shape(str(config))
    nothing = best_of(config, 1e9, sweep="stages", memory_budget=0).ours[1].bytes
    memory = (4.0 * shape.parameters + 0.5 * (nothing - 4.0 * shape.parameters)) / USABLE
    found = best_of(config, memory, sweep="stages")
    assert found.batches > 1 and found.best is not None
    assert f"batch in {found.batches} one after another" in verdict(found, device_named("any", 100, 1e12, memory))


def test_the_verdict_names_what_a_faster_plan_would_keep(config, tmp_path, capsys):
    """Where all is kept, a budget that is enough for it; beside a budget that fits nowhere, what fits without."""
    held = 4.0 * model_shape(str(config)).parameters
    roomy = best_of(config, 100 * held)
    kept = re.search("'memory_budget': '(.*?)'", verdict(roomy, H100))[1]
    again = best_of(config, 100 * held, sweep=roomy.best.sweep, memory_budget=kept).ours[0]
    assert (again.seconds, again.chunk_size) == (roomy.best.seconds, roomy.best.chunk_size)
    wider = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    Qwen3Config(**{**SIZES, **wider}).save_pretrained(tmp_path)
    command = ["estimate", str(tmp_path), str(bundled()), "--sweep", "stages", "--memory", "0.9"]
    for budget, faster in (("300GB", True), ("100MB", False)):
        assert main([*command, "--memory-budget", budget]) == 0
        out = capsys.readouterr().out
        assert ("without --memory-budget: options=" in out) is faster and "\u2026" not in out


def test_one_tree_over_ranks_runs_fewer_tokens_in_even_shares(config, sequences):
    both = OverRanks(Ranks(4, "fsdp"), Options(mesh=(0, 1, 2, 3)), 1e9, model_shape(str(config)), H100)
    own, (one, plan) = both.own_trees(sequences), both.one_tree(sequences, 1)
    assert one.tokens == tree_of(sequences).num_rows < own.tokens
    assert one.imbalance < 1.05
    assert plan.rank == 1 and one.received == max(plan.dealing.received)
    faster = dataclasses.replace(both, link=2e9).one_tree(sequences, 1)[0]
    assert 0 < faster.exchange < one.exchange and faster.seconds < one.seconds
    assert 0 < one.peak_bytes < H100.memory
    parts = both.in_parts(sequences, 2)
    assert one.tokens <= parts.tokens <= own.tokens and parts.received < one.received
    assert both.in_parts(sequences, 4).seconds == pytest.approx(one.seconds)
