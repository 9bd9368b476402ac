"""The forward of families that attend in few launches: packed projections, and ops that are several of a table's in one."""

from haarkv.models.fused.model import FusedModel
from haarkv.models.fused.weights import fuse, unsupported

__all__ = ["FusedModel", "fuse", "unsupported"]
