import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(program):
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_planning_imports_no_torch():
    program = (
        "import sys\nfrom dta_compile.plan import balance, plan\n"
        "made = plan([[1, 2, 3], [1, 2], [4]], memory_budget=9, bytes_per_token=1, kv_bytes_per_token=1)\n"
        "made.tree, str(made), balance([[1], [2]], 2)\n"
        "assert 'torch' not in sys.modules"
    )
    run(program)


def test_streaming_imports_no_torch():
    run(
        "import sys\nfrom dta_compile import RolloutTree\nimport benchmarks.streaming\n"
        "tree = RolloutTree()\ntree.add([1, 2])\ntree.take(2, rows=1)\n"
        "assert 'torch' not in sys.modules"
    )
