"""Wheels with a library in them: made of the one without, by the name, tags and digests that pip asks for."""

import base64
import hashlib
import importlib.util
import re
import zipfile

import pytest
from places import ROOT

pytest.importorskip("hatchling", reason="needs the dev extra")

WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
INFO = "haarkv-1.0.dist-info"


@pytest.fixture(scope="module")
def hatch_build():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(content):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def test_a_wheel_with_a_library_lists_every_file_by_its_digest(hatch_build, tmp_path):
    plain = tmp_path / "haarkv-1.0-py3-none-any.whl"
    files = {"haarkv/__init__.py": b"a = 1\n", f"{INFO}/METADATA": b"Name: haarkv\n", f"{INFO}/WHEEL": WHEEL.encode()}
    with zipfile.ZipFile(plain, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        lines = [f"{name},{digest(content)},{len(content)}" for name, content in files.items()]
        archive.writestr(f"{INFO}/RECORD", "\n".join([*lines, f"{INFO}/RECORD,,", ""]))
    library = tmp_path / "kernels.so"
    library.write_bytes(b"\x7fELF GLIBC_2.17 GLIBC_2.34 GLIBC_2.4 GLIBCXX_3.4.99")
    platform = f"manylinux_2_{hatch_build._glibc(library)}_aarch64"
    platform_wheel = hatch_build._with_library(plain, library, platform)
    assert platform_wheel.name == "haarkv-1.0-py3-none-manylinux_2_34_aarch64.whl"
    with zipfile.ZipFile(platform_wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert contents["haarkv/tq_ops/cpu/_kernels.so"] == library.read_bytes()
    assert contents[f"{INFO}/WHEEL"].decode().splitlines()[1:] == ["Root-Is-Purelib: false", f"Tag: py3-none-{platform}"]
    *record_lines, record_line = contents.pop(f"{INFO}/RECORD").decode().splitlines()
    assert record_line == f"{INFO}/RECORD,,"
    assert sorted(record_lines) == sorted(f"{name},{digest(content)},{len(content)}" for name, content in contents.items())


# -- The description ----------------------------------------------------------------------------------------------------------
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("source", [None, "https://example.org/haarkv/"])
def test_every_link_of_the_description_works_where_the_readme_is_not(hatch_build, source):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = [target for _, target in LINK.findall(readme) if ":" not in target]
    assert len(relative) > 10
    page = hatch_build.description(readme, source)
    links = LINK.findall(page)
    assert all(target.startswith("https://") for _, target in links), links
    assert [target for _, target in LINK.findall(readme) if ":" in target] == [t for _, t in links if "example.org" not in t]
    if source is None:
        assert links == []
        assert "One vector" in page or "one vector's walk" in page  # the words stay
    else:
        assert [target.split("/main/")[1] for _, target in links] == relative
        assert [target for sign, target in links if sign] == ["https://example.org/haarkv/raw/main/docs/smollm2.svg"]


def test_the_description_is_what_a_package_gets(hatch_build):
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    core = ProjectMetadata(str(ROOT), PluginManager()).core
    assert core.readme == hatch_build.description((ROOT / "README.md").read_text(encoding="utf-8"), core.urls.get("Source"))
    assert core.readme_content_type == "text/markdown"
    assert core.name == "haarkv"
