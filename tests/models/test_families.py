"""Every family against transformers on a checkpoint that transformers wrote: fp32, prefill and 32 decode steps."""

import json
from dataclasses import replace

import bounds
import pytest
import torch
import transformers
from at_length import MORE, pairwise_cases, rest
from family_models import HYBRIDS, MODELS, TOKENS, cpu_logits, saved
from safetensors.torch import load_file, save_file
from small_models import small_config
from transformers_judge import worst_error

from haarkv.engine.plans import declaration_in, shape_signature
from haarkv.executors import catalog
from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import find_model, load_model, read_config
from haarkv.models.config import Activation, Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope, unknown_part
from haarkv.models.weights import checkpoint_tensors, num_parameters
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.runner import validate

__all__ = ["saved"]
PROMPT = torch.randint(0, 300, (1, 150), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(saved, name):
    folder, theirs = saved(name)
    worst = worst_error(theirs, load_model(folder), "fp32", PROMPT)
    assert worst <= bounds.TRANSFORMERS_LOGITS


# The rest runs with `make test-long`.
@pytest.mark.parametrize(("name", "chunk"), pairwise_cases(MORE, list(HYBRIDS), [150, 64, 7]))
def test_logits_of_hybrids_equal_transformers(saved, name, chunk):
    """64 steps: a state that drifts shows late."""
    folder, theirs = saved(name)
    worst = worst_error(theirs, load_model(folder), "fp32", PROMPT, steps=64, chunk=chunk)
    assert worst <= bounds.TRANSFORMERS_LOGITS


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_logits_of_a_checkpoint_that_ships_equal_transformers(name):
    folder = find_model(name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = torch.randint(0, 4096, (1, 200), generator=torch.Generator().manual_seed(0))
    worst = worst_error(theirs, load_model(folder), "fp32", prompt)
    assert worst <= bounds.TRANSFORMERS_LOGITS


def test_the_comparison_sees_a_wrong_cache(saved):
    """With 4-bit storage the same comparison is far outside its bound: it does depend on K and V."""
    folder, theirs = saved("qwen3")
    worst = worst_error(theirs, load_model(folder), "tq4", PROMPT)
    assert worst > 100 * bounds.TRANSFORMERS_LOGITS


def validate_report(model, candidate, tokens, steps):
    plan = KVSpec("tq4").plan(model.config.num_layers)
    report = validate(ReferenceExecutor(model), candidate, model, [PROMPT[0, :tokens].tolist()], steps, plan)
    assert report.passed, report.first_divergence
    return report


@pytest.mark.parametrize("name", ["qwen3_yarn", "llama3", "qwen2"])
def test_the_graphs_equal_the_reference_within_their_bounds(saved, name):
    pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    from haarkv.executors.onnx import OnnxExecutor

    model = load_model(saved(name)[0])
    validate_report(model, OnnxExecutor(model), 20, 2)


# One of each kind of layer; the rest runs with `make test-long`.
OF_EACH_KIND = ("qwen3", "qwen3_moe", "mistral_window", "qwen2_window", "gemma", "gemma3", "llama3")


@pytest.mark.parametrize("name", rest(MORE, MODELS, lambda _, name: name in OF_EACH_KIND))
def test_the_cpu_equals_the_reference_within_its_bounds(saved, name):
    model = load_model(saved(name)[0])
    report = validate_report(model, CpuExecutor(model), 70, 3)
    stages = {summary.stage for summary in report.tensors}
    assert stages >= {"q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "o_proj", "head"}
    assert "experts.down_proj" in stages if "moe" in name else "down_proj" in stages


@pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])
def test_parameters_and_tensors_are_transformers_own(saved, name):
    folder, theirs = saved(name)
    config = read_config(folder)
    assert num_parameters(config) == theirs.num_parameters()
    expected = {key: tuple(tensor.shape) for key, tensor in load_file(folder / "model.safetensors").items()}
    assert {key: spec.shape for key, spec in checkpoint_tensors(config).items()} == expected
    assert declaration_in(theirs.config.to_dict()) == shape_signature(config).declaration


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_damaged_bias_is_named(saved, side):
    """No op is handed a bias, so it is found by the layer in which numbers stop being finite."""
    folder, theirs = saved("qwen2")
    model = load_model(folder)
    model.weights.layers[1][f"{side}_bias"][3] = torch.nan
    with pytest.raises(NonFiniteError, match=rf"model\.layers\.1\.self_attn\.{side}_proj\.bias holds nan at \[3\]"):
        worst_error(theirs, model, "fp32", PROMPT[:, :20])


# -- Hybrids as they are published -------------------------------------------------------------------------------------------


def as_published(source, target, name):
    """The same checkpoint as Qwen's own lie: the text model within one that sees, with MTP layers, experts stacked."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    stacked_tensors = {key: tensor for key, tensor in tensors.items() if ".mlp.experts." not in key}
    for layer in range(4 if name == "qwen3_5_moe" else 0):
        place = f"model.layers.{layer}.mlp.experts"
        parts = {part: [tensors[f"{place}.{e}.{part}_proj.weight"] for e in range(8)] for part in ("gate", "up", "down")}
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        stacked_tensors |= {f"{place}.gate_up_proj": torch.stack(both), f"{place}.down_proj": torch.stack(parts["down"])}
    renamed_tensors = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in stacked_tensors.items()}
    other_tensors = {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(3, 3),
              "mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 3)}  # fmt: skip
    save_file(renamed_tensors | other_tensors, target / "model.safetensors")
    inner = config | {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "full_attention_interval": 4}
    outer = {"model_type": name, "text_config": inner, "vision_config": {"depth": 2}, "tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(outer))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_checkpoint_as_it_is_published_is_the_text_model_alone(saved, tmp_path, name):
    as_published(saved(name)[0], tmp_path, name)
    assert torch.equal(*(cpu_logits(load_model(folder), TOKENS) for folder in (tmp_path, saved(name)[0])))


def test_an_expert_too_few_in_a_stacked_tensor_is_named(saved, tmp_path):
    as_published(saved("qwen3_5_moe")[0], tmp_path, "qwen3_5_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name][:7].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.7\.down_proj\.weight"):
        load_model(tmp_path)


def test_published_sizes_have_their_published_parameters():
    """Of hybrids those of transformers' text models, on the meta device: only shapes are made."""
    millions = {"0.6b": 596, "1.7b": 1721, "4b": 4022, "8b": 8191, "14b": 14768, "32b": 32762,
                "30b-a3b": 30532, "235b-a22b": 235094}  # fmt: skip
    assert {size: round(num_parameters(read_config(f"random:{size}")) / 1e6) for size in millions} == millions
    for size, name in {"qwen3.5-27b": "qwen3_5", "qwen3.5-35b-a3b": "qwen3_5_moe", "qwen3-next": "qwen3_next"}.items():
        config = read_config(f"random:{size}")
        entries = {
            "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size,
            "num_attention_heads": config.heads.num_heads, "num_key_value_heads": config.heads.num_kv_heads,
            "linear_num_value_heads": config.layers[0].mixer.num_value_heads, "intermediate_size": 17408,
        }  # fmt: skip
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, f"{HYBRIDS[name][0]}Config")(**entries)
            )
        assert num_parameters(config) == theirs.num_parameters(), size
    assert round(num_parameters(read_config("random:qwen3.5-0.8b")) / 1e9, 2) == 0.75


