"""Drafts by the model's own layer: beside transformers' layer, the text that comes, and when it stops."""

import itertools
import json
import shutil
from functools import cache

import pytest
import torch
import transformers
from checkpoints import byte_tokenizer
from gguf_files import byte_vocabulary, convert
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers_judge import draw_weights

from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.drafters import READ, MTPDrafter
from haarkv.engine.drafts import Pace
from haarkv.engine.loading import load
from haarkv.engine.sampling import Sampling
from haarkv.models.catalog import load_model
from haarkv.models.mtp import load_mtp
from haarkv.models.weights import EMBEDDING, HEAD
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks, dense

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
KINDS = {
    "qwen3_5": ("Qwen3_5Text", modeling_qwen3_5.Qwen3_5DecoderLayer),
    "qwen3_5_moe": ("Qwen3_5MoeText", modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer),
    "qwen3_next": ("Qwen3Next", modeling_qwen3_next.Qwen3NextDecoderLayer),
}
TEXT = torch.randint(1, 300, (24,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [TEXT[:9], TEXT[4:18], TEXT[2:3]]


class Theirs:
    """A model of transformers, and its drafting layer of transformers' own decoder layer and three tensors."""

    def __init__(self, name):
        torch.manual_seed(0)
        kind, layer = KINDS[name]
        config = getattr(transformers, f"{kind}Config")(**SHAPE, **(EXPERTS if name != "qwen3_5" else {}))
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        draw_weights(self.model)
        config._attn_implementation = "eager"
        self.layer = layer(config, 1).eval()
        draw_weights(self.layer)
        generator = torch.Generator().manual_seed(1)
        self.fc = torch.randn(64, 128, generator=generator) / 8
        self.norms = {
            name: torch.randn(64, generator=generator) / 4 for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        }

    def save(self, folder):
        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        tensors |= {f"mtp.{name}.weight": tensor for name, tensor in self.norms.items()} | {"mtp.fc.weight": self.fc}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        words = byte_tokenizer()
        words.add_tokens([f"<{row}>" for row in range(257, 300)])  # transformers draws rows without a token, too
        words.save(str(folder / "tokenizer.json"))

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.norms[name])

    @torch.inference_mode()
    def draft_logits(self, text, count, read=READ):
        """Logits [count, vocab] of `count` drafts behind a text: all states anew for each, the model's first, the newest."""
        hidden = self.model.model(input_ids=torch.tensor([text])).last_hidden_state[0][:-1][-read:]
        tokens, logits = list(text[1:])[-read:], []
        for _ in range(count):
            embeddings = self.model.model.embed_tokens(torch.tensor(tokens))
            both = torch.cat([self.norm(embeddings, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")], -1)
            out = self.norm(self.run_layer(both @ self.fc.T), "norm")
            logits.append(self.model.lm_head(out[-1]))
            tokens.append(int(logits[-1].argmax()))
            hidden = torch.cat([hidden, out[-1:]])
        return torch.stack(logits)

    def run_layer(self, x):
        length = len(x)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rope = self.model.model.rotary_emb(x[None], torch.arange(length)[None])
        output = self.layer(x[None], position_embeddings=rope, attention_mask=mask)
        return (output[0] if isinstance(output, tuple) else output)[0]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    @cache
    def get(name):
        theirs, folder = Theirs(name), tmp_path_factory.mktemp(name)
        theirs.save(folder)
        return theirs, folder

    return get


def session(folder, draft=None, executor="cpu"):
    return load(folder, kv="fp32", executor=executor, draft=draft, dtype="float32", balance=False, allow_collapse=True)


@pytest.fixture
def proposals(monkeypatch):
    """(text, proposal) of each sequence that was asked, in order; in five steps of six as many as may be, then none."""
    pairs, right = [], MTPDrafter.propose

    def propose(self, texts, most):
        new_proposals = right(self, texts, most)
        pairs.extend((list(texts[index]), proposal) for index, proposal in new_proposals.items())
        return new_proposals

    monkeypatch.setattr(MTPDrafter, "propose", propose)
    turns = itertools.cycle([True] * 5 + [False])
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: self._most * next(turns))
    return pairs


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_its_drafts_are_those_of_transformers_own_layer(saved_model, proposals, name, executor):
    theirs, folder = saved_model(name)
    session(folder, DraftSpec("mtp", 3, "fp32"), executor).generate(PROMPTS, max_new_tokens=8, sampling=Sampling())
    assert len(proposals) >= 6
    for text, proposal in proposals:
        logits = theirs.draft_logits(text, len(proposal))
        assert proposal == logits.argmax(-1).tolist(), text
    assert max(len(proposal) for _, proposal in proposals) == 3


@pytest.mark.parametrize(("name", "kind"), [("qwen3_5", "F32"), ("qwen3_5_moe", "F32"), ("qwen3_5", "Q8_0")])
def test_a_gguf_file_drafts_as_the_folder_it_was_made_of(saved_model, proposals, tmp_path, name, kind):
    theirs, folder = saved_model(name)
    architecture = "qwen35" if name == "qwen3_5" else "qwen35moe"
    special = tuple(f"<|{number}|>" for number in range(38))
    shutil.copytree(folder, tmp_path / "said")
    settings = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "said" / "config.json").write_text(json.dumps(settings))
    more = {f"{architecture}.full_attention_interval": 2}
    path = convert(tmp_path / "said", tmp_path / "m.gguf", kind, more, byte_vocabulary(special=special))
    drafting = session(path, DraftSpec("mtp", 3, "fp32"))
    draft_result = drafting.generate(PROMPTS, max_new_tokens=8, sampling=Sampling())
    plain = session(path).generate(PROMPTS, max_new_tokens=8, sampling=Sampling())
    assert [done.token_ids for done in draft_result.completions] == [done.token_ids for done in plain.completions]
    assert len(proposals) >= 6
    if kind == "F32":
        for text, proposal in proposals:
            assert proposal == theirs.draft_logits(text, len(proposal)).argmax(-1).tolist(), text
        return
    # Blocks stay as the file has them in the drafting layer too, and are multiplied with within the bound of blocks.
    model = load_model(path, keep_blocks=True)
    shared_weights = {EMBEDDING: model.weights.embedding, HEAD: model.weights.lm_head}
    block_layer, restored_layer = (load_mtp(path, model.config, torch.float32, shared_weights, keep) for keep in (True, False))
    assert isinstance(block_layer.fc, Blocks)
    assert isinstance(block_layer.model.weights.layers[0].matrix("down_proj"), Blocks)
    assert torch.equal(dense(block_layer.fc), restored_layer.fc)
    torch.testing.assert_close(restored_layer.fc, theirs.fc, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_greedy_text_and_states_are_those_without(saved_model, proposals, name):
    folder, runs = saved_model(name)[1], []
    for draft in (None, DraftSpec("mtp", 4)):
        result = session(folder, draft).generate(PROMPTS, max_new_tokens=30, keep=True, sampling=Sampling())
        runs.append(
            [(done.token_ids, sequence.tensors) for done, sequence in zip(result.completions, result.stored, strict=True)]
        )
    for (plain, before), (draft_ids, after) in zip(*runs, strict=True):
        assert plain == draft_ids
        for key in before:
            if key.endswith((".delta", ".conv")):  # of the newest token; drafts keep older ones as well
                assert torch.equal(before[key][-1], after[key][-1])
            elif not key.endswith(".seen"):
                assert torch.equal(before[key], after[key])
    assert result.drafting.proposed > 0
    assert result.drafting.pace
    assert "MTP" not in result.drafting.name


def test_a_prompt_in_chunks_and_a_reused_prefix_are_followed(saved_model, proposals, monkeypatch):
    import haarkv.engine.generation as generation

    folder = saved_model("qwen3_5")[1]
    ours = session(folder, DraftSpec("mtp", 2))
    whole = ours.generate([TEXT], max_new_tokens=12, keep=True, sampling=Sampling())
    monkeypatch.setattr(generation.prefill_in_chunks, "__defaults__", (5, None, 0))
    pieces = ours.generate([TEXT], max_new_tokens=12, sampling=Sampling())
    assert pieces.completions[0].token_ids == whole.completions[0].token_ids
    (sequence,) = whole.stored
    more = [*sequence.token_ids, 7, 8]
    again = ours.generate([more], max_new_tokens=12, stored=sequence, sampling=Sampling())
    assert again.completions[0].reused_tokens == sequence.length
    plain = session(folder).generate([more], max_new_tokens=12, sampling=Sampling())
    assert again.completions[0].token_ids == plain.completions[0].token_ids
    assert again.drafting.proposed > 0


@pytest.mark.parametrize("read", [3, 6])
def test_of_a_long_text_the_newest_states_are_read(saved_model, proposals, monkeypatch, read):
    """Soon behind the prompt, and after a pause in which more tokens came than are read."""
    theirs, folder = saved_model("qwen3_5")
    monkeypatch.setattr("haarkv.engine.drafters.READ", read)
    turns = itertools.cycle([False, True] + [False] * 8)
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: self._most * next(turns))
    session(folder, DraftSpec("mtp", 3, "fp32")).generate([TEXT], max_new_tokens=40, sampling=Sampling())
    assert len(proposals) >= 3
    for text, proposal in proposals:
        assert proposal == theirs.draft_logits(text, len(proposal), read=read).argmax(-1).tolist(), text
    short = [theirs.draft_logits(text, 3, read=read).argmax(-1).tolist() != theirs.draft_logits(text, 3).argmax(-1).tolist()
             for text, _ in proposals]  # fmt: skip
    assert any(short), "the test would see more states"


def test_what_enters_the_layer_goes_where_the_executor_is(saved_model):
    """A GPU's tensors meet no tensor of the host; `meta` stands for one here, and has no numbers."""
    folder = saved_model("qwen3_5")[1]
    model = load_model(folder)
    shared_weights = {EMBEDDING: model.weights.embedding, HEAD: model.weights.lm_head}
    on_meta = load_mtp(folder, model.config, torch.float32, shared_weights).on(torch.device("meta"))
    assert {one.device.type for one in (on_meta.fc, on_meta.embedding_norm, on_meta.hidden_norm)} == {"meta"}
    assert {rope.device.type for rope in on_meta.model.ropes.values()} == {"meta"}


def test_a_model_without_the_layer_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no layer that predicts several tokens \(MTP\)"):
        load("tiny", draft="mtp")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("mtp.pre_fc_norm_hidden.weight"), "lacks the tensor mtp.pre_fc_norm_hidden.weight"),
        (
            lambda t: t.update({"mtp.fc.weight": torch.zeros(64, 64)}),
            r"mtp.fc.weight has shape \[64, 64\], the config asks",
        ),
        (lambda t: t.pop("mtp.layers.0.mlp.up_proj.weight"), "lacks the tensor model.layers.0.mlp.up_proj.weight"),
        (lambda t: t.update({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}), "which the config does not know"),
    ],
)
def test_a_damaged_layer_is_refused_by_name(saved_model, tmp_path, change, words):
    folder = saved_model("qwen3_5")[1]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = load_model(tmp_path)
    with pytest.raises(InputError, match=words):
        load_mtp(tmp_path, model.config, torch.float32, {EMBEDDING: model.weights.embedding, HEAD: model.weights.lm_head})
