"""The house: imports go one way, between modules and between folders, and a folder can be taken in at one look.

Tests stand for themselves: what two of them need is in `tests/support`.

Every import counts, also those under TYPE_CHECKING and inside functions. A name that a folder's `__init__` only passes
on counts as imported from where it is defined. Such an `__init__` stands above its folder, and each file at the top
stands for itself.
"""

import ast
import collections
import functools
import graphlib
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
MOST_FILES = 15


class House:
    """The modules of a package, by dotted name, and what each of them imports."""

    def __init__(self, folder):
        self.folder = folder
        self.files, self.imported, self.passed_on = {}, {}, {}
        for path in sorted(folder.rglob("*.py")):
            parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.files[name], self.imported[name] = path, list(imports(ast.parse(path.read_text())))
            if parts[-1] == "__init__":
                self.passed_on[name] = {one: (module, one) for module, one in self.imported[name] if one}

    def source(self, module, name):
        """The module that `from module import name` needs."""
        origin = self.passed_on.get(module, {}).get(name, (module, name))
        if origin != (module, name) and origin[0] in self.files:
            return self.source(*origin)
        return f"{module}.{name}" if f"{module}.{name}" in self.files else module

    @functools.cached_property
    def needs(self):
        """By module, the other modules of the package that it imports."""
        return {
            name: {self.source(*one) for one in found if one[0] in self.files} - {name}
            for name, found in self.imported.items()
        }

    def room(self, module):
        """Where a module stands: its folder, or by itself at the top and if it lists a folder."""
        path = self.files[module].relative_to(self.folder)
        is_list = path.name == "__init__.py" and bool(self.needs[module])
        return str(path if is_list or len(path.parts) == 1 else path.parent)

    @property
    def rooms(self):
        """By room, the other rooms that its modules import."""
        found = collections.defaultdict(set)
        for module, needed in self.needs.items():
            found[self.room(module)] |= {self.room(other) for other in needed} - {self.room(module)}
        return found

    def reached(self, *folders):
        """The modules of some folders, and all that these import in turn."""
        pending = [
            name for name in self.files if name.startswith(tuple(f"{self.folder.name}.{one}" for one in folders))
        ]
        found = set()
        while pending:
            if (name := pending.pop()) not in found:
                found.add(name)
                pending += self.needs[name]
        return found


def imports(tree):
    """(module, name) for every imported name; the name is empty if it is the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def cycle(needs):
    """Names that import each other in a ring, the first one again at the end; empty if there are none."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


HOUSE = House(ROOT / "dta_compile")


def test_modules_do_not_import_each_other():
    assert not cycle(HOUSE.needs)


def test_folders_do_not_import_each_other():
    assert not cycle(HOUSE.rooms)


# What a folder knows nothing of: compiling ends in `executable/`, and running begins there.
UNKNOWN = {
    "executable": {"passes", "capture", "runtime", "program_cache"},
    "proofs": {"passes", "capture", "runtime", "program_cache", "executable"},
    "runtime": {"passes", "capture", "program_cache"},
}


def test_the_runtime_knows_nothing_of_compiling():
    for folder, unknown in UNKNOWN.items():
        inside = [name for name in HOUSE.files if name.split(".")[1:2] == [folder]]
        assert inside, folder
        imported = {module.removeprefix("dta_compile.") for name in inside for module in HOUSE.needs[name]}
        assert not {one for one in imported if one.split(".")[0] in unknown}, folder


TOOLS = {"cli", "data", "divergence", "estimate", "views"}


def test_nothing_imports_a_tool_but_tools():
    """Nor what runs the command line, and the list of public names, which lends plans their page."""
    inside = {name for name in HOUSE.files if TOOLS & set(name.split(".")[1:2])}
    assert len(inside) > 20
    assert {name for name in HOUSE.files.keys() - inside if HOUSE.needs[name] & inside} == {
        "dta_compile",
        "dta_compile.__main__",
    }


def test_plans_and_rollouts_need_no_torch():
    found = HOUSE.reached("plan", "rollouts")
    assert len(found) > 20
    assert not [name for name in found if any(module.split(".")[0] == "torch" for module, _ in HOUSE.imported[name])]


def test_what_is_compiled_needs_nothing_of_its_compilation():
    found = HOUSE.reached("proofs", "executable")
    assert len(found) > 10
    assert not [name for name in found if name.split(".")[1] in ("passes", "capture", "runtime")]


