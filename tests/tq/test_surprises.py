"""What once happened in silence is said, or no longer happens."""

import warnings
from pathlib import Path

import pytest
from calibration_files import write_calibration
from checkpoints import write_checkpoint
from gguf_files import byte_vocabulary, convert
from npu_programs import with_pypto
from refusals import assert_refused

import tq as public
from haarkv.engine.plans import pays_from
from haarkv.models.catalog import read_config
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.plan import KVSpec


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose keys can be learned."""
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "m", config={"head_dim": 64})


@pytest.fixture(scope="module")
def calibration(wide, tmp_path_factory):
    return write_calibration(tmp_path_factory.mktemp("learned") / "learned.safetensors", wide)


def cache_format(run, model, *args):
    """The cache of a short text, in words."""
    return run("generate", "--model", model, "--prompt", "ab", "--max-new-tokens", 2, "--json", *args).json["kv"]["format"]


@pytest.mark.parametrize(
    ("args", "words"),
    [((), "tail 124; sink 4"), (("--kv-sink", 0), "tail 124"), (("--kv-tail", 0), "tail 0; sink 4"),
     (("--kv-tail", 0, "--kv-sink", 0), "tail 0"), (("--kv-sink", 2), "tail 124; sink 2")],
)  # fmt: skip
def test_a_tail_or_sinks_of_0_that_were_asked_for_are_none(run, wide, calibration, args, words):
    assert cache_format(run, wide, "--calibration", calibration, *args) == f"k=lr4,v=tq4; {words}"


# -- Files of ours that are another one's -----------------------------------------------------------------------------------


def test_a_file_of_ours_in_the_wrong_place_is_called_what_it_is(run, wide, calibration, tmp_path):
    assert run("cache", "save", "--model", wide, "--prompt", "ab", "--out", "stored").code == 0
    args = ("generate", "--model", wide, "--prompt", "ab")
    a_cache, a_calibration = "it is a stored cache, which --load-cache takes", "it is a calibration, which --calibration takes"
    assert_refused(run(*args, "--kv-plan", "stored"), "stored is no KV plan: ", a_cache)
    assert_refused(run(*args, "--calibration", "stored"), "stored is no calibration: ", a_cache)
    assert_refused(run(*args, "--load-cache", calibration), "is no stored cache: ", a_calibration)
    assert_refused(run(*args, "--kv-plan", calibration), "is a calibration without a plan")


# -- Stored caches ------------------------------------------------------------------------------------------------------------


def test_a_stored_cache_goes_on(run, checkpoint):
    text = "spam and eggs " * 12

    def generate(*args):
        return run("generate", "--model", checkpoint, "--no-chat", "--max-new-tokens", 5, *args)

    def save(name, *args):
        assert run("cache", "save", "--model", checkpoint, "--no-chat", "--prompt", text, "--out", name, *args).code == 0

    save("plain", "--no-compress")
    save("packed")
    assert Path("packed").stat().st_size < Path("plain").stat().st_size
    info = run("cache", "info", "plain", "--json").json
    assert (info["tokens"], info["formats"]) == (info["stored"], ["tq4"] * 2)
    whole = generate("--prompt", f"{text}and", "--json").json
    for name in ("plain", "packed"):
        went_on = generate("--prompt", f"{text}and", "--load-cache", name, "--json").json
        assert (went_on["text"], went_on["reused_tokens"]) == (whole["text"], info["stored"])
    assert "were stored already" in generate("--load-cache", "plain", "--save-cache", "d", "--seed", 1).err
    assert_refused(generate("--load-cache", "d", "--kv", "tq3"), "in tq4, and this run in tq3")


# -- What it costs ------------------------------------------------------------------------------------------------------------


def cost(run, model, *args):
    """The cost lines of a text, as one line."""
    ran = run("generate", "--model", model, *args)
    assert ran.code == 0
    return " ".join(ran.err.split())


def test_a_text_too_short_to_gain_is_said_to_be(run, wide):
    tail = ("--kv", "tq4", "--kv-tail", 124, "--kv-sink", 4)
    text = cost(run, wide, "--prompt", "ab", "--max-new-tokens", 2, *tail)
    config, plan = read_config(str(wide)), KVSpec("tq4", 124, 4).plan(2)
    length = pays_from(config, plan)
    assert f"; smaller than bf16 from {length:,} tokens on" in text
    bf16 = KVSpec("bf16").plan(2)
    for tokens, smaller in ((length, True), (length - 128, False)):
        nbytes, plain = (cache_bytes(each, tokens, config.kv_shapes, 1) for each in (plan, bf16))
        assert (nbytes < plain) == smaller
    assert "smaller than bf16" not in cost(run, wide, "--prompt", "a" * (length - 5), "--max-new-tokens", 2, *tail)
    assert "smaller than bf16" not in cost(run, wide, "--prompt", "ab", "--max-new-tokens", 2, "--kv", "tq4")
    assert pays_from(config, KVSpec("fp32").plan(2)) is None


def test_one_token_is_one_token(run, wide):
    text = cost(run, wide, "--prompt", "a", "--max-new-tokens", 1)
    assert "prompt 1 token in" in text
    assert "new 1 token, no decode step" in text
    ran = run("cache", "save", "--model", wide, "--prompt", "a", "--out", "stored")
    assert "stored: 1 token," in ran.err


@with_pypto
def test_an_interpreter_that_nobody_asked_for_is_announced(run, monkeypatch):
    def stop(*_, **__):
        raise public.InputError("computed")

    monkeypatch.setattr("haarkv.engine.session.generate", stop)
    for device, is_announced in (((), True), (("--device", "sim"), False)):
        _, _, err = run("generate", "--prompt", "x", "--executor", "npu", *device)
        *before, last = err.splitlines()
        assert last == "tq: computed"
        assert (
            any("executor npu runs in an interpreter here, minutes for a few tokens" in line for line in before)
            == is_announced
        )


@with_pypto
@pytest.mark.parametrize(
    "command",
    [
        ("eval", "--text", "t.txt", "--executor", "npu"), ("diff", "--a", "npu", "--b", "npu:bf16"),
        ("calibrate", "--out", "c.safetensors", "--executor", "npu"), ("bench", "decode", "--executor", "npu"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_so_it_is_by_commands_that_compare_and_measure(run, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some text")
    for device, is_announced in (((), True), (("--device", "sim"), False)):
        code, _, err = run(*command, "--model", "nowhere", *device)
        assert code == 2
        assert ("executor npu runs in an interpreter here" in err) == is_announced


def test_weights_that_an_executor_restores_are_announced(tmp_path):
    pytest.importorskip("onnxruntime")
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 256, "vocab_size": 263}
    folder = write_checkpoint(tmp_path / "m", config=sizes)
    for kind, executor in (("TQ2_0", "onnx"), ("TQ2_0", "cpu")):
        path = convert(folder, tmp_path / f"{kind}.gguf", kind, vocabulary=byte_vocabulary())
        pattern = rf"{executor} restores quantised weights as they load \({kind}\): .* GiB in place of"
        with pytest.warns(UserWarning, match=pattern):
            public.load(path, executor=executor)
    path = convert(folder, tmp_path / "kept.gguf", "Q8_0", vocabulary=byte_vocabulary())
    for executor in ("onnx", "cpu"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            public.load(path, executor=executor, balance=False)