# -- Declarations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma", "activation is gelu_tanh"),
        ("mistral_window", "window is 40"),
        ("qwen3_moe", "it has experts"),
        ("qwen3_5", "it mixes tokens by DeltaNet"),
    ],
)
def test_the_graphs_refuse_a_layer_that_they_do_not_know(saved, name, reason):
    config = read_config(saved(name)[0])
    with pytest.raises(InputError, match=reason):
        catalog.check("onnx", config, KVSpec("tq4").plan(config.num_layers))


def test_a_declaration_is_known_as_a_whole():
    """Whatever field says something else: one that is added later, too."""
    layer = small_config("llama", head_norms=False).common
    assert unknown_part(layer) is None
    attention, every = layer.attention, ("head_norms", "bias", "window", "activation", "plus_one", "post_norms")
    others = {
        "head_norms is True": replace(layer, mixer=replace(attention, head_norms=True)),
        "bias is True": replace(layer, mixer=replace(attention, bias=True)),
        "gated is True": replace(layer, mixer=replace(attention, gated=True)),
        "window is 8": replace(layer, mixer=replace(attention, window=8)),
        "dims is 32": replace(layer, mixer=replace(attention, rope=Rope(1e4, 32))),
        "activation is gelu_tanh": replace(layer, mlp=Dense(96, "gelu_tanh")),
        "plus_one is True": replace(layer, norm=Norm(1e-6, plus_one=True)),
        "post_norms is True": replace(layer, post_norms=True),
        "it has experts": replace(layer, mlp=Experts(4, 2, 96)),
    }
    for reason, other in others.items():
        assert unknown_part(other) == reason
        field_name = reason.partition(" ")[0]
        assert (unknown_part(other, every) is None) == (field_name in every)
    fields = {name for kind in (Attention, Dense, Norm, Layer) for name in kind.__dataclass_fields__}
    assert fields == {
        "num_heads", "num_kv_heads", "head_dim", "rope", "scale", "window", "head_norms", "bias", "gated", "width",
        "activation", "eps", "plus_one", "mixer", "mlp", "norm", "post_norms",
    }, "a new field belongs in `others` above"  # fmt: skip
    assert set(Activation.__args__) == {"silu", "gelu_tanh"}
    assert ModelConfig.__dataclass_fields__.keys() >= {"embedding_scale", "tied", "layers"}
