"""What `Session.generate` gives back: texts, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import Repr

from haarkv.engine.drafts import DraftReport
from haarkv.engine.generation import Completion, Timing
from haarkv.engine.ranks import RankMemory
from haarkv.engine.sampling import Sampling
from haarkv.tq_ops.kv.stored import StoredSequence
from haarkv.tq_ops.words import counted

_SHOWN = Repr()
_SHOWN.maxstring = 60
"""Characters of a text in a line that shows a result."""


@dataclass(frozen=True)
class KVUsage:
    """What the KV cache of a run cost, on all ranks together.

    Attributes:
        format: the KV plan in words; of a plain one as `--kv` takes it.
        bytes_per_token: what one more token takes: K and V of all layers and heads with their scales; tokens kept in BF16
            are not counted.
        bytes: allocated in all.
        bf16_bytes: what the same slots would take in bf16.
    """

    format: str
    bytes_per_token: float
    bytes: int
    bf16_bytes: int


@dataclass(frozen=True, repr=False)
class Result:
    """Texts and cost of one `Session.generate`.

    Attributes:
        ranks: what each rank holds, on rank 0; elsewhere nothing.
        stored: the sequences as they are stored, prompt and text, if they were to be kept.
        drafting: what it did, if tokens were drafted.
    """

    texts: list[str]
    completions: list[Completion]
    timing: Timing
    kv: KVUsage
    sampling: Sampling
    ranks: tuple[RankMemory, ...] = ()
    stored: tuple[StoredSequence, ...] = ()
    drafting: DraftReport | None = None

    def __repr__(self) -> str:
        texts = ", ".join(map(_SHOWN.repr, self.texts[:2])) + ", …" * (len(self.texts) > 2)
        tokens = counted(sum(len(done.token_ids) for done in self.completions), "new token")
        return f"Result([{texts}], {tokens}, {self.kv.format}: {self.kv.bytes:,} bytes of KV cache)"
