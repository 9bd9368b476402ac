"""The tokens of one forward: their positions in their sequences, and the slots where their K and V are stored.

`PagedSequences` hands out blocks and builds a `Batch` of the next tokens of some sequences, for prefill and decode alike.

>>> paging = PagedSequences(num_blocks=4, block_size=2)
>>> first, second = paging.add(), paging.add()
>>> batch = paging.batch([first, second], [3, 1])
>>> batch.positions.tolist(), batch.query_start_loc.tolist()
([0, 1, 2, 0], [0, 3, 4])
>>> batch.block_table.tolist(), batch.slot_mapping.tolist()
([[0, 1], [2, -1]], [0, 1, 2, 4])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.shapes import SequencePlace


@dataclass(frozen=True)
class Batch:
    """T new tokens of B sequences, ragged.

    Attributes:
        positions: [T] int64, position of each token in its sequence, and for RoPE.
        slot_mapping: [T] int64, slot = block * block_size + offset, where K and V are stored.
        block_table: [B, max_blocks] int32, block numbers of each sequence in order; -1 pads.
        seq_lens: [B] int32, length of each sequence after this forward.
        query_start_loc: [B + 1] int32, index of each sequence's first new token among the T; the last number is T.
        rows: [B] int64, row of each sequence in residual windows, rings and states.
        residual_slots, residual_table: [T] int64 and [B, n] int32, slots and block table of `ResidualBlocks`; None without
            them. A token with a negative slot is not stored in BF16.
    """

    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    rows: Tensor
    residual_slots: Tensor | None = None
    residual_table: Tensor | None = None
    _in_rings: dict[tuple[int, int], Batch] = field(default_factory=dict, init=False, repr=False, compare=False)
    _most: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Batch:
        """A copy on a device; to a GPU in one copy, without waiting."""
        device, tensors = torch.device(device), self.tensors
        if device.type == "cuda" and all(tensor.device.type == "cpu" for tensor in tensors.values()):
            return Batch(**unpack_bytes(upload(pack_bytes(tensors), device), tensors))
        return Batch(**{name: tensor.to(device) for name, tensor in tensors.items()})

    def at_most(self, tokens: int) -> bool:
        """Whether no sequence has more than `tokens` new tokens; waits for the device at most once."""
        if len(self.positions) - len(self.seq_lens) < tokens or not len(self.seq_lens):  # all have one at least
            return True
        if not self._most:
            self._most.append(int(self.query_start_loc.diff().max()))
        return self._most[0] <= tokens

    def of_tokens(self, by_sequence: Tensor) -> Tensor:
        """What [B] says of each sequence, for each token: [T]; waits for no device."""
        new = self.query_start_loc.diff().long()
        return torch.repeat_interleave(by_sequence, new, output_size=len(self.positions))

    def cut(self, most: int) -> Iterator[tuple[Tensor | None, Batch]]:
        """Pieces with at most `most` tokens of each sequence, in order: (indices of the tokens or None for all, piece)."""
        if self.at_most(most):
            yield None, self
            return
        new = self.query_start_loc.diff().long()
        offset = torch.arange(len(self.positions), device=new.device) - self.of_tokens(self.query_start_loc[:-1].long())
        for begin in range(0, int(new.max()), most):
            tokens = ((offset >= begin) & (offset < begin + most)).nonzero().squeeze(1)
            count = (new - begin).clamp(0, most)
            has = count > 0
            lengths = self.seq_lens - (new - begin - count).to(self.seq_lens.dtype)
            query_start_loc = torch.cat([count.new_zeros(1), count[has].cumsum(0)]).to(self.query_start_loc.dtype)
            yield tokens, self._part(tokens, has, lengths[has], query_start_loc)

    def sequences(self) -> Iterator[Batch]:
        """One batch for each sequence, in order."""
        for row, (begin, end) in enumerate(pairwise(self.query_start_loc.tolist())):
            tokens, sequence = slice(begin, end), slice(row, row + 1)
            yield self._part(tokens, sequence, self.seq_lens[sequence], self.query_start_loc[row : row + 2] - begin)

    def _part(self, tokens: Tensor | slice, sequences: Tensor | slice, seq_lens: Tensor, query_start_loc: Tensor) -> Batch:
        return Batch(
            self.positions[tokens], self.slot_mapping[tokens], self.block_table[sequences], seq_lens, query_start_loc,
            self.rows[sequences], None if self.residual_slots is None else self.residual_slots[tokens],
            None if self.residual_table is None else self.residual_table[sequences],
        )  # fmt: skip

    def rectangle(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token index, position and validity, each [B, Q]; shorter rows are padded by repeating the last token."""
        starts, ends = self.query_start_loc[:-1].long(), self.query_start_loc[1:].long()
        steps = torch.arange(int((ends - starts).max()), device=starts.device)
        token = torch.minimum(starts.unsqueeze(1) + steps, ends.unsqueeze(1) - 1)
        return token, self.positions[token], steps < (ends - starts).unsqueeze(1)

    def in_ring(self, blocks: int, block_size: int) -> Batch:
        """The batch with slots and block table of a layer with rings: block j of a sequence is `row * blocks + j % blocks`.

        So a token takes the place of the token `blocks` blocks before it. A token without a slot gets none in the ring.
        Cached; waits for no device.
        """
        key = blocks, block_size
        if key not in self._in_rings:
            block = self.of_tokens(self.rows) * blocks + self.positions // block_size % blocks
            slots = (block * block_size + self.positions % block_size).masked_fill(self.slot_mapping < 0, -1)
            column = torch.arange(self.block_table.shape[1], device=self.rows.device) % blocks
            table = (self.rows.unsqueeze(1) * blocks + column).masked_fill(self.block_table < 0, -1)
            self._in_rings[key] = replace(self, slot_mapping=slots, block_table=table.to(torch.int32))
        return self._in_rings[key]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device; from host to GPU through pinned memory, without waiting."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_ALIGNMENT = 64
