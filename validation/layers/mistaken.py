"""An executor with a fault in it."""

from __future__ import annotations

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.table import OpTable


class Mistaken(ReferenceExecutor):
    """The reference with a fault in it. It takes itself for an executor of the right model, as a faulty one does."""

    def __init__(self, right: DecoderModel, model: DecoderModel, ops: OpTable) -> None:
        super().__init__(model, ops)
        self.config = right.config