def dotted(node):
    """The names of `a.b.c`; empty for attributes of other values."""
    if isinstance(node, ast.Attribute):
        return [*path, node.attr] if (path := dotted(node.value)) else []
    return [node.id] if isinstance(node, ast.Name) else []


def private_parts(tree):
    """What a module names of torch that is not public: imported, or as an attribute, but for private operators."""
    names = {f"{module}.{name}" for module, name in imports(tree)}
    names |= {".".join(path) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (path := dotted(node))}
    for name in names:
        of, *path = name.split(".")
        is_private = any(part.startswith("_") and not part.endswith("__") for part in path)
        if (
            of == "torch"
            and "(" not in name
            and (is_private or path[:2] == ["fx", "experimental"])
            and path[0] != "ops"
        ):
            yield name


def test_private_parts_of_torch_stand_in_one_place():
    found = {name: list(private_parts(ast.parse(path.read_text()))) for name, path in HOUSE.files.items()}
    inside = {name for name in found if name.split(".")[1:2] == ["torch_compat"]}
    assert sum(len(found[name]) for name in inside) > 100
    assert not {name: parts for name, parts in found.items() if parts and name not in inside}


def test_folders_can_be_taken_in_at_one_look():
    paths = [*HOUSE.files.values(), *(ROOT / "benchmarks").rglob("*.py")]
    sizes = collections.Counter(path.parent for path in paths)
    assert not {str(folder): size for folder, size in sizes.items() if size > MOST_FILES}


def imported_tests(folder):
    """(file, module) wherever a file of `folder` imports a module of tests from it."""
    modules = {
        ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts)) for path in folder.rglob("test_*.py")
    }
    for path in sorted(folder.rglob("*.py")):
        for module, name in imports(ast.parse(path.read_text())):
            found = modules & {module, f"{module}.{name}"}
            yield from ((str(path.relative_to(folder)), one) for one in found)


def test_no_test_is_imported():
    assert len(list((ROOT / "tests").rglob("test_*.py"))) > 50
    assert not list(imported_tests(ROOT / "tests"))


def test_one_way_leads_behind_a_compiled_callable():
    """And one from drawn programs, whose oracle is written out with those that fail, to run on its own."""
    found = {
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("*.py")
        if {("dta_compile", "records"), ("dta_compile.records", "of")} & set(imports(ast.parse(path.read_text())))
    }
    assert found == {"support/inside.py", "fuzz/oracle.py"}


def test_imported_tests_are_found(tmp_path):
    """As a module, by a name of theirs, from their folder, and inside a function."""
    folder = tmp_path / "tests"
    contents = {
        "plan/test_one.py": "from tests.support.tiny import a\nimport tests.support.tiny\n",
        "plan/test_two.py": "from tests.plan.test_one import b\n",
        "support/tiny.py": "def f():\n    from tests.plan import test_one\n",
        "conftest.py": "import tests.plan.test_two\n",
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert list(imported_tests(folder)) == [
        ("conftest.py", "tests.plan.test_two"),
        ("plan/test_two.py", "tests.plan.test_one"),
        ("support/tiny.py", "tests.plan.test_one"),
    ]


def test_cycles_are_found(tmp_path):
    """Through an `__init__` that passes a name on, TYPE_CHECKING and a function; or between folders alone."""
    package = tmp_path / "pack"
    contents = {
        "__init__.py": "from pack.upper.one import A\n",
        "upper/one.py": "def f():\n    from pack.lower.two import B\n",
        "lower/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack import A\n",
        "lower/three.py": "import pack.upper.four\n",
        "upper/four.py": "import math\n",
    }
    for name, text in contents.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert set(cycle(House(package).needs)) == {"pack.upper.one", "pack.lower.two"}
    (package / "lower/two.py").write_text("")
    assert not cycle(House(package).needs)
    assert set(cycle(House(package).rooms)) == {"upper", "lower"}


def bound_twice(tree):
    """Names that a module gives a value, a function or a class at its top level more than once."""
    names = collections.Counter[str]()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] += 1
            case ast.Assign(targets=targets):
                names.update(part.id for target in targets for part in ast.walk(target) if _is_bound(part))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                names[name] += 1
    return {name for name, count in names.items() if count > 1}


def _is_bound(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def test_a_name_of_a_module_means_one_thing():
    """The later of two constants of one name would silently hold for the functions above it, too."""
    found = {str(path): bound_twice(ast.parse(path.read_text())) for path in (ROOT / "dta_compile").rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}
    assert bound_twice(ast.parse("A, B = 1, 2\ndef f(): return A\nB, C = 3, 4\nf.x = 1\nf.x = 2\n")) == {"B"}