"""Tensors copied together begin at multiples of this number of bytes: kernels need pointers at multiples of 16."""


def pack_bytes(tensors: dict[str, Tensor]) -> Tensor:
    """The bytes of tensors in one tensor, each beginning at a multiple of `_ALIGNMENT`."""
    size = sum(-(-tensor.nbytes // _ALIGNMENT) for tensor in tensors.values()) * _ALIGNMENT
    together = torch.empty(size, dtype=torch.uint8)
    for name, part in unpack_bytes(together, tensors).items():
        part.copy_(tensors[name])
    return together


def unpack_bytes(together: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack_bytes`: views with the shapes and dtypes of `like`."""
    parts, begin = {}, 0
    for name, tensor in like.items():
        parts[name] = together[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return parts


_LEAST_ROOM = 4
"""Initial number of blocks in a sequence's table."""


@torch.inference_mode(False)
def _room(blocks: int) -> Tensor:
    """A table that can be written in inference mode and outside of it."""
    return torch.empty(blocks, dtype=torch.int32)


class CacheFullError(InputError):
    """No free block is left."""


class PagedSequences:
    """The bookkeeping of a paged cache, on the host: which blocks and which row each sequence owns.

    Args:
        order: order in which free blocks are handed out; ascending by default.
        num_rows: the most sequences at a time; `num_blocks` by default.
    """

    def __init__(
        self, num_blocks: int, block_size: int, order: Sequence[int] | None = None, num_rows: int | None = None
    ) -> None:
        self.block_size = block_size
        self._free = list(reversed(order if order is not None else range(num_blocks)))
        self._blocks: dict[int, list[int]] = {}
        self._tables: dict[int, Tensor] = {}  # the same blocks as tensors with room for more: a step copies no list
        self._lengths: dict[int, int] = {}
        self._free_rows = list(reversed(range(num_blocks if num_rows is None else num_rows)))
        self._rows: dict[int, int] = {}
        self._next_id = 0

    def add(self, tokens: int = 0) -> int:
        """Begin a sequence and return its id. The caller stores its first `tokens` tokens at `places`.

        Raises:
            CacheFullError: no free row, or too few free blocks; nothing was begun.
        """
        if not self._free_rows:
            raise CacheFullError(f"the KV cache has room for {len(self._rows)} sequences at a time; send fewer prompts")
        sequence = self._next_id
        self._rows[sequence] = self._free_rows.pop()
        self._next_id += 1
        self._blocks[sequence], self._lengths[sequence] = [], 0
        self._tables[sequence] = _room(_LEAST_ROOM)
        try:
            self._reserve([sequence], [tokens])
        except CacheFullError:
            self.free(sequence)
            raise
        self._lengths[sequence] = tokens
        return sequence

    def places(self, sequence: int) -> SequencePlace:
        """A sequence's blocks in order, and its row."""
        return SequencePlace(tuple(self._blocks[sequence]), self._rows[sequence])

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence so far."""
        return self._lengths[sequence]

    def free(self, sequence: int) -> None:
        """End a sequence; its blocks may be handed out again."""
        self._free.extend(reversed(self._blocks.pop(sequence)))
        self._free_rows.append(self._rows.pop(sequence))
        del self._lengths[sequence], self._tables[sequence]

    def take_back(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Drop the newest `counts` tokens of sequences. If this undoes the last `batch`, with sequences in the same order, the
        freed blocks will be handed out in the same order again.
        """
        for sequence, count in reversed(list(zip(sequences, counts, strict=True))):
            length = self._lengths[sequence] - count
            assert min(count, length) >= 0, "tokens that are not there cannot be dropped"
            self._lengths[sequence], blocks = length, self._blocks[sequence]
            while len(blocks) > -(-length // self.block_size):
                self._free.append(blocks.pop())

    def _reserve(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """Give sequences blocks for these lengths: to all sequences, or to none if blocks are missing."""
        new_blocks = [-(-n // self.block_size) - len(self._blocks[s]) for s, n in zip(sequences, lengths, strict=True)]
        if sum(new_blocks) > len(self._free):
            raise CacheFullError(
                f"the KV cache is full: {sum(new_blocks)} more blocks of {self.block_size} tokens are needed, "
                f"{len(self._free)} are free; raise --max-context or send fewer prompts"
            )
        for sequence, count in zip(sequences, new_blocks, strict=True):
            if count > 0:
                self._extend(sequence, [self._free.pop() for _ in range(count)])

    def _extend(self, sequence: int, blocks: list[int]) -> None:
        own_blocks, table = self._blocks[sequence], self._tables[sequence]
        begin, end = len(own_blocks), len(own_blocks) + len(blocks)
        own_blocks += blocks
        if end > len(table):
            self._tables[sequence] = _room(2 * end)
            self._tables[sequence][:begin] = table[:begin]
        self._tables[sequence][begin:end] = torch.tensor(blocks, dtype=torch.int32)

    def batch(self, sequences: Sequence[int], new_tokens: Sequence[int]) -> Batch:
        """Reserve slots for the next tokens of sequences, and return them as a batch.

        Args:
            sequences: ids from `add`, each at most once.
            new_tokens: number of new tokens of each sequence, at least 1.
        Returns:
            the batch on the CPU; `length` of each sequence already includes the new tokens.
        Raises:
            CacheFullError: too few free blocks; nothing was reserved or advanced.
            ValueError: a sequence would get no token.
        """
        if min(new_tokens, default=0) < 1:
            raise ValueError("a batch has at least one new token of each of its sequences")
        self._reserve(sequences, [self._lengths[s] + n for s, n in zip(sequences, new_tokens, strict=True)])
        tables = [self._tables[sequence][: len(self._blocks[sequence])] for sequence in sequences]
        begins = [self._lengths[sequence] for sequence in sequences]
        self._lengths |= {s: begin + count for s, begin, count in zip(sequences, begins, new_tokens, strict=True)}
        size, starts = self.block_size, [0, *accumulate(new_tokens)]
        if starts[-1] == len(sequences):  # a decode step: Python numbers are faster here than several tensors a sequence
            blocks = (self._blocks[s][begin // size] for s, begin in zip(sequences, begins, strict=True))
            slots = torch.tensor([block * size + begin % size for block, begin in zip(blocks, begins, strict=True)])
            positions = torch.tensor(begins)
        else:
            each = [torch.arange(begin, begin + count) for begin, count in zip(begins, new_tokens, strict=True)]
            positions = torch.cat(each)
            block_ids = [table[position // size].long() for table, position in zip(tables, each, strict=True)]
            slots = torch.cat(block_ids) * size + positions % size
        return Batch(
            positions=positions,
            slot_mapping=slots,
            block_table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1),
            seq_lens=torch.tensor([self._lengths[sequence] for sequence in sequences], dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            rows=torch.tensor([self._rows[sequence] for sequence in sequences]),
        )
