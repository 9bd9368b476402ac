"""Every other family against transformers on a checkpoint that transformers wrote: fp32, prefill and 32 decode steps."""

import json

import pytest
import torch
import transformers
from checkpoints import byte_tokenizer
from transformers_judge import STEPS, draw_weights, worst_error

from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model, read_config
from haarkv.models.hf_config import read_hf_config
from haarkv.models.weights import checkpoint_shapes
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import bounds
from haarkv.validation.layers.runner import validate
from tq.cli import main

SHAPE = {
    "vocab_size": 300, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "attn_implementation": "eager",
}  # fmt: skip
PROMPT = torch.randint(0, 300, (1, 150), generator=torch.Generator().manual_seed(1))
MODELS = {
    "llama3": ("Llama", {"rope_theta": 5e5, "head_dim": 64, "rms_norm_eps": 1e-5}),
    "llama_head_dim_of_hidden": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 128, "rope_theta": 1e6}),
    "qwen2.5": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_theta": 1e6}),
    "qwen2.5_tied": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True}),
}
"""Name -> class of transformers, and what its config says beside SHAPE."""


def written(folder, name):
    """A transformers model with random weights, saved as a checkpoint with a tokenizer."""
    family, entries = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | entries)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    draw_weights(theirs)
    theirs.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return theirs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder and transformers model by name, written once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, written(folder, name)
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(saved, name):
    folder, theirs = saved(name)
    worst, _ = worst_error(theirs, load_model(folder), "fp32", PROMPT)
    assert worst <= bounds.TRANSFORMERS_LOGITS


@pytest.mark.parametrize("name", MODELS)
def test_the_cpu_equals_the_reference_within_its_bounds(saved, name):
    model = load_model(saved(name)[0])
    plan = KVSpec("tq4").plan(model.config.num_layers)
    report = validate(ReferenceExecutor(model), CpuExecutor(model), model, [PROMPT[0, :70].tolist()], STEPS, plan)
    assert report.passed, report.first_divergence
    stages = {summary.stage for summary in report.stages}
    assert stages >= {"q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "o_proj", "down_proj", "head"}


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2.5"])
def test_tq_validate_runs_such_a_folder(saved, name, capsys):
    args = ["--model", str(saved(name)[0]), "--executor", "cpu", "--steps", "1", "--prompt", "Spam and eggs, and then spam."]
    assert main(["validate", *args]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_tensors_are_transformers_own(saved, name):
    folder, theirs = saved(name)
    config = read_config(folder)
    assert config.num_parameters() == theirs.num_parameters()
    expected = {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert checkpoint_shapes(config) == expected


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_bias_matters_and_a_damaged_one_is_named(saved, side):
    """No op is handed a bias, so it is found by the layer in which numbers stop being finite."""
    folder, theirs = saved("qwen2.5")
    model = load_model(folder)
    bias = getattr(model.weights.layers[1], f"{side}_bias")
    bias += 0.5
    worst, _ = worst_error(theirs, model, "fp32", PROMPT[:, :20])
    assert worst > 10 * bounds.TRANSFORMERS_LOGITS
    bias[3] = torch.nan
    with pytest.raises(NonFiniteError, match=rf"model\.layers\.1\.self_attn\.{side}_proj\.bias holds nan at \[3\]"):
        worst_error(theirs, model, "fp32", PROMPT[:, :20])


@pytest.mark.parametrize(
    ("name", "entries", "word"),
    [
        ("llama3", {"attention_bias": True}, "attention biases"),
        ("llama3", {"mlp_bias": True}, "MLP biases"),
        ("llama3", {"hidden_act": "gelu"}, "gelu"),
        ("mistral", {"sliding_window": 512}, "sliding-window"),
        ("qwen2.5", {"use_sliding_window": True, "sliding_window": 512}, "sliding-window"),
        ("qwen2.5", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding-window"),
    ],
)
def test_what_is_not_built_is_refused_by_name(saved, tmp_path, name, entries, word):
    raw = json.loads((saved(name)[0] / "config.json").read_text()) | entries
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=word):
        read_hf_config(tmp_path / "config.json")


def test_a_mistral_that_does_not_say_its_window_has_one(saved, tmp_path):
    raw = json.loads((saved("mistral")[0] / "config.json").read_text()) | {"max_position_embeddings": 32768}
    raw.pop("sliding_window")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match="sliding-window"):
        read_hf_config(path)
    path.write_text(json.dumps(raw | {"sliding_window": 32768}))  # as wide as the context
    assert read_hf_config(path).max_position_embeddings == 32768


@pytest.mark.parametrize("executor", ["npu", "onnx"])
@pytest.mark.parametrize("name", ["llama3", "qwen2.5"])
def test_builders_of_whole_layers_say_what_they_lack(saved, executor, name):
    from haarkv.models.qwen3_14b.npu import programs

    if executor == "onnx":
        pytest.importorskip("onnx", reason="needs the onnx extra")
        from haarkv.models.qwen3_14b.onnx.model import unsupported
    config = read_config(saved(name)[0])
    plan = KVSpec("tq4").plan(config.num_layers)
    reason = programs.unsupported(config) if executor == "npu" else unsupported(config, plan)
    assert "has no q_norm" in reason or "has q_bias" in reason
