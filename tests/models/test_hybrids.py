"""Qwen3.5 and Qwen3-Next as they are published: beside vision and MTP layers, experts in one tensor, and what is refused."""

import json
from functools import cache

import pytest
import torch
import transformers
from checkpoints import byte_tokenizer
from refusals import assert_refused
from safetensors.torch import load_file, save_file
from transformers_judge import draw_weights

from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.caches import new_cache
from haarkv.models.catalog import load_model, read_config
from haarkv.models.config import Attention
from haarkv.models.hf_config import read_hf_config
from haarkv.models.layer import DeltaNet
from haarkv.models.parallel import Split
from haarkv.models.weights import num_parameters
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from tq.cli import main

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
CLASSES = {"qwen3_5": "Qwen3_5Text", "qwen3_5_moe": "Qwen3_5MoeText", "qwen3_next": "Qwen3Next"}
TOKENS = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(3))


def written(folder, name):
    torch.manual_seed(0)
    entries = SHAPE | (EXPERTS if name != "qwen3_5" else {})
    config = getattr(transformers, f"{CLASSES[name]}Config")(**entries)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(theirs)
    theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder and transformers model by name, written once."""

    @cache
    def get(name):
        folder = tmp_path_factory.mktemp(name)
        return folder, written(folder, name)

    return get


def logits(folder):
    model = load_model(folder)
    cache, paging = new_cache(model.config, KVSpec("fp32").plan(4), sequences=1, tokens=64)
    return verify(CpuExecutor(model), TOKENS, paging.batch([paging.add()], [len(TOKENS)]), cache)


def as_published(source, target, name):
    """The same checkpoint as Qwen's own lie: the text model within one that sees, with MTP layers, experts stacked."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    stacked = {key: tensor for key, tensor in tensors.items() if ".mlp.experts." not in key}
    for layer in range(4 if name == "qwen3_5_moe" else 0):
        place = f"model.layers.{layer}.mlp.experts"
        of = {part: [tensors[f"{place}.{e}.{part}_proj.weight"] for e in range(6)] for part in ("gate", "up", "down")}
        both = [torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)]
        stacked |= {f"{place}.gate_up_proj": torch.stack(both), f"{place}.down_proj": torch.stack(of["down"])}
    renamed = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in stacked.items()}
    beside = {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(3, 3),
              "mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 3)}  # fmt: skip
    save_file(renamed | beside, target / "model.safetensors")
    inner = config | {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "full_attention_interval": 4}
    outer = {"model_type": name, "text_config": inner, "vision_config": {"depth": 2}, "tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(outer))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_checkpoint_as_it_is_published_is_the_text_model_alone(saved, tmp_path, name):
    folder, theirs = saved(name)
    as_published(folder, tmp_path, name)
    ours = logits(tmp_path)
    assert torch.equal(ours, logits(folder))
    with torch.inference_mode():
        expected = theirs(TOKENS[None]).logits[0]
    assert float((ours - expected).abs().max() / expected.std()) <= 1e-4


def test_an_expert_too_few_in_a_stacked_tensor_is_named(saved, tmp_path):
    as_published(saved("qwen3_5_moe")[0], tmp_path, "qwen3_5_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name][:5].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_transformers_own(tmp_path, name):
    config = getattr(transformers, f"{CLASSES[name]}Config")()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": config.model_type}))
    (tmp_path / "whole").mkdir()
    config.save_pretrained(tmp_path / "whole")
    given = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_hidden_layers,
             "num_attention_heads": config.num_attention_heads}  # fmt: skip
    path.write_text(json.dumps({"model_type": config.model_type} | given))
    assert read_hf_config(path) == read_hf_config(tmp_path / "whole" / "config.json")


def test_published_sizes_have_the_parameters_of_transformers_text_models():
    """On the meta device: only shapes are made."""
    for size, name in {"qwen3.5-27b": "qwen3_5", "qwen3.5-35b-a3b": "qwen3_5_moe", "qwen3-next": "qwen3_next"}.items():
        config = read_config(f"random:{size}")
        entries = {
            "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size,
            "num_attention_heads": config.heads.num_heads, "num_key_value_heads": config.heads.num_kv_heads,
            "linear_num_value_heads": config.layers[0].mixer.num_value_heads, "intermediate_size": 17408,
        }  # fmt: skip
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{CLASSES[name]}Config")(**entries))
        assert num_parameters(config) == theirs.num_parameters(), size
    assert round(num_parameters(read_config("random:qwen3.5-0.8b")) / 1e9, 2) == 0.75


def test_three_of_four_layers_remember_and_one_attends():
    config = read_config("random:qwen3.5-0.8b")
    kinds = [type(layer.mixer) for layer in config.layers]
    assert kinds == [DeltaNet, DeltaNet, DeltaNet, Attention] * 6
    assert config.layers[3].attention.rope.dims == 64
    (shape,) = {shape.tensors for shape in config.state_shapes.values()}
    assert [size for _, size, _ in shape] == [(3, 6144), (16, 128, 128)]


def test_ranks_refuse_a_state():
    with pytest.raises(InputError, match="recurrent state cannot be split over ranks"):
        Split(read_config("random:qwen3.5-0.8b"), 0, 2)


@pytest.mark.parametrize("size", ["qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3-next"])
def test_the_gpu_takes_hybrids_dense_and_with_experts(size):
    from haarkv.executors.cuda import CudaExecutor

    config = read_config(f"random:{size}")
    assert CudaExecutor.supports(config, KVSpec("tq4").plan(config.num_layers)) is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["calibrate", "--out", "c.safetensors"], "layer 0 of this model has no keys"),
        (["generate", "--prompt", "ab", "--draft", "self"], "take --draft mtp or ngram"),
        (["export", "--out", "graphs"], "it mixes tokens by DeltaNet"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_commands_that_need_k_and_v_of_every_layer_refuse_in_one_line(saved, tmp_path, capsys, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    folder = saved("qwen3_5")[0]
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    name, *options = command
    assert_refused((main([name, "--model", str(folder), *options]), *capsys.readouterr()), words)


def test_validate_judges_a_checkpoint(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = saved("qwen3_5")[0]
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    command = [
        "validate",
        "--model",
        str(folder),
        "--executor",
        "cpu",
        "--prompt",
        "ab",
        "--prompt",
        "c",
        "--steps",
        "1",
        "--json",
    ]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert {row["layer"] for row in said["rows"] if row["state_err"] is not None} == {0, 1, 2}


def test_info_tells_a_state_from_k_and_v(capsys):
    assert main(["info", "random:qwen3.5-0.8b"]) == 0
    said = capsys.readouterr().out
    assert "24, 18 of them with a state in place of K and V" in said
    assert (
        "20.2 MB a sequence, whatever its length; kept 2 times, 40.4 MB; with --draft once more for each drafted token" in said
    )
    assert main(["info", "random:qwen3.5-0.8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_bytes"] == read_config("random:qwen3.5-0.8b").state_bytes
    assert main(["info", "random:0.6b"]) == 0
    assert "state" not in capsys.readouterr().out
