"""CONTRIBUTING.md lists every file that a new format, model family or executor touches: nothing else knows them by name."""

import ast
import re
import tomllib
from fnmatch import fnmatch
from functools import cache

import pytest
from places import ROOT, sources

from haarkv.executors import catalog
from haarkv.models.families import FAMILIES
from haarkv.tq_ops import formats

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = {path: path.read_text(encoding="utf-8") for path in sources()}
parse_source = cache(ast.parse)
FORMAT, FAMILY, EXECUTOR = "Add a KV format", "Add a model family", "Add an executor"
# The default, and the two that are no formats but what formats are measured against.
COMMON = {"tq4", "bf16", "fp32"}
# What is measured, tried or checked is chosen by name: a new format or executor works without being there.
CHOOSES = (
    "benchmarks/*",
    "validation/planning/search.py",
    "validation/planning/auto.py",
)
# llama.cpp has names of its own, and some are also a family's. The page says where a family that it runs is added.
LLAMA_CPP = ("models/gguf_metadata.py", "models/gguf_source.py")
# Tables of signs and levels are called after the format that brought them.
TABLES = ("codebooks/*",)


def listed_patterns(section):
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)


def allowed_places(section, *more):
    patterns = [entry.replace("NAME", "*") for entry in listed_patterns(section)]
    return lambda place: any(fnmatch(place, pattern) for pattern in (*patterns, *more))


def texts(node):
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def place(path):
    return path.relative_to(ROOT).as_posix()


def name_lists(tree, names):
    """Tuples, lists, sets and dictionaries that hold two or more of the names."""
    for node in ast.walk(tree):
        elements = (
            node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else node.keys if isinstance(node, ast.Dict) else []
        )
        listed_names = {n.value for n in elements if isinstance(n, ast.Constant)} & names
        if len(listed_names) > 1:
            yield listed_names


@pytest.mark.parametrize("section", [FORMAT, FAMILY, EXECUTOR])
def test_at_most_eight_files_and_they_exist(section):
    files = listed_patterns(section)
    assert 4 <= len(files) <= 8
    assert len(set(files)) == len(files)
    for file in files:
        assert list(ROOT.glob(file.replace("NAME", "*"))), file


def elsewhere(found_in, is_allowed):
    """Place -> what `found_in` finds in the file, of files that are not allowed to have it."""
    findings = {place(path): found_in(text) for path, text in SOURCES.items()}
    return {where: what for where, what in findings.items() if what and not is_allowed(where)}


def test_only_listed_files_know_a_format_by_name():
    names = set(formats.names()) - COMMON
    assert elsewhere(lambda text: texts(parse_source(text)) & names, allowed_places(FORMAT, *CHOOSES, *TABLES)) == {}


def test_only_listed_files_know_a_model_type():
    assert (
        elsewhere(lambda text: texts(parse_source(text)) & set(FAMILIES), allowed_places(FAMILY, *CHOOSES, *LLAMA_CPP)) == {}
    )
    assert f"`{LLAMA_CPP[0]}`" in PAGE.split(f"## {FAMILY}\n")[1].split("\n## ")[0]


def test_only_the_catalog_imports_an_executor():
    others = set(catalog.NAMES) - {"reference"}
    imports = re.compile(r"haarkv\.executors\.(\w+)")
    assert elsewhere(lambda text: set(imports.findall(text)) & others, allowed_places(EXECUTOR, *CHOOSES)) == {}


def test_only_listed_files_have_a_list_of_executors():
    names = set(catalog.NAMES)
    assert elsewhere(lambda text: list(name_lists(parse_source(text), names)), allowed_places(EXECUTOR, *CHOOSES)) == {}


def test_what_the_tests_leave_out_has_a_command():
    """Each marker that `make test` deselects is run by the command that its description names."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    descriptions = dict(marker.split(": ", 1) for marker in options["markers"])
    left_out = re.findall(r"not (\w+)", options["addopts"])
    assert len(left_out) > 5
    for marker in left_out:
        command = re.search(r"`make ([\w-]+)", descriptions[marker])
        target = command[1] if command else f"test-{marker}"
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert re.search(rf"-m '?[\w ]*\b{marker}\b", recipe[1]), marker
        assert f'"make {target} ' in makefile, target


def test_the_rules_would_see_names_elsewhere():
    assert len(SOURCES) > 200
    assert set(elsewhere(lambda text: "KVSpec" in text, allowed_places(FORMAT))) > {"tq/loading.py"}
    tree = ast.parse('kv = {"q4_0": 1}\nwho = ("cpu", "npu")\nfine = ("cpu",)')
    assert texts(tree) >= {"q4_0"}
    assert list(name_lists(tree, set(catalog.NAMES))) == [{"cpu", "npu"}]
    assert not allowed_places(FORMAT)("executors/npu.py")
    assert allowed_places(FORMAT)("tq_ops/formats/ggml.py")
    assert not allowed_places(EXECUTOR)("tq/options.py")
