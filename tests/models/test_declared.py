"""Families with the tensor names of a Llama and another activation, norm or window: right on an executor, or refused by name.

A path that went by names would run each of them as a Llama, without an error. Oracle: transformers' own model of such a kind.
"""

from dataclasses import replace
from itertools import product

import bounds
import pytest
import torch
import transformers
from at_length import MORE_CUDA, rest
from transformers_judge import draw_weights

from haarkv.executors import catalog
from haarkv.executors.base import verify
from haarkv.models.base import DecoderModel
from haarkv.models.caches import new_cache
from haarkv.models.catalog import load_model
from haarkv.models.config import (
    Activation,
    Attention,
    Dense,
    Experts,
    Layer,
    ModelConfig,
    Norm,
    Rope,
    dense_layers,
    unknown_part,
)
from haarkv.models.weights import checkpoint_shapes
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec

SHAPE = {
    "vocab_size": 300, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
TOKENS = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(1))


def llama(folder, **entries):
    """A transformers model of Llama's class, saved, and as it declares itself here."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE | entries)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(theirs)
    config.hidden_act = "silu"
    theirs.save_pretrained(folder)
    return theirs, load_model(folder)


def declared(model, change):
    """The same tensors, declared otherwise."""
    config = replace(model.config, layers=tuple(change(layer) for layer in model.config.layers))
    return DecoderModel.of(config, model.weights)


def other_activation(folder):
    theirs, model = llama(folder, hidden_act="gelu_pytorch_tanh")
    return theirs, declared(model, lambda layer: replace(layer, mlp=Dense(layer.mlp.width, "gelu_tanh")))


def other_norm(folder):
    """Norms multiply with 1 + w."""
    theirs, model = llama(folder)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("norm.weight"):
                parameter += 1.0
    one_more = declared(model, lambda layer: replace(layer, norm=Norm(layer.norm.eps, plus_one=True)))
    weights = one_more.weights
    layers = tuple(w.changed(lambda name, x: x.float() + 1.0 if name.endswith("norm") else x) for w in weights.layers)
    return theirs, replace(one_more, weights=replace(weights, layers=layers, final_norm=weights.final_norm.float() + 1.0))


def window(folder):
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SHAPE | {"sliding_window": 17})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(theirs)
    theirs.save_pretrained(folder)
    return theirs, load_model(folder)


def part_of_a_head(folder):
    """RoPE turns half of each head; the oracle is a Llama whose other frequencies are 0."""
    theirs, model = llama(folder)
    rotary = theirs.model.rotary_emb
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    # Half-split over all 64 coordinates against half-split over the first 32: the same pairs in another order.
    order = torch.cat([torch.arange(16), torch.arange(32, 48), torch.arange(16, 32), torch.arange(48, 64)])
    rotary.inv_freq = torch.cat([frequencies, torch.zeros(16)])
    model = declared(
        model, lambda layer: replace(layer, mixer=replace(layer.attention, rope=Rope(layer.attention.rope.theta, 32)))
    )
    inverse = order.argsort()

    def permuted(name, x):
        return x.view(-1, 64, x.shape[1])[:, inverse.argsort()].reshape(x.shape) if name in ("q_proj", "k_proj") else x

    layers = tuple(weights.changed(permuted) for weights in model.weights.layers)
    return theirs, replace(model, weights=replace(model.weights, layers=layers))


PLANTED = {make.__name__: make for make in (other_activation, other_norm, window, part_of_a_head)}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = PLANTED[name](tmp_path_factory.mktemp(name))
        return made[name]

    return get


LONG, SHORT = (30, 50, 60), (19, 22, 24)
"""Where a prompt's two chunks end, and the steps after it; the short one is for interpreters, and longer than the window."""


def logits(executor, config, kv, ends=LONG):
    """After each token: a prompt in two chunks, then steps."""
    first, second, last = ends
    cache, paging = new_cache(config, KVSpec(kv).plan(config.num_layers), sequences=1, tokens=128, device=executor.device)
    sequence, found = paging.add(), []
    for begin, end in [(0, first), (first, second), *((at, at + 1) for at in range(second, last))]:
        batch = paging.batch([sequence], [end - begin]).to(executor.device)
        found.append(verify(executor, TOKENS[begin:end].to(executor.device), batch, cache).cpu())
    return torch.cat(found)


@pytest.mark.parametrize("name", PLANTED)
def test_it_has_the_tensors_of_a_llama(planted, name):
    model = planted(name)[1]
    plain = {".".join(key.split(".")[3:]) for key in checkpoint_shapes(model.config) if ".layers.0." in key}
    assert len(plain) == 9


