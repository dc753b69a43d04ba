"""Code that is generated beside the steps: taken between two calls, and nothing that goes wrong reaches them."""

import gc
import logging
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch
from torch._inductor import config as inductor_config

import dta_compile
from dta_compile.codegen import background
from dta_compile.codegen.inductor import Code, generate, load
from dta_compile.codegen.worker import Result
from dta_compile.codegen.wrapper import kernels, needed
from dta_compile.errors import VerificationError
from dta_compile.executable.code import CppSource, Input, Source
from dta_compile.executable.pieces import NO_CODES, Piece, running
from dta_compile.runtime import engine
from dta_compile.runtime.cuda_graphs import arenas
from tests.support.inside import inside
from tests.support.replay import Recorder
from tests.support.tiny import SMALL_CHUNKS, TinyLM, after, assert_same, gradients, shared_ids, weighted

CODEGEN = sys.modules["dta_compile.codegen.generated"]
PASS = sys.modules["dta_compile.passes.fusion.codegen"]
ROOT = str(pathlib.Path(__file__).parents[2])
needs_posix = pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")


class Pretended:
    """A process that ends when it is told to; what it generates runs the operators, and counts how often."""

    latest, runs = None, 0

    def __init__(self, sources):
        self.missing, self.results, self.failure, self.ended = dict(sources), [], "", False
        Pretended.latest = self

    @staticmethod
    def is_busy():
        return False

    def poll(self):
        return self.ended

    def end(self, without=()):
        """All of it is there, but for the sources at these positions, which failed."""
        found = enumerate(self.missing.items())
        self.codes = {key: self.code(source) for i, (key, source) in found if i not in without}
        self.results = [Result(key, 0.5, "" if key in self.codes else "ValueError: no") for key in self.missing]
        self.missing, self.ended = {}, True

    def code(self, source):
        if isinstance(source, CppSource):
            return load(generate(source))
        function = source.function()

        def run(arguments):
            Pretended.runs += 1
            taken = list(arguments)
            arguments.clear()
            return function(*taken)

        def strides(*sizes):
            known = {f"size_{i}": size for i, size in enumerate(sizes)}
            return tuple(tuple(int(eval(str(one), dict(known))) for one in value.strides) for value in source.inputs)

        return Code(run, lambda *sizes: True, strides)


@pytest.fixture
def pretended(monkeypatch):
    torch._dynamo.reset()
    CODEGEN._warn.cache_clear()
    monkeypatch.setitem(PASS.WORTHWHILE, "cpu", 0)
    monkeypatch.setattr(CODEGEN, "BackgroundCompile", Pretended)
    monkeypatch.setattr(CODEGEN.code_cache, "find", lambda key: getattr(Pretended.latest, "codes", {}).get(key))
    monkeypatch.setattr(Pretended, "latest", None)
    monkeypatch.setattr(Pretended, "runs", 0)
    return Pretended


@pytest.fixture
def model():
    return TinyLM(layers=1)


def compile_with(model, **options):
    return torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "cache_dir": "off", **options})


def step(function, ids):
    output = function(ids)
    weighted(output).backward()
    return output.detach()


def says(compiled):
    return dta_compile.last_plan(compiled).estimates.codegen


# Between two calls


@pytest.mark.slow
def test_steps_run_on_aten_until_all_of_the_code_is_there(model, pretended):
    ids, compiled = shared_ids(batch=40, tokens=30), compile_with(model, chunk_size=64)
    expected = after(model, lambda: step(model, ids))
    assert_same(after(model, lambda: step(compiled, ids)), expected)
    pieces = len(pretended.latest.missing)
    assert says(compiled) == f"inductor: 0 of {pieces} pieces in use ({pieces} being generated), 0.0 s"
    for _ in range(3):
        step(compiled, ids)
    assert not pretended.runs
    pretended.latest.end()
    assert_same(after(model, lambda: step(compiled, ids)), expected)
    assert pretended.runs
    for _ in range(3):
        step(compiled, ids)
    text = f"inductor: {pieces} of {pieces} pieces in use, {pieces / 2:.1f} s beside the steps; chunks run "
    assert text in str(dta_compile.last_plan(compiled)) and says(compiled).endswith("x as fast as on ATen")
    calls = [inside(compiled).newest.calibration(torch.device("cpu"), generated).calls for generated in (False, True)]
    assert calls == [3, 3]  # of those on ATen and those on generated code, all but the first


