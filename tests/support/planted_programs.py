"""Layers of NPU programs with a fault planted in them."""

import sys
from dataclasses import dataclass, fields
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from haarkv.models.qwen3_14b.npu.programs import LayerProgram
from haarkv.tq_ops.npu.program import with_tuned


@dataclass(frozen=True)
class FaultyProgram(LayerProgram):
    """A layer with another text at one place of its kernel, or of a step of attention: then in a simulator of its own.

    Attributes:
        honest, faulty: the text that stands there once, and the one instead of it.
    """

    honest: str = ""
    faulty: str = ""

    @classmethod
    def with_fault(cls, program, honest, faulty):
        """A program with that fault."""
        return cls(**{field.name: getattr(program, field.name) for field in fields(program)}, honest=honest, faulty=faulty)

    def build(self, **options):
        from haarkv.models.qwen3_14b.npu import layer_kernel
        from haarkv.tq_ops.npu.kernels import attention

        if self.honest in Path(layer_kernel.__file__).read_text(encoding="utf-8"):
            return self._faulty_module(layer_kernel).build(self, with_tuned(options))
        steps = self._faulty_module(attention)
        layer_kernel.attend_step, layer_kernel.softmaxes = steps.attend_step, steps.softmaxes
        return super().build(**options)

    def _faulty_module(self, module):
        text = Path(module.__file__).read_text(encoding="utf-8")
        assert text.count(self.honest) == 1, f"the text to spoil is no longer there: {self.honest}"
        faulty_text = text.replace(self.honest, self.faulty)
        # PyPTO reads a kernel's source from its file; the worker's folder goes with the worker.
        file = Path(f"planted_{sha256(faulty_text.encode()).hexdigest()[:16]}.py").absolute()
        file.write_text(faulty_text, encoding="utf-8")
        spec = spec_from_file_location(file.stem, file)
        module = sys.modules[file.stem] = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


NOT_SHRUNK = "what came before a larger maximum does not shrink"
IN_STEPS = {
    "the first head's scales for all": ("key_scales, place, head, shape)", "key_scales, place, 0, shape)"),
    "V's tiles from K": ("matmul(scaled, value_tiles[head]", "matmul(scaled, key_tiles[head]"),
    NOT_SHRUNK: ("self.value[:] = self.value * shrink + weigh(p)", "self.value[:] = self.value + weigh(p)"),
}
"""What a step of attention may do wrong, of two heads or more -> the text to spoil, and its fault."""
