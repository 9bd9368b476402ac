"""Commands on models with planted faults: one line says what is balanced; garbage is refused."""

import json

import outliers
import pytest
from planted import save_tiny, text, tiny
from refusals import assert_refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(outliers.outlier_channels(tiny(), 100), tmp_path_factory.mktemp("planted") / "m")


GENERATE = ("--prompt", "def main(argv):\n    return len(argv) + sum(map(len, argv))\n", "--max-new-tokens", 4)


def test_balance_is_said_on_stderr_and_can_be_left_out(run, folder):
    code, balanced, err = run("generate", "--model", folder, *GENERATE)
    assert code == 0
    said = [line for line in err.splitlines() if "balanced" in line]
    assert len(said) == 1
    assert "K of layers 0 to 5" in said[0]
    assert run("generate", "--model", "tiny", *GENERATE)[1] == balanced
    refused = run("generate", "--model", folder, *GENERATE, "--balance", "off")
    assert_refused(refused, "text would be garbage: K of layers 0 to 5", "leave balance on", "--allow-collapse")
    code, _, err = run("generate", "--model", folder, *GENERATE, "--balance", "off", "--allow-collapse")
    assert code == 0
    assert "tq: warning: K of layers 0 to 5 suffers in tq4" in err
    assert "balanced" not in err


def test_eval_measures_what_generate_would_use(run, folder, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(text()[:1500], encoding="utf-8")

    def kl(model, *options):
        arguments = ("--text", file, "--kv", "tq4", "--tokens", 200, "--greedy-prompts", 0, "--json")
        code, out, err = run("eval", "--model", model, *arguments, *options)
        assert code == 0, err
        return json.loads(out)["rows"][0]["kl_mean"], err

    planted_kl, said = kl(folder)
    assert "balanced K of layers 0 to 5" in said
    even, silent = kl("tiny")
    assert silent == ""
    assert planted_kl < 1.5 * even
    assert kl(folder, "--balance", "off")[0] > 50 * even


def test_a_file_is_saved_with_the_balance_that_it_is_loaded_with(run, folder, tmp_path):
    prompt = GENERATE[1]
    code, _, err = run("cache", "save", "--model", folder, "--prompt", prompt, "--out", tmp_path / "balanced")
    assert code == 0
    assert "balanced K of layers 0 to 5" in err
    off, file = ("--balance", "off", "--allow-collapse"), tmp_path / "off"
    refused = run("cache", "save", "--model", folder, "--prompt", prompt, "--out", file, *off[:2])
    assert_refused(refused, "text would be garbage", "leave balance on", "--allow-collapse")
    assert not file.exists()
    code, _, err = run("cache", "save", "--model", folder, "--prompt", prompt, "--out", file, *off)
    assert code == 0
    assert "balanced" not in err
    more = ("generate", "--model", folder, "--prompt", prompt + "#", "--max-new-tokens", 2, "--json")
    for name, options in (("balanced", ()), ("off", off)):
        code, out, err = run(*more, *options, "--load-cache", tmp_path / name)
        assert code == 0, err
        assert json.loads(out)["reused_tokens"] > 10
    for name, options, words in (("balanced", off, "leave out --balance off"), ("off", (), "give --balance off")):
        code, out, err = run(*more, *options, "--load-cache", tmp_path / name)
        assert (code, out) == (2, "")
        assert words in err.splitlines()[-1]


def test_the_format_of_a_file_is_judged_before_its_balance(run, folder, tmp_path):
    prompt, file = GENERATE[1], tmp_path / "exact"
    assert run("cache", "save", "--model", folder, "--prompt", prompt, "--kv", "bf16", "--out", file).code == 0
    refused = run("generate", "--model", folder, "--prompt", prompt, "--kv", "tq4", "--load-cache", file)
    assert refused.code == 2
    assert "stores layer 0 in bf16, and this run in tq4" in refused.err.splitlines()[-1]


def test_a_small_gain_of_balance_is_not_worth_a_warning(run, folder, monkeypatch):
    for least, said in ((1e9, False), (2.0, True)):
        monkeypatch.setattr("haarkv.engine.plans.WORTH_SAYING", least)
        assert ("balanced" in run("generate", "--model", folder, *GENERATE).err) == said
