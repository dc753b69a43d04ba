"""The cache of analysed programs: a hit is a miss but for its time, and nothing that could differ is a hit.

What another process does is done here by compiling anew; one test has another process.
"""

import concurrent.futures
import dataclasses
import logging
import lzma
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

import pytest
import torch

import dta_compile
from dta_compile.executable.chunk import ChunkGraphs
from dta_compile.program_cache import cache, files, key, pickles
from tests.support.inside import inside
from tests.support.tiny import (
    PACKED_IDS,
    SEGMENTS,
    SMALL_CHUNKS,
    BareLM,
    StatedLM,
    after,
    shared_ids,
    weighted,
)

IDS = shared_ids()
MASK = torch.ones(5, 9, dtype=torch.bool)
MASK[1, 6:] = MASK[3, 8:] = False


class SmallLM(BareLM):
    """One attention, and what attributes of the model say."""

    def __init__(self):
        super().__init__()
        self.scale, self.function = 1.0, torch.tanh

    def forward(self, ids, mask=None):
        return self.function(super().forward(ids, mask) * self.scale)


class OfTwoBatches(SmallLM):
    """Batches of different sizes in one function, and a tensor made of Python's numbers."""

    def forward(self, ids, others):
        table = torch.tensor([0.25, 0.5, 2.0] * 11, dtype=torch.float64)[:31]
        return torch.cat([(super(OfTwoBatches, self).forward(one) * table).flatten() for one in (ids, others)])


class OfCodebooks(SmallLM):
    """Ids `[B, S, K]`: the passes make K a constant, under a guard."""

    def forward(self, ids, mask=None):
        return self.head(self.mix(self.embedding(ids).sum(2)))


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """The folder of programs, in use."""
    monkeypatch.setattr(cache, "open_folder", files.open_folder)
    return tmp_path / "programs"


@pytest.fixture
def compiled(tmp_path):
    """Compiles as a new process would."""

    def compile_anew(model, **options):
        torch._dynamo.reset()
        options = {**SMALL_CHUNKS, "cache_dir": tmp_path, "verify": "off", **options}
        return torch.compile(model, backend="dta", options=options)

    return compile_anew


def was_found(compiled):
    return cache.FOUND in inside(compiled).newest.executable.seconds


def step(compiled, model, *args, real=None):
    """Outputs where they are of real tokens, and gradients."""

    def run():
        out = compiled(*args)
        out = out if real is None else torch.where(real[..., None], out, 0)
        weighted(out).backward()
        return out.detach()

    out, found = after(model, run)
    return {"out": out, **found}


def assert_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert (actual[name] is expected[name] is None) or torch.equal(actual[name], expected[name]), name


# Hits

CASES = {
    "padded": (SmallLM, (IDS, MASK), MASK),
    "stated": (StatedLM, (PACKED_IDS, SEGMENTS), SEGMENTS > 0),
    "two batches": (OfTwoBatches, (IDS, shared_ids(3, 7, seed=3)), None),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_a_program_that_was_found_does_what_the_analysed_one_does(case, compiled):
    make, args, real = CASES[case]
    model = make()
    first = compiled(model, verify="auto")
    expected = step(first, model, *args, real=real)
    assert not was_found(first)
    second = compiled(model, verify="auto")
    actual = step(second, model, *args, real=real)
    assert was_found(second)
    assert_bits(actual, expected)
    known, found = (dta_compile.last_plan(one) for one in (first, second))
    assert found.schedule == known.schedule
    assert found.estimates.self_check is not None


def test_reports_say_what_was_found(compiled, tmp_path, monkeypatch):
    model = SmallLM()
    monkeypatch.setenv("DTA_CACHE_DIR", str(tmp_path))
    plain = dta_compile.explain(model, IDS)
    torch._dynamo.reset()
    report = dta_compile.explain(model, IDS)
    assert cache.FOUND in report.text and cache.FOUND not in plain.text
    assert (report.regions, report.attention) == (plain.regions, plain.attention)
    assert (report.prefix_key, report.frontier) == (plain.prefix_key, plain.frontier)


def test_another_process_finds_it(compiled, tmp_path):
    code = """if True:
    import sys, torch
    torch.set_num_threads(1)
    from tests.program_cache import test_cache as test
    model = test.SmallLM()
    options = {**test.SMALL_CHUNKS, "cache_dir": sys.argv[1], "verify": "off"}
    compiled = torch.compile(model, backend="dta", options=options)
    found = test.step(compiled, model, test.IDS, test.MASK, real=test.MASK)
    torch.save((found, test.was_found(compiled)), sys.argv[2])
    """
    model = SmallLM()
    expected = step(compiled(model), model, IDS, MASK, real=MASK)
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "result")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    actual, found = torch.load(tmp_path / "result")
    assert found
    assert_bits(actual, expected)