def test_a_call_runs_to_its_end_what_it_began_with(model, pretended):
    ids, compiled = shared_ids(), compile_with(model)
    expected = after(model, lambda: step(model, ids))
    waiting, forgotten = compiled(ids), compiled(ids)
    pretended.latest.end()
    later = compiled(ids)
    forward_runs = pretended.runs
    assert forward_runs and not inside(compiled).newest.program.joint.generated.failures
    weighted(waiting).backward()
    assert pretended.runs == forward_runs  # the backward of a call on ATen is ATen's
    assert_same((waiting.detach(), gradients(model)), expected)
    model.zero_grad()
    weighted(later).backward()
    assert pretended.runs > forward_runs
    assert_same((later.detach(), gradients(model)), expected)
    del forgotten  # whose backward never came, and kept nobody waiting


def test_a_second_backward_and_streaming_run_one_set_of_code_each(model, pretended):
    ids, compiled = shared_ids(), compile_with(model, memory_budget=0)
    expected = after(model, lambda: (weighted(output := model(ids)).backward(), output.detach())[1])
    output = compiled(ids)
    pretended.latest.end()
    for _ in range(2):  # the second one recomputes, and so begins anew
        model.zero_grad()
        weighted(output).backward(retain_graph=True)
        assert_same((output.detach(), gradients(model)), expected)
    runs = pretended.runs
    assert runs
    model.zero_grad()
    dta_compile.streaming_step(compiled, lambda row, logits: logits.square().sum(), ids)
    assert pretended.runs > runs


def test_threads_run_each_its_own_code():
    source = Source("def forward(self):\n    return None\n", (), 0, ())
    piece = Piece("piece", source)
    code = Code(lambda arguments: ("generated",), lambda: True, lambda: ())
    with running({piece: code}):
        assert piece() == ("generated",)
        with running(NO_CODES):
            assert piece() is None
        assert piece() == ("generated",)
    assert piece() is None


@pytest.mark.slow
def test_recorded_graphs_are_recorded_again_with_other_code(model, pretended, monkeypatch):
    monkeypatch.setattr(arenas.ReplayCache, "pays", lambda cache, device, chunks: True)
    monkeypatch.setattr(arenas, "CudaRecorder", Recorder)
    ids, compiled, recorded = shared_ids(), compile_with(model, attention="reference"), []
    expected = after(model, lambda: step(model, ids))
    for number in range(6):
        assert_same(after(model, lambda: step(compiled, ids)), expected)
        recorded.append(dta_compile.last_plan(compiled).estimates.replays.recorded)
        if number == 2:
            pretended.latest.end()
    assert sum(recorded[:2]) and sum(recorded[3:5])
    assert recorded[2] == recorded[5] == 0
    assert dta_compile.last_plan(compiled).estimates.replays.replayed


def test_code_that_is_swapped_in_is_checked(model, pretended, monkeypatch):
    ids, compiled, checked = shared_ids(), compile_with(model), []
    monkeypatch.setattr(engine, "self_check", lambda *arguments: checked.append(pretended.runs) or "skipped: no")
    for number in range(4):
        step(compiled, ids)
        if number == 1:
            pretended.latest.end()
    assert checked == [0, 0] and pretended.runs


def test_code_that_differs_is_checked_until_it_does_not(model, pretended, monkeypatch):
    ids, compiled, verdicts = shared_ids(), compile_with(model), ["equal", "", "", "equal"]

    def check(*arguments):
        if not (verdict := verdicts.pop(0)):
            raise VerificationError("output 0 differs from the captured program")
        return verdict

    monkeypatch.setattr(engine, "self_check", check)
    step(compiled, ids)
    pretended.latest.end()
    for _ in range(2):
        with pytest.raises(VerificationError):
            step(compiled, ids)
    for _ in range(2):
        step(compiled, ids)
    assert not verdicts


# What goes wrong


def generated_code(count=3):
    """Of pieces that nobody has asked for."""
    one = Input(torch.float32, torch.device("cpu"), (2,), (1,))
    sources = [
        Source(f"def forward(self, input_0):\n    return (input_0 + {i},)\n", (), 0, (one,)) for i in range(count)
    ]
    return CODEGEN.GeneratedCode({"forward": [Piece("piece", one) for one in sources]}, in_background=True)


def test_pieces_that_fail_leave_the_others_alone(pretended, caplog):
    code = generated_code()
    assert not code.prepare(["forward"]) and not code.is_used
    pretended.latest.end(without=[1])
    with caplog.at_level(logging.WARNING, "dta_compile"):
        assert len(code.prepare(["forward"])) == 2 and code.is_used
    assert [one.getMessage()[-14:] for one in caplog.records if one.name == "dta_compile"] == ["ValueError: no"]
    failed = "1 failed and run as ATen operators (ValueError: no)"
    assert str(code) == f"inductor: 2 of 3 pieces in use, 1.5 s beside the steps; {failed}"


