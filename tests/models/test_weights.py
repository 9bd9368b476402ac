"""Reading checkpoints: shards, dtypes, memory, damage, and which weight is blamed for a NaN."""

import json

import pytest
import torch
from checkpoints import (
    CONFIG,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    byte_tokenizer,
    in_turn,
    layer_tensor,
    poison,
    random_tensors,
    tensor_shapes,
    write_checkpoint,
)
from on_large_pages import asks_for_large_pages, needs_large_pages
from small_models import SMALL
from tokenizers import Regex, normalizers

from haarkv.executors.base import prefill
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models import checkpoint as large_pages
from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import PAGE, LargePages, load_weights, random_weights
from haarkv.models.hf_folder import HFFolder
from haarkv.models.text import Tokenizer as SourceTokenizer
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec

TIED_CONFIG = CONFIG | {"tie_word_embeddings": True}
BYTES = list(b"every byte counts")


def first_logits(model, kv="tq4", prompt=BYTES):
    """Logits [vocab] after a prompt."""
    config = model.config
    plan = KVSpec(kv).plan(config.num_layers)
    cache = PagedKVCache(plan, config.kv_shapes, num_blocks=1)
    paging = PagedSequences(1, cache.block_size)
    batch = paging.batch([paging.add()], [len(prompt)])
    return prefill(ReferenceExecutor(model), torch.tensor(prompt), batch, cache)[0]


def named(model):
    return dict(model.weights.named_tensors())


# -- config.json ----------------------------------------------------------------------------------------------------------


TEXTS = {
    "generation": {"do_sample": True, "temperature": 0.5},
    "tokenizer_config": {"eos_token": "<|endoftext|>"},
    "files": {"chat_template.jinja": "{{ messages[0]['content'] }}{{ eos_token }}"},
}


@pytest.mark.parametrize("patterns", [False, True])
def test_a_mark_before_any_text_of_a_folder_is_no_part_of_it(tmp_path, patterns):
    """As editors of some systems leave one; a tokenizer with a regular expression is read by another process."""
    folder = write_checkpoint(tmp_path / "model", shards=2, **TEXTS)
    if patterns:
        tokenizer = byte_tokenizer()
        tokenizer.normalizer = normalizers.Replace(Regex("z{2,3}"), "y")
        tokenizer.save(str(folder / "tokenizer.json"))

    def read_folder():
        source, config = HFFolder(folder), read_config(folder)
        tokenizer = SourceTokenizer(source, config)
        chat = tokenizer.encode_chat([[{"role": "user", "content": "hi"}]])
        return config, source.sampling(), list(source.tensors()), tokenizer.encode("azz"), chat

    plain = read_folder()
    marked_files = [path for path in folder.iterdir() if path.suffix in (".json", ".jinja")]
    assert len(marked_files) == 6
    for path in marked_files:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_folder() == plain


# -- Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [2, 5])
def test_a_sharded_checkpoint_gives_the_weights_of_the_single_file(tmp_path, shards):
    single = load_model(str(write_checkpoint(tmp_path / "single")))
    folder = write_checkpoint(tmp_path / "sharded", shards=shards)
    assert len(list(folder.glob("*.safetensors"))) == shards
    sharded_model = load_model(str(folder))
    torch.testing.assert_close(named(sharded_model), named(single), rtol=0, atol=0)


def test_a_tied_checkpoint_may_carry_a_copy_of_its_head(tmp_path):
    plain = load_model(str(write_checkpoint(tmp_path / "plain", config=TIED_CONFIG)))
    copy = write_checkpoint(tmp_path / "copy", config=TIED_CONFIG, mutate=lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    model = load_model(str(copy))
    assert model.weights.lm_head is model.weights.embedding
    assert torch.equal(first_logits(model), first_logits(plain))
    other = write_checkpoint(
        tmp_path / "other", config=TIED_CONFIG, mutate=lambda t: t.update({HEAD: t[EMBEDDING][1:].clone()})
    )
    with pytest.warns(UserWarning, match="another head"), pytest.raises(InputError, match=r"lm_head\.weight"):
        load_model(other)


# -- Weights in other files -------------------------------------------------------------------------------------------------


def test_without_a_config_a_folder_is_told_by_what_is_there(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json does not exist, but params.json, of its makers' own form"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "but pytorch_model.bin, saved by torch"),
        ("consolidated.safetensors", "but consolidated.safetensors, weights under its makers' own names"),
        ("adapter_model.safetensors", "but adapter_model.safetensors, an adapter; merge it"),
        ("tf_model.h5", "for TensorFlow"),
        ("readme.txt", "has a config but no weights"),
    ],
)
def test_other_weights_are_one_line(tmp_path, name, words):
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(InputError, match=words):
        load_model(folder)


def test_stored_rope_frequencies_are_not_read(tmp_path):
    """Older Llama checkpoints hold them in every layer; nan would be seen if they were used."""
    plain = load_model(str(write_checkpoint(tmp_path / "plain")))
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.full((16,), torch.nan) for layer in range(2)}
    older = load_model(str(write_checkpoint(tmp_path / "older", mutate=lambda tensors: tensors.update(frequencies))))
    assert torch.equal(first_logits(older), first_logits(plain))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("wanted", "raw"), [("bfloat16", CONFIG), ("float32", CONFIG), ("float32", TIED_CONFIG)])