def test_first_sizes_may_be_others(compiled):
    model = SmallLM()
    step(compiled(model), model, IDS)
    ids = shared_ids(3, 12, seed=2)
    second = compiled(model)
    actual = step(second, model, ids)
    assert was_found(second)
    torch.testing.assert_close(actual, step(model, model, ids))


def test_guards_that_passes_left_are_made_again(compiled):
    """Without them, the program for two codebooks would run for three."""
    model = OfCodebooks()
    two, three = torch.stack([IDS, IDS.flip(1)], -1), torch.stack([IDS, IDS.flip(1), IDS], -1)
    first = compiled(model)
    step(first, model, two)
    second = compiled(model)
    torch.testing.assert_close(step(second, model, two), step(model, model, two))
    assert was_found(second)
    torch.testing.assert_close(step(second, model, three), step(model, model, three))
    assert len(inside(second).engines) == 2
    assert not was_found(second)  # what is kept has a guard that does not hold


def test_pieces_of_generated_code_are_kept(compiled, monkeypatch):
    model, sources = SmallLM(), []

    def interpreted(source):
        sources.append(source)
        raise RuntimeError("no compiler")

    monkeypatch.setattr("dta_compile.codegen.generated.generate", interpreted)
    monkeypatch.setattr("dta_compile.codegen.code_cache.find", lambda key: None)
    first = compiled(model, codegen="inductor")
    expected, pieces = step(first, model, IDS), list(sources)
    sources.clear()
    second = compiled(model, codegen="inductor")
    assert_bits(step(second, model, IDS), expected)
    assert was_found(second)
    assert sources == pieces and pieces
    joint = inside(second).newest.executable.joint
    kept = {*joint.generated.pieces["forward"]}
    called = {one for kind in joint.kinds for _, one in kind.forward.names}
    assert kept and kept <= called


# Misses


class Described(Exception):
    """In the place of the passes."""


@pytest.fixture
def described(compiled, monkeypatch):
    """The text by which a program is looked up; raises `NotDescribed` if there is none."""
    found = []

    def describe(program, options):
        try:
            found.append(key.description(program, options.skip_passes))
        except key.NotDescribed as reason:
            found.append(reason)
        raise Described

    monkeypatch.setattr("dta_compile.backend.analysed", describe)

    def text(change=lambda model: None, *args, **options):
        model = SmallLM()
        change(model)
        with pytest.raises(Exception, match="Described"):
            compiled(model, **options)(IDS, *args)
        text = found.pop()
        if isinstance(text, key.NotDescribed):
            raise text
        return text

    return text


def _set(**attributes):
    return lambda model: [setattr(model, name, value) for name, value in attributes.items()]


CHANGES = {
    "a number": (_set(scale=0.5), {}),
    "a function": (_set(function=torch.sigmoid), {}),
    "a dtype": (lambda model: model.float(), {}),
    "frozen weights": (lambda model: model.head.requires_grad_(False), {}),
    "a pass": (lambda model: None, {"skip_passes": ["in_place"]}),
    "generated code": (lambda model: None, {"codegen": "inductor"}),
}


