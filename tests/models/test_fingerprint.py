"""The short word for a model's weights: the same in every dtype and order, another for another model."""

from dataclasses import replace

import torch
from small_models import CONFIGS, small_model

from haarkv.models.catalog import load_model, read_config, stream_tensors
from haarkv.models.checkpoint import random_weights
from haarkv.models.weights import fingerprint

MODEL = small_model(CONFIGS["gqa5_one_kv_head_d128_tied"])
NAMED_TENSORS = dict(MODEL.weights.named_tensors())


def test_it_depends_on_the_numbers_and_names_alone():
    digest = fingerprint(NAMED_TENSORS.items())
    assert len(digest) == 16
    assert fingerprint(reversed(NAMED_TENSORS.items())) == digest
    assert fingerprint((name, tensor.bfloat16()) for name, tensor in NAMED_TENSORS.items()) == digest
    # transformers lists a tied head as one more tensor.
    assert fingerprint([("lm_head.weight", MODEL.weights.lm_head), *NAMED_TENSORS.items()]) == digest


def test_another_model_has_another():
    digest, digests = fingerprint(NAMED_TENSORS.items()), set()
    for name, tensor in NAMED_TENSORS.items():
        for change in (lambda x: x * 1.05, lambda x: x.flip(0)):
            digests.add(fingerprint({**NAMED_TENSORS, name: change(tensor)}.items()))
    renamed_tensors = {name.replace("layers.0", "layers.9"): tensor for name, tensor in NAMED_TENSORS.items()}
    longer = {name: torch.cat([tensor, tensor]) for name, tensor in NAMED_TENSORS.items()}
    digests |= {fingerprint(renamed_tensors.items()), fingerprint(longer.items())}
    assert len(digests) == 2 * len(NAMED_TENSORS) + 2
    assert digest not in digests


def test_a_tied_head_counts_once_and_an_untied_one_counts():
    untied_weights = replace(MODEL.weights, lm_head=MODEL.weights.embedding.clone() * 2)
    assert fingerprint(untied_weights.named_tensors()) != fingerprint(NAMED_TENSORS.items())


def test_tensors_that_come_one_by_one_have_the_fingerprint_of_the_loaded_model():
    """Also where the head is tied to the embedding."""
    tiny = stream_tensors("tiny", read_config("tiny"), torch.bfloat16)
    assert fingerprint(tiny, streamed=True) == fingerprint(load_model("tiny", "float32").weights.named_tensors())
    tied_config = CONFIGS["gqa5_one_kv_head_d128_tied"]
    weights, drawn = random_weights(tied_config, torch.float32), stream_tensors("random:0.6b", tied_config, torch.float32)
    assert fingerprint(drawn, streamed=True) == fingerprint(weights.named_tensors())