@pytest.mark.parametrize("name", PLANTED)
def test_the_reference_runs_what_is_declared(planted, name):
    theirs, model = planted(name)
    with torch.inference_mode():
        expected = theirs(TOKENS[None]).logits[0]
    ours = logits(catalog.create("reference", model, KVSpec("fp32").plan(2)), model.config, "fp32")
    scale = expected.std().clamp(min=1.0)
    assert float((ours - expected).abs().max() / scale) <= bounds.TRANSFORMERS_LOGITS
    plain = declared(model, lambda layer: replace(layer, mlp=Dense(layer.mlp.width), norm=Norm(layer.norm.eps),
        mixer=replace(layer.attention, window=None, rope=replace(layer.attention.rope, dims=64))))  # fmt: skip
    if name != "other_norm":  # 1 + w is in its tensors by now
        other = logits(catalog.create("reference", plain, KVSpec("fp32").plan(2)), plain.config, "fp32")
        assert float((other - expected).abs().max() / scale) > 100 * bounds.TRANSFORMERS_LOGITS


def interpreted(model):
    pytest.importorskip("triton", "3.6", reason="needs the cuda extra")
    from haarkv.executors.cuda import CudaExecutor

    return CudaExecutor(model, interpreted=True)


OPEN = {
    "cpu": lambda model: catalog.create("cpu", model, KVSpec("fp32").plan(2)),
    "cuda": interpreted,
    "onnx": lambda model: catalog.create("onnx", model, KVSpec("tq4").plan(2)),
}
# Without levels, of which rounding picks one of two, the order of FP32 sums is all that remains. GPU kernels read levels only.
KV = {"cpu": "fp32", "cuda": "tq8"}
REFUSED = {
    "onnx": {"other_activation": "activation is gelu_tanh", "other_norm": "plus_one is True", "window": "window is 17",
             "part_of_a_head": "dims is 32"},
}  # fmt: skip


# The interpreter of `cuda` takes 20 s a case.
@pytest.mark.parametrize(
    ("name", "who"),
    rest(MORE_CUDA, product(PLANTED, OPEN), lambda _, case: case[1] != "cuda"),
)
def test_an_executor_is_right_or_refuses_by_name(planted, name, who):
    model = planted(name)[1]
    if reason := REFUSED.get(who, {}).get(name):
        with pytest.raises(InputError, match=reason):
            OPEN[who](model)
        return
    ends = SHORT if who == "cuda" and not torch.cuda.is_available() else LONG
    kv = KV[who]
    expected = logits(catalog.create("reference", model, KVSpec(kv).plan(2)), model.config, kv, ends)
    found = logits(OPEN[who](model), model.config, kv, ends)
    off = (found - expected).abs().amax(1) / expected.std()
    # A level that ties may fall otherwise, which moves all that follows; a wrong forward is off everywhere.
    assert float(off.median()) <= (bounds.TRANSFORMERS_LOGITS if kv == "fp32" else 1e-3), off
    assert float(off.max()) <= (bounds.TRANSFORMERS_LOGITS if kv == "fp32" else 0.2)


def test_the_npu_refuses_a_part_of_a_head(planted):
    """What else is planted here its programs run: `test_npu_families.py`."""
    with pytest.raises(InputError, match="dims is 32"):
        catalog.check("npu", planted("part_of_a_head")[1].config, KVSpec("tq4").plan(2))


def test_a_declaration_is_known_as_a_whole():
    """Whatever field says something else: one that is added later, too."""
    (layer,) = dense_layers(1, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=96)
    assert unknown_part(layer) is None
    attention, every = layer.attention, ("head_norms", "bias", "window", "activation", "plus_one", "norms_behind")
    others = {
        "head_norms is True": replace(layer, mixer=replace(attention, head_norms=True)),
        "bias is True": replace(layer, mixer=replace(attention, bias=True)),
        "gated is True": replace(layer, mixer=replace(attention, gated=True)),
        "window is 8": replace(layer, mixer=replace(attention, window=8)),
        "dims is 32": replace(layer, mixer=replace(attention, rope=Rope(1e6, 32))),
        "activation is gelu_tanh": replace(layer, mlp=Dense(96, "gelu_tanh")),
        "plus_one is True": replace(layer, norm=Norm(1e-6, plus_one=True)),
        "norms_behind is True": replace(layer, norms_behind=True),
        "it has experts": replace(layer, mlp=Experts(4, 2, 96)),
    }
    for reason, other in others.items():
        assert unknown_part(other) == reason
        known = reason.partition(" ")[0]
        assert (unknown_part(other, every) is None) == (known in every)
    fields = {name for kind in (Attention, Dense, Norm, Layer) for name in kind.__dataclass_fields__}
    assert fields == {
        "num_heads", "num_kv_heads", "head_dim", "rope", "scale", "window", "head_norms", "bias", "gated", "width",
        "activation", "eps", "plus_one", "mixer", "mlp", "norm", "norms_behind",
    }, "a new field belongs in `others` above"  # fmt: skip
    assert set(Activation.__args__) == {"silu", "gelu_tanh"}
    assert ModelConfig.__dataclass_fields__.keys() >= {"embedding_scale", "tied", "layers"}
