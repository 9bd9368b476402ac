"""A batch on its way to a device, and the places of a decode step beside those of a prompt."""

import pytest
import torch

from haarkv.tq_ops.kv.batch import PagedSequences, pack_bytes, unpack_bytes


def test_what_is_copied_at_once_comes_apart_as_it_was():
    paging = PagedSequences(num_blocks=40, block_size=4)
    tensors = paging.batch([paging.add() for _ in range(3)], [9, 1, 30]).tensors
    together = pack_bytes(tensors)
    parts = unpack_bytes(together, tensors)
    assert parts.keys() == tensors.keys()
    for name, part in parts.items():
        assert torch.equal(part, tensors[name])
        assert part.dtype == tensors[name].dtype
        assert (part.data_ptr() - together.data_ptr()) % 64 == 0
        part.fill_(1)  # reaches into no other
    assert all((part == 1).all() for part in parts.values())


@pytest.mark.parametrize("block_size", [1, 4, 128])
def test_a_step_takes_the_places_that_a_prompt_would(block_size):
    """Token by token, and some sequences in pieces of several: the same slots, positions, lengths and tables in the end."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2)).tolist()
    lengths = (7, 3, 11)
    by_steps, at_once = (PagedSequences(60, block_size, order=order) for _ in range(2))
    ids = [by_steps.add() for _ in lengths]
    slots_by_sequence = {sequence: [] for sequence in ids}
    for step in range(max(lengths)):
        some = [sequence for sequence, length in zip(ids, lengths, strict=True) if step < length]
        batch = by_steps.batch(some, [1] * len(some))
        assert batch.positions.tolist() == [step] * len(some)
        assert batch.seq_lens.tolist() == [step + 1] * len(some)
        assert batch.query_start_loc.tolist() == list(range(len(some) + 1))
        assert (batch.slot_mapping.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
        for row, sequence in enumerate(some):
            block, slot = int(batch.block_table[row, step // block_size]), int(batch.slot_mapping[row])
            assert slot == block * block_size + step % block_size
            slots_by_sequence[sequence].append(slot)
    whole = at_once.batch([at_once.add() for _ in lengths], list(lengths))
    assert whole.positions.tolist() == [p for length in lengths for p in range(length)]
    for row, (begin, end) in enumerate(
        zip(whole.query_start_loc[:-1].tolist(), whole.query_start_loc[1:].tolist(), strict=True)
    ):
        table = whole.block_table[row].tolist()
        expected = [table[p // block_size] * block_size + p % block_size for p in range(end - begin)]
        assert whole.slot_mapping[begin:end].tolist() == expected
    assert len({slot for slots in slots_by_sequence.values() for slot in slots}) == sum(lengths)
