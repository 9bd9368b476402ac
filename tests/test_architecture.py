"""The house stays as designed: imports go one way, heavy libraries stay in their rooms, op tables agree."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.util import find_spec

import pytest
from places import ORDER, ROOT, module_name, sources

from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.table import OP_NAMES, OpTable

# A room may use those before it; these three stand beside each other and use none of each other.
PEER_ROOMS = {"validation", "benchmarks", "serving"}
ONLY_IN = {
    "triton": ["tq_ops/cuda/"],
    "pypto": ["tq_ops/npu/", "models/qwen3_14b/npu/"],
    "onnx": ["tq_ops/onnx/", "models/qwen3_14b/onnx/", "executors/onnx"],
    "onnxruntime": ["executors/onnx"],
    "transformers": ["tq/hf/"],
    "llama_cpp": [],
    "gguf": ["models/gguf_"],
    "vllm": ["serving/"],
}
TABLES = [reference, CpuOps]
if find_spec("triton"):
    from haarkv.tq_ops.cuda import ops as cuda_ops

    TABLES.append(cuda_ops)


def modules_imported(path):
    """Full names of modules that a file imports, wherever in it, and of what it takes from them: modules as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(path):
    return {module_room(module) for module in modules_imported(path)}


def module_room(module):
    """`haarkv.models.base` -> `models`; of another package its name."""
    first, _, rest = module.partition(".")
    return rest.split(".")[0] if first == "haarkv" and rest else first


def may_import(room, other):
    return ORDER.index(other) <= ORDER.index(room) and (room == other or not {room, other} <= PEER_ROOMS)


def wrong_imports(place, names):
    """Those of the names that the file at a place may not import."""
    room = place.split("/")[0]
    return {
        name
        for name in names
        if name == "lab"
        or (name in ORDER and not may_import(room, name))
        or (name in ONLY_IN and not place.startswith(tuple(ONLY_IN[name])))
    }


def test_imports_go_one_way():
    names = {path.relative_to(ROOT).as_posix(): imported_rooms(path) for path in sources()}
    wrong = {place: wrong_imports(place, imports) for place, imports in names.items()}
    assert len(wrong) > 200
    assert {place: imports for place, imports in wrong.items() if imports} == {}


def test_an_import_the_other_way_would_be_seen():
    assert wrong_imports("tq_ops/table.py", {"models", "codebooks", "triton"}) == {"models", "triton"}
    assert wrong_imports("tq_ops/cuda/ops.py", {"triton", "tq"}) == {"tq"}
    assert wrong_imports("validation/bounds.py", {"lab", "engine"}) == {"lab"}
    assert wrong_imports("serving/limits.py", {"benchmarks", "tq_ops", "vllm"}) == {"benchmarks"}


def of_a_family(name):
    """Whether a name is of what single model families know of themselves: all of `models.families` but their list."""
    return re.fullmatch(r"haarkv\.models\.families(\.(?!FAMILIES$)\w+)?", name) is not None


def test_only_models_know_a_family():
    """Executors, validation and the command see `models.base`, `weights`, `catalog` and the list of families, no family."""
    rooms = ORDER[ORDER.index("models") + 1 :]
    family_imports = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] in rooms
        for module in modules_imported(path)
        if of_a_family(module)
    ]
    assert family_imports == []


def test_the_rule_would_see_a_family():
    assert of_a_family("haarkv.models.families")
    assert of_a_family("haarkv.models.families.read_llama")
    assert not of_a_family("haarkv.models.families.FAMILIES")
    assert not of_a_family("haarkv.models.base.DecoderModel")


def test_the_declaration_is_a_leaf():
    """It imports what a cache must know of a layer, and nothing else of ours."""
    ours = {module for module in modules_imported(ROOT / "models/config.py") if module.startswith("haarkv.")}
    assert {module.rpartition(".")[0] for module in ours} == {"haarkv.tq_ops.kv.recurrent", "haarkv.tq_ops.kv.shapes"}


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("op", OP_NAMES)
def test_op_tables_have_the_signatures_that_models_call(table, op):
    def signature(function):
        parameters = inspect.signature(function, eval_str=True)
        return [
            (p.name, p.annotation) for p in parameters.parameters.values() if p.name != "self"
        ], parameters.return_annotation

    assert signature(getattr(table, op)) == signature(getattr(OpTable, op))


def test_op_names_are_all_of_the_protocol():
    assert set(OP_NAMES) == {name for name in vars(OpTable) if not name.startswith("_")}


def test_the_environment_is_never_read():
    """No environment variables steer the project.

    Others' code is spoken to in the one way it listens to: torch is told to load no device extension, PyPTO where its
    output goes and, while it emits C++, of a toolkit; and CANN's own mark of where it lies is read to say what is
    installed.
    """
    readers = [p for p in sources() if re.search(r"\bos\.environ|\bgetenv", p.read_text(encoding="utf-8"))]
    assert [p.relative_to(ROOT).as_posix() for p in readers] == [
        "tq_ops/npu/folders.py",
        "tq_ops/npu/sim/worker.py",
        "tq_ops/npu/versions.py",
    ]


def test_mypy_leaves_out_kernel_files_only():
    """What is not typed is compiled by triton or pypto."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    left_out = [m for o in settings["tool"]["mypy"]["overrides"] if o.get("ignore_errors") for m in o["module"]]
    assert left_out
    for module in left_out:
        files = [p for p in sources() if fnmatch(module_name(p), module) and p.name != "__init__.py"]
        assert files, module
        for path in files:
            assert {"triton", "pypto"} & imported_rooms(path), path


def test_a_commit_is_checked_by_what_lint_runs():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    tool = r"(?:\$\(BIN\)|\.venv/bin)/([a-z-]+(?: (?:check|format))?)"
    assert set(re.findall(tool, lint)) == set(re.findall(tool, hooks)) == {"ruff check", "ruff format", "mypy", "clang-format"}


def test_everything_imports_without_the_extras():
    """Every module but those of a heavy library, in an interpreter that refuses those libraries."""
    kernels = {f"haarkv.tq_ops.cuda.{p.stem}" for p in sources() if "triton" in imported_rooms(p)}
    modules = [
        module_name(p)
        for p in sources()
        if p.name != "__main__.py"
        and not imported_rooms(p) & {"triton", "pypto", "transformers", "vllm"}
        and not (p.parent.name == "cuda" and any(name in p.read_text(encoding="utf-8") for name in kernels))
        and not p.relative_to(ROOT).as_posix().startswith(tuple(ONLY_IN["onnx"]))
    ]
    code = (
        "import sys\n"
        f"for name in {sorted(set(ONLY_IN) - {'gguf'})!r}: sys.modules[name] = None\n"
        "from importlib import import_module\n"
        f"for name in {modules!r}: import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