def test_what_a_process_left_undone_is_not_tried_again(pretended):
    code = generated_code()
    code.prepare(["forward"])
    job = pretended.latest
    job.end()
    job.missing = {job.results.pop().key: None}
    job.failure = "the process beside the steps ended (-9)"
    assert len(code.prepare(["forward"])) == len(code.prepare(["forward"])) == 2
    assert pretended.latest is job and "1 failed and run as ATen operators (the process" in str(code)


def test_no_compiler_is_said_once_and_nothing_is_tried(pretended, caplog):
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}), caplog.at_level(logging.WARNING, "dta_compile"):
        for _ in range(2):
            code = generated_code()
            assert not code.prepare(["forward"])
    assert pretended.latest is None
    (line,) = [record.getMessage() for record in caplog.records if record.name == "dta_compile"]
    for text in (line, str(code)):
        assert "No working C++ compiler (no-such-compiler): install one, as by `apt install g++`" in text


def test_a_process_that_cannot_be_started_is_no_error(monkeypatch):
    monkeypatch.setattr(CODEGEN.inductor, "why_no_compiler", lambda devices: None)
    monkeypatch.setattr(sys, "executable", "")
    code = generated_code()
    assert not code.prepare(["forward"])
    assert "no process beside the steps: OSError: this process does not know its Python interpreter" in str(code)


def test_who_may_not_wait_has_all_code_at_once(pretended, monkeypatch, caplog):
    """And is told at once how much there is to do, then how long the rest will take, the start-up left out."""
    clock = iter([0.0, 0.0, 0.0, 30.0, 32.0, 34.0, 34.0])
    monkeypatch.setattr(CODEGEN.time, "perf_counter", lambda: next(clock))
    code = generated_code()
    monkeypatch.setattr(CODEGEN, "_generated", lambda key, source: pretended.code(pretended, source))
    assert len(code.prepare(["forward"], wait=True)) == 3 and pretended.latest is None
    first, second = [record.getMessage() for record in caplog.records if record.name == "dta_compile"]
    assert "generating code for 3 pieces before this call goes on" in first and "codegen='auto'" in first
    assert second == "dta: code for 2 of 3 pieces, about 2 s more"


# The process


@pytest.fixture
def run_instead(monkeypatch, tmp_path):
    """Processes run this text."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return lambda text: monkeypatch.setattr(background, "COMMAND", ("-c", textwrap.dedent(text)))


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def no_source():
    return Source("def forward(self):\n    return None\n", (), 0, ())


def test_a_process_that_crashes_says_why(run_instead):
    run_instead(
        """
        import json
        print(json.dumps(["a", 1.5, ""]), flush=True)
        raise SystemExit("MemoryError: so little")
        """
    )
    job = background.BackgroundCompile({"a": no_source(), "b": no_source()})
    wait_until(job.poll)
    assert job.results == [Result("a", 1.5, "")] and list(job.missing) == ["b"]
    assert job.failure == "the process beside the steps ended (1): MemoryError: so little"
    assert not os.listdir(CODEGEN.code_cache.path())


def test_results_that_cannot_be_read_are_no_error(run_instead):
    run_instead("print('no result')")
    job = background.BackgroundCompile({"a": no_source()})
    wait_until(job.poll)
    assert "cannot be read" in job.failure and list(job.missing) == ["a"] and not os.listdir(CODEGEN.code_cache.path())


@needs_posix
def test_a_process_that_hangs_is_ended(run_instead, monkeypatch):
    run_instead("import time; time.sleep(100)")
    monkeypatch.setattr(background, "LONGEST_SILENCE", 0.2)
    job = background.BackgroundCompile({"a": no_source()})
    assert background.BackgroundCompile.is_busy()
    wait_until(job.poll)
    assert job.failure == "no code within 0 s" and not is_alive(job._process.pid)
    assert not background.BackgroundCompile.is_busy() and not os.listdir(CODEGEN.code_cache.path())


@needs_posix
def test_a_process_leaves_the_processor_to_the_steps(run_instead):
    run_instead("import time; time.sleep(100)")
    job = background.BackgroundCompile({"a": no_source()})
    process = job._process.pid
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process) == min(19, own + background.PRIORITY)
    assert os.getsid(process) == os.getsid(0)  # Linux shares the processor among sessions first


@needs_posix
def test_a_process_ends_with_the_last_reference_to_its_job(run_instead):
    run_instead("import time; time.sleep(100)")
    job = background.BackgroundCompile({"a": no_source()})
    process, gone = job._process.pid, weakref.ref(job)
    del job
    gc.collect()
    assert gone() is None and not is_alive(process) and not os.listdir(CODEGEN.code_cache.path())


ENDS_MIDWAY = """
import sys, time
from dta_compile.codegen import background
from dta_compile.executable.code import Source
job = background.BackgroundCompile({"a": Source("", (), 0, ())})
print(job._process.pid, flush=True)
if sys.argv[1] != "exit":
    time.sleep(100)