def test_every_tensor_lands_under_its_own_name_in_the_wanted_dtype(tmp_path, stored, wanted, raw):
    model = load_model(str(write_checkpoint(tmp_path / "model", config=raw, dtype=stored)), wanted)
    assert model.dtype == getattr(torch, wanted)
    expected = {name: tensor.to(stored).to(model.dtype) for name, tensor in random_tensors(raw).items()}
    torch.testing.assert_close(named(model), expected, rtol=0, atol=0)


def test_loading_reports_every_tensor_once(tmp_path):
    folder, steps = write_checkpoint(tmp_path / "model", shards=2), []
    load_model(str(folder), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(count, 25) for count in range(1, 26)]
    steps.clear()
    random_weights(read_config(folder), torch.float32, progress=lambda *step: steps.append(step))
    assert steps == [(count, 25) for count in range(1, 26)]


def test_random_weights_are_the_same_for_the_same_seed():
    first, again, other = (dict(random_weights(SMALL, torch.float32, seed).named_tensors()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[EMBEDDING], other[EMBEDDING])
    assert first[EMBEDDING].std() == pytest.approx(0.02, rel=0.05)
    assert (first[FINAL_NORM] == 1).all()


# -- Room for weights on large pages -----------------------------------------------------------------------------------------


@needs_large_pages
def test_tensors_ask_for_large_pages():
    room = LargePages()
    assert all(asks_for_large_pages(room.empty((3 * PAGE // 2,), torch.bfloat16)) for _ in range(6))


def test_tensors_do_not_overlap_and_begin_at_cache_lines():
    room = LargePages()
    shapes, dtypes = ((3, 5), (7,), (0, 4), (1, 1)), (torch.bfloat16, torch.float32)
    tensors = [room.empty(shape, dtype) for shape in shapes for dtype in dtypes]
    tensors.append(room.empty((large_pages._CHUNK // 4 + 1,), torch.float32))  # more than is left, and than a chunk holds
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
        assert tensor.is_contiguous()
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0


def test_a_process_that_may_have_no_chunk_gets_what_it_needs(monkeypatch):
    def memory(nbytes):
        if nbytes > PAGE:
            raise OSError(12, "Cannot allocate memory")
        return bytearray(nbytes)

    monkeypatch.setattr(large_pages, "_memory", memory)
    tensor = LargePages().empty((PAGE // 8,), torch.float32)
    assert tensor.nbytes == PAGE // 2


# -- Damage ---------------------------------------------------------------------------------------------------------------


def refusal(folder):
    """Why a folder's weights are refused; nothing may come but an InputError."""
    with pytest.raises(InputError) as error:
        load_weights(folder, HFFolder(folder).tensors(), read_config(folder), torch.float32)
    return str(error.value)


def with_layers(layers):
    return {"files": {"config.json": json.dumps(CONFIG | {"num_hidden_layers": layers})}}


def integers(tensors):
    tensors.update({name: tensor.to(torch.int16) for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"files": {"model.safetensors": b"PK\x03\x04" * 50}}, ["model.safetensors cannot be read", "fetch it again"]),
        ({"mutate": integers, "dtype": torch.int16}, ["I16", EMBEDDING]),
        ({"mutate": lambda tensors: tensors.pop(HEAD)}, [HEAD]),
        ({"config": {"num_hidden_layers": 1}} | with_layers(2), [f"{layer_tensor(1, 'input_layernorm')} and 10 more"]),
        (with_layers(1), ["model.layers.1.", "and 10 more"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_other_tensors_are_refused_by_name(tmp_path, options, words):
    message = refusal(write_checkpoint(tmp_path / "model", **options))
    assert all(word in message for word in words)


# -- Blame ----------------------------------------------------------------------------------------------------------------

ALL_NAMES = list(tensor_shapes(CONFIG))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("blame") / "model"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv", ["tq4", "bf16"])
@pytest.mark.parametrize("name", ALL_NAMES)
def test_whichever_weight_is_not_finite_is_blamed(whole, name, kv, value):
    model = load_model(whole)
    tensor = named(model)[name]
    # A row of the embedding that the prompt uses; of other tensors the first number.
    index = (BYTES[0], 1) if name == EMBEDDING else (0,) * tensor.ndim
    tensor[index] = value
    with pytest.raises(NonFiniteError) as error:
        first_logits(model, kv)
    assert str(error.value).startswith(f"the weight {name} holds {value} at {list(index)};")


def test_of_several_bad_weights_the_first_that_a_forward_meets_is_blamed(tmp_path):
    later, first = layer_tensor(1, "self_attn.q_proj"), layer_tensor(0, "mlp.down_proj")
    bad = in_turn(poison(later, (0, 0)), poison(first, (0, 0)), poison(FINAL_NORM))
    folder = write_checkpoint(tmp_path / "nan", mutate=bad)
    with pytest.raises(NonFiniteError, match=f"^the weight {first} "):
        first_logits(load_model(str(folder)))


@pytest.mark.parametrize("kv", ["tq4", "tq4_seed", "bf16"])
def test_weights_that_are_finite_and_overflow_are_told_by_where_it_shows(tmp_path, kv):
    in_logits = "logits are not finite"
    for layer, where in ((0, in_logits if kv == "bf16" else "layer 1: K of token"), (1, in_logits)):
        huge = lambda tensors, layer=layer: tensors[layer_tensor(layer, "self_attn.q_norm")].fill_(3e38)  # noqa: E731
        folder = write_checkpoint(tmp_path / str(layer), mutate=huge, dtype=torch.float32)
        with pytest.raises(NonFiniteError, match=f"^{where}.*, although all weights are finite"):
            first_logits(load_model(str(folder)), kv)