def test_whatever_the_passes_read_is_described(described, monkeypatch):
    same = described()
    assert described() == same
    found = {name: described(change, **options) for name, (change, options) in CHANGES.items()}
    found["a mask"] = described(lambda model: None, MASK)
    with torch.no_grad():
        found["no gradients"] = described()
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = described()
    for what, name, value in (
        (torch, "__version__", "2.13.1"),
        (key, "our_source", lambda: "other code"),
        (torch.backends.opt_einsum, "strategy", "greedy"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(what, name, value)
            found[name] = described()
    assert [name for name, text in found.items() if text == same] == []
    assert len(set(found.values())) == len(found)
    assert described() == same


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


LIBRARY = torch.library.Library("dta_tests_cache", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
torch.library.impl("dta_tests_cache::twice", "CompositeExplicitAutograd", lambda x: x * 2, lib=LIBRARY)
torch.library.register_fake("dta_tests_cache::twice", lambda x: x * 2, lib=LIBRARY)


@pytest.mark.parametrize("function", [Doubled.apply, torch.ops.dta_tests_cache.twice], ids=["function", "operator"])
def test_what_others_may_change_is_not_kept(function, described):
    with pytest.raises(key.NotDescribed, match="a call of"):
        described(_set(function=function))


@pytest.mark.parametrize(("namespace", "kind"), [("aten", "FRAGMENT"), ("dta", "FRAGMENT"), ("aten", "IMPL")])
def test_what_others_do_in_torchs_namespaces_or_ours_is_not_kept(namespace, kind, described):
    same = described()
    with torch.library._scoped_library(namespace, kind) as library:
        if kind == "FRAGMENT":
            library.define("tests_twice(Tensor x) -> Tensor")
        name = "selu" if kind == "IMPL" else "tests_twice"
        library.impl(name, lambda x: x * 2, "CompositeImplicitAutograd", allow_override=True)
        with pytest.raises(key.NotDescribed, match=f"{namespace}::{name} is registered at .*library.py"):
            described()
    assert described() == same


def test_defaults_of_torchs_functions_are_described(described, monkeypatch):
    change = _set(function=torch.nn.functional.normalize)
    same = described(change)
    monkeypatch.setattr(torch.nn.functional.normalize, "__defaults__", (3.0, 1, 1e-12, None))
    assert described(change) != same


def test_rules_that_were_registered_for_torchs_operators_are_no_part_of_the_text(described, monkeypatch):
    monkeypatch.setattr(key, "REGISTERED", {torch.ops.dta_tests_cache.twice.default})
    described()
    monkeypatch.setattr(key, "REGISTERED", {torch.ops.aten.tanh.default})
    with pytest.raises(key.NotDescribed, match="token rules"):
        described()


def test_functions_are_what_their_names_say(monkeypatch):
    assert key.is_known_function(torch.nn.functional.gelu)
    assert key.is_known_function(torch.nn.functional.softmax)
    assert key.is_known_function(dta_compile.attention)

    def softmax(x):
        return x

    softmax.__module__, softmax.__qualname__ = "torch.nn.functional", "softmax"
    assert not key.is_known_function(softmax)
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    assert not key.is_known_function(torch.nn.functional.softmax)  # it is somebody else's code


def test_nothing_is_kept_where_that_is_said(compiled, programs, monkeypatch, tmp_path):
    compiled(SmallLM(), cache_dir="off")(IDS)
    assert not programs.exists()
    monkeypatch.setenv("DTA_DEBUG", str(tmp_path / "listings"))
    monkeypatch.setattr(cache, "description", lambda *args: pytest.fail("listings would be missing"))
    compiled(SmallLM(), skip_passes=["codegen", "in_place"])(IDS)
    assert not programs.exists() and any((tmp_path / "listings").iterdir())


# Files


def the_file(programs):
    (path,) = programs.iterdir()
    return path


def test_a_file_that_cannot_be_used_is_written_anew(compiled, programs):
    model = SmallLM()
    expected = step(compiled(model), model, IDS)
    path = the_file(programs)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    again = compiled(model)
    assert_bits(step(again, model, IDS), expected)
    assert not was_found(again)
    entry = entry_of(path)
    kept = entry.read()
    entry.write(kept[: len(kept) // 2])
    again = compiled(model)
    assert_bits(step(again, model, IDS), expected)
    assert not was_found(again)
    assert the_file(programs).stat().st_size == pytest.approx(len(whole), rel=0.01)


def entry_of(path):
    """The entry whose file this is."""
    entry, start = files.ProgramFile(path.parent, ""), len(files.FORMAT) + files.HASH
    entry.path, entry.described = path, path.read_bytes()[start : start + files.HASH]
    return entry


def test_files_are_compared_as_a_whole(compiled, programs, monkeypatch):
    """No name is trusted to be of one description, and no torn file is taken for a whole one."""
    model = SmallLM()
    compiled(model)(IDS)
    entry = entry_of(the_file(programs))
    kept, described = entry.read(), entry.described
    whole = entry.path.read_bytes()

    def passes(*args, **kwargs):
        raise Described

    monkeypatch.setattr(cache, "run_passes", passes)

    def is_used():
        try:
            compiled(model)(IDS)
        except Exception as error:
            assert "Described" in str(error)
            return False
        return True

    assert is_used()
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    for torn in (b"", bytes(flipped)):
        entry.path.write_bytes(torn)
        assert not is_used()
        assert not entry.path.exists()
    for other, data in ((described[::-1], kept), (described, b""), (described, pickles.to_bytes("text"))):
        entry.described = other
        entry.write(data)
        assert not is_used()
        assert not entry.path.exists()
    entry.described = described
    entry.write(kept)
    assert is_used()


def test_only_known_classes_are_read(tmp_path):
    for value in (pathlib.Path(tmp_path), subprocess.Popen, os.system, logging.getLogger("x")):
        with pytest.raises(pickles.NotKept):
            pickles.from_bytes(pickle.dumps(value))


def test_what_rows_have_in_common_is_kept_once():
    def chunk(layers):
        rows = [(f"l.{i}.{i % 3:03}", 3 * i, i % 5 == 0, -0.0 if i % 2 else 0.0, (1,) * (i % 3)) for i in range(layers)]
        fields = dict.fromkeys((field.name for field in dataclasses.fields(ChunkGraphs)), ())
        return ChunkGraphs(**{**fields, "stages": tuple(rows)})

    kept = [pickles.to_bytes(chunk(layers)) for layers in (30, 240)]
    assert repr(pickles.from_bytes(kept[1])) == repr(chunk(240))
    few, many = (len(lzma.compress(data)) for data in kept)
    assert many < 1.2 * few


def test_constants_are_kept_by_value():
    table = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).t()
    for value in (table, torch.empty(0), torch.tensor(3), torch.tensor([1 + 2j]).conj()):
        again = pickles.from_bytes(pickles.to_bytes(value))
        assert torch.equal(again, value) and (again.dtype, again.stride()) == (value.dtype, value.stride())
    with pytest.raises(pickles.NotKept):
        pickles.to_bytes(torch.empty(2**23))


def test_folders_that_others_may_write_to_are_not_used(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "dta_compile")
    (tmp_path / "programs").mkdir(mode=0o700)
    assert files.open_folder(tmp_path) == tmp_path / "programs"
    (tmp_path / "programs").chmod(0o770)
    assert files.open_folder(tmp_path) is None
    assert files.open_folder(tmp_path) is None
    assert caplog.text.count("others may write") == 1
    (tmp_path / "programs").chmod(0o700)
    if os.getuid():  # what is root's may be anybody's
        monkeypatch.setattr(os, "getuid", lambda: -1)
        assert files.open_folder(tmp_path) is None


@pytest.mark.parametrize(
    "planted",
    [
        "mkdir -m 777 cache; ln -s {ours} cache/programs",
        "mkdir cache; ln -s {ours} cache/programs",
        "ln -s {ours} cache",
        "mkdir -m 777 way; ln -s way/cache cache",
        "mkdir -m 777 -p cache/programs",
    ],
)
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can be another user")
def test_what_another_user_planted_is_not_used(planted):
    with tempfile.TemporaryDirectory() as name:
        shared, ours = pathlib.Path(name), pathlib.Path(name) / "ours"
        ours.mkdir(mode=0o700)
        shared.chmod(0o1777)
        assert files.open_folder(shared / "own") == shared.resolve() / "own" / "programs"  # as in /tmp
        subprocess.run(["sh", "-c", planted.format(ours=ours)], cwd=shared, user=65534, group=65534, check=True)
        if (shared / "way").exists():
            (shared / "way" / "cache" / "programs").mkdir(mode=0o700, parents=True)
        assert files.open_folder(shared / "cache") is None


def test_folders_on_the_way_that_others_may_write_to_are_not_gone_through(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to("shared/../shared/below")
    assert files.open_folder(tmp_path / "link") == tmp_path.resolve() / "shared" / "below" / "programs"
    (tmp_path / "shared").chmod(0o777)
    assert files.open_folder(tmp_path / "link") is None
    (tmp_path / "loop").symlink_to("loop")
    assert files.open_folder(tmp_path / "loop") is None


def test_files_that_others_may_have_written_are_not_read(tmp_path):
    entry = files.ProgramFile(files.open_folder(tmp_path), "text")
    entry.write(b"part")
    assert entry.read() == b"part"
    assert entry.path.stat().st_mode & 0o777 == 0o600
    entry.path.chmod(0o620)
    with pytest.raises(ValueError, match="others"):
        entry.read()


def test_there_need_not_be_a_folder(compiled, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert files.open_folder(tmp_path / "file") is None
    assert files.ProgramFile(tmp_path / "nowhere", "text").read() is None
    with pytest.raises(OSError):
        files.ProgramFile(tmp_path / "nowhere", "text").write(b"")


def test_those_that_were_not_read_for_longest_make_room(tmp_path, monkeypatch):
    folder = files.open_folder(tmp_path)
    entries = [files.ProgramFile(folder, str(i)) for i in range(5)]
    abandoned = folder / "1.00.tmp"
    abandoned.write_bytes(b"")
    os.utime(abandoned, (0, 0))
    monkeypatch.setattr(files, "MOST_BYTES", 4500)
    for i, entry in enumerate(entries[:4]):
        entry.write(b"x" * 900)
        os.utime(entry.path, (10_000 + i, 10_000 + i))
    entries[0].touch()
    entries[4].write(b"x" * 900)
    assert [entry.path.exists() for entry in entries] == [True, False, True, True, True]
    assert not abandoned.exists()
    with pytest.raises(OSError, match="too many"):
        entries[0].write(b"x" * 4000)


def test_several_may_write_and_read_at_once(tmp_path):
    folder = files.open_folder(tmp_path)
    parts = [bytes([i]) * 400_000 for i in range(4)]
    files.ProgramFile(folder, "text").write(parts[0])

    def work(number):
        entry = files.ProgramFile(folder, "text")
        for _ in range(30):
            entry.write(parts[number])
            assert entry.read() in parts

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(work, range(4)))
    assert [path.suffix for path in folder.iterdir()] == [files.SUFFIX]
