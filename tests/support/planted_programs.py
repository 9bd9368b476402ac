"""Programs with a fault planted in them, which the checks of emitted text and its execution must find."""

from dataclasses import dataclass
from pathlib import Path

from haarkv.tq_ops.npu.scopes import StoreProgram

_MENDED = "high - pypto.where(pypto.ge(high, 8.0), 16.0, 0.0)"
_FAULTY = "pypto.where(pypto.ge(high, 8.0), high - 16.0, high)"


@dataclass(frozen=True)
class StridedWhere(StoreProgram):
    """The store program with a `where` that takes views into a wider tile: the device's headers read them with its own width.

    PyPTO's interpreter finds it right. To be compiled in a simulator of its own, which is then closed: the fault stays in the
    worker process.
    """

    name: str = "strided_where"

    def build(self, **options):
        from haarkv.tq_ops.npu.kernels import store_kernel, tq4

        text = Path(tq4.__file__).read_text(encoding="utf-8")
        assert text.count(_MENDED) == 1, "the line to spoil is no longer there"
        faulty = {"__name__": tq4.__name__}
        exec(compile(text.replace(_MENDED, _FAULTY), tq4.__file__, "exec"), faulty)
        store_kernel.quantize = faulty["quantize"]
        return super().build(**options)