"""


def group_of(leader):
    """The processes of a group that are alive."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended
            continue
        if int(group) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.sample(1)
@needs_posix
@pytest.mark.parametrize("way", [pytest.param("exit", marks=pytest.mark.slow), "at once", "at work"])
def test_no_process_outlives_the_one_that_it_works_for(way, tmp_path):
    """Nor any file: also where one is killed before the other has begun, and while it imports torch."""
    variables = {**os.environ, "PYTHONPATH": ROOT, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", ENDS_MIDWAY, way]
    parent = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    process = int(parent.stdout.readline())
    if way == "at work":
        wait_until(lambda: len(group_of(process)) == 2)
    if way != "exit":
        parent.send_signal(signal.SIGKILL)
    assert parent.wait(60) == (0 if way == "exit" else -signal.SIGKILL)
    parent.stdout.close()
    wait_until(lambda: not is_alive(process) and not group_of(process), seconds=2.0)
    assert not os.listdir(tmp_path / "cache" / "dta")


@needs_posix
def test_work_that_is_killed_says_so_and_leaves_nobody_to_wait_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    job = background.BackgroundCompile({"a": no_source()})
    watching = job._process.pid
    wait_until(lambda: len(group_of(watching)) == 2)
    (working,) = set(group_of(watching)) - {watching}
    os.kill(working, signal.SIGKILL)
    wait_until(job.poll)
    assert job.failure.startswith("the process beside the steps ended (137)") and list(job.missing) == ["a"]
    assert not group_of(watching) and not os.listdir(CODEGEN.code_cache.path())


# What is kept


MODULE = """
import torch
from heavy import lowerings
async_compile = AsyncCompile()
make = torch.empty
kernel_0 = async_compile.cpp_pybinding(["float*"], "text")
kernel_1 = async_compile.cpp_pybinding(["float*"], "text")
async_compile.wait(globals())
class Runner:
    def call(self, args):
        (first,) = args
        kernel_0(first, constant)
        return (make(len(args)),)
runner = Runner()
call = runner.call
"""


def test_of_inductors_module_a_call_needs_little():
    assert kernels(MODULE, "cpp_pybinding") == ["kernel_0", "kernel_1"]
    text, free = needed(MODULE, "call", kernels(MODULE, "cpp_pybinding"))
    assert free == ["constant", "kernel_0"]
    assert "heavy" not in text and "async_compile" not in text and "kernel_1" not in text
    names = {"kernel_0": lambda *_: None, "constant": 1}
    exec(text, names)
    assert names["call"]([torch.ones(1)])[0].shape == (1,)


def test_the_name_of_kept_code_depends_on_all_that_it_was_generated_for(monkeypatch):
    def name(text="text", shape=(2, 3)):
        value = Input(torch.float32, torch.device("cpu"), shape, (3, 1))
        return CODEGEN.code_cache.keys([Source(text, (("torch", 1),), 0, (value,))])[0]

    names = {name(), name("other"), name(shape=(4, 3))}
    with inductor_config.patch({"cpp.simdlen": 1}):
        names.add(name())
    assert name() in names
    monkeypatch.setattr(torch, "get_num_threads", lambda: 61)
    names.add(name())
    assert len(names) == 5


def test_files_that_are_no_code_are_generated_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert CODEGEN.code_cache.find("key") is None
    (tmp_path / "dta" / "key").write_bytes(b"half of a fi")
    assert CODEGEN.code_cache.find("key") is None


class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)


@needs_posix
def test_code_is_neither_read_nor_made_where_others_could_have_put_some(run_instead, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (CODEGEN.code_cache.path() / "key").write_bytes(pickle.dumps(Planted()))
    (CODEGEN.code_cache.path() / "key").chmod(0o600)
    tmp_path.chmod(0o777)
    run_instead("open('planted', 'w')")
    assert CODEGEN.code_cache.find("key") is None
    with pytest.raises(ValueError, match="others may write to"):
        background.BackgroundCompile({"a": no_source()})
    with pytest.raises(ValueError, match="others may write to"):
        CODEGEN._generated("key", no_source())
    assert os.listdir() == ["dta"] and os.listdir("dta") == ["key"]
