"""What of a model each rank holds: parts that make up the whole, read by themselves, and models that cannot be cut."""

from dataclasses import replace

import pytest
import torch
from checkpoints import write_checkpoint
from small_models import SMALL, resize_config

from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import random_weights
from haarkv.models.parallel import Alone, Split
from haarkv.models.weights import checkpoint_tensors
from haarkv.tq_ops.errors import InputError

FOUR = resize_config(SMALL, num_heads=8, num_kv_heads=4)


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        (SMALL, 3, "10 heads cannot be split evenly over 3 ranks"),
        (resize_config(SMALL, num_heads=12, num_kv_heads=4), 3, "4 KV heads can be neither split evenly over 3 ranks"),
        (resize_config(FOUR, intermediate_size=82), 4, "an MLP of 82 columns cannot be split evenly over 4 ranks"),
        (replace(FOUR, vocab_size=3), 4, "a vocabulary of 3 cannot be split over 4 ranks"),
        (read_config("random:qwen3.5-0.8b"), 2, "recurrent state cannot be split over ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(config, size, said):
    with pytest.raises(InputError, match=said):
        Split(config, 0, size)


def assert_is_the_part(part, whole, split):
    tensor_specs, tensors = checkpoint_tensors(split.whole), dict(whole.named_tensors())
    for name, tensor in part.named_tensors():
        assert torch.equal(tensor, tensors[name][split.slices(tensor_specs[name].axes)]), name
        assert tensor.is_contiguous(), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_a_checkpoint(tmp_path, rank):
    folder = write_checkpoint(tmp_path / "m")
    whole, part = load_model(folder, "bfloat16"), load_model(folder, "bfloat16", ranks=Alone(rank, 2))
    split = Split(whole.config, rank, 2)
    assert part.config == split.part
    assert_is_the_part(part.weights, whole.weights, split)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_draws_what_the_whole_random_model_would_hold_there(rank):
    split = Split(FOUR, rank, 4)
    whole, part = (random_weights(FOUR, torch.float32, split=one_split) for one_split in (None, split))
    assert_is_the_part(part, whole, split)
    # The whole tensor is not kept behind a view of it.
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in part.named_tensors())
