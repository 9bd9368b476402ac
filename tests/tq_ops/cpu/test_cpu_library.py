"""The C interface: who owns what it points to, and what is said where it does not fit."""

import ctypes
import gc
import subprocess
import weakref

import pytest
import torch
from op_tables import CPU, Case, filled, open_table

from haarkv.tq_ops.cpu import build, library
from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cpu.ops import CpuOps


def test_a_structure_keeps_alive_what_it_and_what_is_in_it_point_to():
    def quantizer():
        centroids = torch.randn(16)
        return library.Quantizer(centroids=centroids, planes=(4, 0)), weakref.ref(centroids)

    inner, table = quantizer()
    outer = library.StoreSide(quantizer=inner)
    del inner
    gc.collect()
    assert table() is not None
    assert outer.quantizer.centroids == table().data_ptr()
    assert (outer.quantizer.gains, outer.bf16) == (None, 0)
    del outer
    gc.collect()
    assert table() is None
    with pytest.raises(AssertionError, match="centroid"):
        library.Quantizer(centroid=torch.randn(16))


def test_tables_outlive_the_caches_of_other_modules():
    """Attention after the tables were freed by their owner and their memory was used again."""
    open_table(CPU[0])
    ops, case = CpuOps("portable"), Case("tq4", 64, 2, 1, 8, (20,), (1,))
    kv_cache, batch = filled(case)
    q = torch.randn(1, 2, 64)
    before = ops.paged_attention(q, kv_cache.view(1, batch), 0.125)
    cpu_layout._layout.cache_clear()
    gc.collect()
    noise = [torch.full((64, 64), float("nan")) for _ in range(200)]
    assert torch.equal(ops.paged_attention(q, kv_cache.view(1, batch), 0.125), before)
    del noise


def test_a_library_of_older_sources_is_refused(tmp_path, monkeypatch):
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "old.cpp").write_text("int nothing() { return 0; }")
    old = tmp_path / "old.so"
    subprocess.run([build.compiler(), "-shared", "-fPIC", str(tmp_path / "old.cpp"), "-o", str(old)], check=True)
    monkeypatch.setattr(library, "LIBRARY", old)
    with pytest.raises(library.KernelsMissingError, match=r"older than their sources; .*haarkv\.tq_ops\.cpu\.build"):
        library.load.__wrapped__()


def test_a_library_of_other_headers_is_refused(tmp_path, monkeypatch):
    """A call would hand it a structure that it reads past the end of, or at the wrong places."""
    open_table(CPU[0])
    changed = tmp_path / "calls.h"
    changed.write_bytes(build.INTERFACE[1].read_bytes().replace(b"int32_t half, count;", b"int32_t count, half;"))
    monkeypatch.setattr(build, "INTERFACE", (build.INTERFACE[0], changed))
    with pytest.raises(library.KernelsMissingError, match="older than their sources"):
        library.load.__wrapped__()


LAYOUT = """#include <cstddef>
#include <cstdio>
#include "calls.h"
int main() {
"""


def test_structures_lie_as_the_compiler_lays_them_out(tmp_path):
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    structures = {name: structure for name, structure in library._STRUCTURES.items() if structure._fields_}
    assert len(structures) >= 20
    lines, expected = [], []
    for name, structure in structures.items():
        cname = f"Haarkv{name}" if f"struct Haarkv{name} " in build.INTERFACE[1].read_text() else name
        lines.append(f'printf("{name} %zu\\n", sizeof({cname}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, _ in structure._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({cname}, {field}));')
            expected.append(f"{name}.{field} {getattr(structure, field).offset}")
    (tmp_path / "layout.cpp").write_text(LAYOUT + "\n".join(lines) + "}\n")
    subprocess.run(
        [build.compiler(), "-w", f"-I{build.SOURCES}", str(tmp_path / "layout.cpp"), "-o", str(tmp_path / "layout")],
        check=True,
    )
    run = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == expected
