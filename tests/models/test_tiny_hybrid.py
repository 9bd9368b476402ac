"""The trained hybrid that ships: beside transformers, as a GGUF file beside llama.cpp, and what its own drafts are worth."""

import shutil

import pytest
import torch
from gguf_files import byte_vocabulary, convert
from said_again import always_drafting
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers_judge import worst_error

import tq
from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.loading import load
from haarkv.engine.sampling import Sampling
from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.caches import new_cache
from haarkv.models.catalog import load_model, path_of
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.kv.plan import KVSpec

NAME = "tiny-hybrid"


@pytest.fixture(scope="module")
def text():
    return tq.load("tiny").tokenizer.encode(held_out_texts()["fractions.py"])


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(path_of(NAME), dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def in_gguf(tmp_path_factory):
    """As llama.cpp's converter would write it, its drafting layer behind the others."""
    folder = tmp_path_factory.mktemp("hybrid")
    shutil.copytree(path_of(NAME), folder / "said", ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    vocabulary = byte_vocabulary(pre="qwen35", special=("<|end|>",))
    return convert(folder / "said", folder / "m.gguf", vocabulary=vocabulary)


def logits_of(model, tokens):
    """[T, vocab] on `cpu`, nothing rounded."""
    cache, paging = new_cache(model.config, KVSpec("fp32").plan(model.config.num_layers), sequences=1, tokens=len(tokens))
    return verify(CpuExecutor(model), torch.tensor(tokens), paging.batch([paging.add()], [len(tokens)]), cache)


def test_logits_are_those_of_transformers(text, theirs):
    prompt = torch.tensor([text[:120]])
    worst, _ = worst_error(theirs, load_model(NAME), "fp32", prompt, steps=16)
    assert worst <= 1e-4


def test_it_has_learned_python(text):
    """A model of random weights has 8.3 nats a token. What is judged is what the weights say, and not a figure of training."""
    assert float(cross_entropy(logits_of(load_model(NAME), text[:512]), torch.tensor(text[1:513]))) < 4.0


def test_its_own_drafts_are_often_right_and_never_change_the_text(text):
    prompts = [text[start : start + 60] for start in (0, 700, 1500)]
    texts = []
    for draft in (None, DraftSpec("mtp", 2)):
        with always_drafting():
            result = load(NAME, executor="cpu", draft=draft).generate(prompts, max_new_tokens=40, sampling=Sampling())
        texts.append([done.token_ids for done in result.completions])
    assert texts[0] == texts[1]
    assert result.drafting.accepted > 0.3 * result.drafting.proposed > 0


def test_a_gguf_file_of_it_has_the_same_next_tokens_in_llama_cpp(text, in_gguf):
    ours, read = load_model(NAME), load_model(in_gguf)
    for (name, one), (_, other) in zip(ours.weights.named(), read.weights.named(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs the peers extra")
    llama = llama_cpp.Llama(str(in_gguf), n_ctx=512, n_batch=256, logits_all=True, n_threads=1, verbose=False)
    llama.eval(text[:400])
    logits = torch.tensor(llama.scores[:400])
    assert torch.equal(logits_of(read, text[:400]).argmax(-1), logits.argmax(-1))
