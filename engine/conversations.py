"""More conversations than memory holds: those used last stay there, the others go to disk until they are addressed again."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from haarkv.engine.result import Result
from haarkv.engine.session import Session
from haarkv.engine.text import Chat, context_for
from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.stored import StoredSequence


@dataclass
class Counters:
    """What happened, since the start.

    Attributes:
        damaged: files that could not be read, or belong to another model or cache; they are computed again.
        reused_tokens, computed_tokens: of prompts.
        peak_bytes: of K and V at a time, of what is held and of the sequence at work.
    """

    evicted: int = 0
    restored: int = 0
    damaged: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    peak_bytes: int = 0


class Conversations:
    """Sequences by name, each of which goes on where it ended.

    The whole text of a conversation comes with every call, so a sequence that is lost costs time and never changes a result:
    only tokens that are equal are taken from what is stored. Files are written whole, and every byte of one is checked when it
    is read. A process that is killed leaves the file of an earlier turn, which is a beginning of the later one.

    Args:
        budget: bytes of K and V that may be in memory.
        folder: where sequences go that have no room, and where those of an earlier process are found; None drops them.
        compress: pack their files without loss.
    Raises:
        InputError: the folder cannot be written to.
    """

    def __init__(self, session: Session, budget: int, folder: str | Path | None = None, compress: bool = True) -> None:
        self.session, self.budget, self.compress = session, budget, compress
        self.folder = None if folder is None else Path(folder)
        self.counters = Counters()
        self._held: OrderedDict[str, StoredSequence] = OrderedDict()  # the one used last at the end
        self._unsaved: set[str] = set()
        self._lock = threading.RLock()
        if self.folder is not None:
            try:
                self.folder.mkdir(exist_ok=True)
            except OSError as error:
                raise InputError(f"{folder} cannot hold conversations: {error.strerror}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that are held in memory."""
        return sum(sequence.nbytes for sequence in self._held.values())

    def generate(self, name: str, prompt: Any, *, max_new_tokens: int = 64, **settings: Any) -> Result:
        """Continue a conversation; all that was said before is part of the prompt, as `Session.generate` takes it.

        Raises:
            InputError: as `Session.generate`, or this sequence alone is larger than the budget; the conversation stays as it
                was.
        """
        with self._lock:
            chat_args = {field.name: settings.pop(field.name) for field in fields(Chat) if field.name in settings}
            (ids,) = self.session.encode([prompt], **chat_args)
            limit, most = self.session.config.max_position_embeddings, settings.get("max_context")
            context = context_for([ids], limit, max_new_tokens, most)
            at_work = self._working_bytes(context)
            if at_work > self.budget:
                raise InputError(
                    f"{context:,} tokens take {at_work:,} bytes of K and V, more than the budget of {self.budget:,}; "
                    "raise it, or take a smaller format"
                )
            if name not in self._held and (from_file := self._read(name)):
                self._held[name] = from_file
            try:
                self._make_room(at_work, but=name)
                sequence = self._held.get(name)
                result = self.session.generate([ids], stored=sequence, keep=True, max_new_tokens=max_new_tokens, **settings)
                # The copy that the sequence came from is there until now.
                self.counters.peak_bytes, done = max(self.counters.peak_bytes, at_work + self.nbytes), result.completions[0]
                self.counters.reused_tokens += done.reused_tokens
                self.counters.computed_tokens += done.prompt_tokens - done.reused_tokens
                self._held[name] = result.stored[0]
                self._held.move_to_end(name)
                self._unsaved.add(name)
            finally:  # of a call that is refused, what was said before stays
                self._make_room(0)
            return result

    def save(self) -> None:
        """Write every conversation to the folder; they stay in memory."""
        with self._lock:
            for name in list(self._held):
                self._write(name)

    def forget(self, name: str) -> None:
        """Drop a conversation, and its file."""
        with self._lock:
            self._held.pop(name, None)
            self._unsaved.discard(name)
            if (file := self._file(name)) is not None:
                file.unlink(missing_ok=True)

    def _make_room(self, bytes_: int, but: str | None = None) -> None:
        """Evict those used longest ago, but for one, until this number of bytes fits beside the others."""
        for name in [name for name in self._held if name != but]:
            if self.nbytes + bytes_ <= self.budget:
                return
            self._write(name)
            del self._held[name]
            self.counters.evicted += 1

    def _write(self, name: str) -> None:
        file = self._file(name)
        if file is not None and name in self._unsaved:
            self.session.save_cache(file, self._held[name], compress=self.compress)
        self._unsaved.discard(name)

    def _read(self, name: str) -> StoredSequence | None:
        file = self._file(name)
        if file is None or not file.exists():
            return None
        try:
            sequence = self.session.load_cache(file)
        except InputError as error:
            self.counters.damaged += 1
            warn(f"{error}; the conversation is computed again")
            return None
        self.counters.restored += 1
        return sequence

    def _file(self, name: str) -> Path | None:
        return self.folder and self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"

    def _working_bytes(self, tokens: int) -> int:
        config = self.session.config
        plan, shapes = self.session.plan, config.kv_shapes
        # Beside the cache there is what the answer replaces: rings, tokens in BF16 and states.
        replaced_bytes = round(plan.ring_bytes(shapes, blocks_for(tokens))) + plan.window_bytes(shapes) + config.state_bytes
        return cache_bytes(plan, tokens, shapes, state_bytes=config.state_bytes) + replaced_bytes
