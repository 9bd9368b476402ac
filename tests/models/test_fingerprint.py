"""The short word for a model's weights: the same in every dtype and order, another for another model."""

from dataclasses import replace

import torch
from small_models import CONFIGS, small_model

from haarkv.models.catalog import load_model, read_config, stream_tensors
from haarkv.models.checkpoint import random_tensors, random_weights
from haarkv.models.fingerprint import fingerprint, streamed_fingerprint

MODEL = small_model(CONFIGS["gqa5_one_kv_head_d128_tied"])
NAMED = dict(MODEL.weights.named())


def test_it_depends_on_the_numbers_and_names_alone():
    own = fingerprint(NAMED.items())
    assert len(own) == 16
    assert fingerprint(reversed(NAMED.items())) == own
    assert fingerprint((name, tensor.bfloat16()) for name, tensor in NAMED.items()) == own
    # transformers lists a tied head as one more tensor.
    assert fingerprint([("lm_head.weight", MODEL.weights.lm_head), *NAMED.items()]) == own


def test_another_model_has_another():
    own, found = fingerprint(NAMED.items()), set()
    for name, tensor in NAMED.items():
        for change in (lambda x: x * 1.05, lambda x: x.flip(0)):
            found.add(fingerprint({**NAMED, name: change(tensor)}.items()))
    renamed = {name.replace("layers.0", "layers.9"): tensor for name, tensor in NAMED.items()}
    longer = {name: torch.cat([tensor, tensor]) for name, tensor in NAMED.items()}
    found |= {fingerprint(renamed.items()), fingerprint(longer.items())}
    assert len(found) == 2 * len(NAMED) + 2
    assert own not in found


def test_a_tied_head_counts_once_and_an_untied_one_counts():
    untied = replace(MODEL.weights, lm_head=MODEL.weights.embedding.clone() * 2)
    assert fingerprint(untied.named()) != fingerprint(NAMED.items())


def test_tensors_that_come_one_by_one_have_the_fingerprint_of_the_loaded_model():
    """Also where the head is tied to the embedding."""
    tiny = stream_tensors("tiny", read_config("tiny"), torch.bfloat16)
    assert streamed_fingerprint(tiny) == fingerprint(load_model("tiny", "float32").weights.named())
    tied = CONFIGS["gqa5_one_kv_head_d128_tied"]
    loaded = random_weights(tied, torch.float32)
    assert streamed_fingerprint(random_tensors(tied, torch.float32)) == fingerprint(loaded.named())
