"""The C interface: who owns what it points to, and what is said where it does not fit."""

import gc
import subprocess
import weakref

import pytest
import torch
from op_tables import CPU, open_table

from haarkv.tq_ops.cpu import build, library


def test_a_structure_keeps_alive_what_it_and_what_is_in_it_point_to():
    def side():
        centroids = torch.randn(16)
        return library.Side(centroids=centroids, planes=(4, 0)), weakref.ref(centroids)

    inner, table = side()
    outer = library.StoreSide(side=inner)
    del inner
    gc.collect()
    assert table() is not None
    assert outer.side.centroids == table().data_ptr()
    assert (outer.quantizer.gains, outer.bf16) == (None, 0)
    del outer
    gc.collect()
    assert table() is None
    with pytest.raises(AssertionError, match="centroid"):
        library.Side(centroid=torch.randn(16))


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
