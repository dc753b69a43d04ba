"""What a run leaves behind for trace viewers, profilers and logs."""

import itertools
import json
import logging

import pytest
import torch

import dta_compile
from tests.support.tiny import TinyLM, shared_ids


@pytest.fixture(scope="module")
def trained():
    """A compiled model after a step, and a function that makes another one."""
    torch._dynamo.reset()
    compiled = torch.compile(TinyLM(layers=1), backend="dta", options={"chunk_size": 5, "cache_dir": "off"})
    ids = shared_ids(batch=4, tokens=12)

    def step():
        compiled(ids).log_softmax(-1)[..., 0].sum().backward()

    step()
    return compiled, step


def test_a_measured_trace_adds_up_to_the_measured_time(trained, tmp_path):
    plan = dta_compile.last_plan(trained[0])
    plan.to_chrome_trace(tmp_path / "trace.json", rank=3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    assert [name.partition(" (")[0] for name in names] == ["rank 3: predicted", "rank 3: measured"]
    runs = [one for one in events if one["ph"] == "X" and one["pid"] == names["rank 3: measured"]]
    assert len(runs) == plan.stats.launches
    assert sum(one["dur"] for one in runs) / 1e6 == pytest.approx(plan.estimates.measured_seconds, abs=2e-7 * len(runs))
    assert sum(one["args"]["tokens"] for one in runs) == plan.stats.tree_tokens * 2
    assert all(one["ts"] + one["dur"] <= after["ts"] for one, after in itertools.pairwise(runs))
    assert any(one["ph"] == "C" and one["pid"] == names["rank 3: measured"] for one in events)


def test_a_profiler_shows_every_op_by_name(trained):
    compiled, step = trained
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    shown = [event.key for event in profile.key_averages() if event.key.startswith("dta ")]
    kinds = {type(op).__name__.lower() for op in dta_compile.last_plan(compiled).schedule.ops}
    assert {name.split()[1] for name in shown} == kinds
    assert any("[0:" in name for name in shown)


def test_a_line_for_every_step_on_request(trained, caplog):
    _, step = trained
    step()
    assert not [record for record in caplog.records if record.name.startswith("dta_compile")]
    with caplog.at_level(logging.DEBUG, "dta_compile.runtime.measure.steps"):
        step()
    (line,) = [record.getMessage() for record in caplog.records if "steps" in record.name]
    assert "4 sequences, 48 tokens" in line and "tokens/s" in line and "\n" not in line


def test_plan_and_capture_are_in_structured_traces(trained, monkeypatch):
    found = {}

    def trace_structured(kind, metadata_fn, payload_fn):
        found[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr("dta_compile.runtime.measure.profiler.trace_structured", trace_structured)
    torch._dynamo.reset()
    compiled = torch.compile(TinyLM(layers=1), backend="dta")
    compiled(shared_ids(batch=3, tokens=9)).sum().backward()
    assert set(found) == {"dta_capture", "dta_plan_1"}
    assert "regions" in found["dta_capture"] and "prefix key" in found["dta_capture"]
    assert found["dta_plan_1"].startswith("dta plan: 3 sequences") and "# dta schedule" in found["dta_plan_1"]
