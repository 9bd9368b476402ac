"""`tq generate` and `tq eval` of models with planted faults: one line says what is balanced; garbage is refused."""

import json

import pytest
from planted import text, tiny
from refusals import assert_refused

from haarkv.models import planted
from tq.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return planted.save(planted.outlier_channels(tiny(), 100), tmp_path_factory.mktemp("planted") / "m")


@pytest.fixture
def run(capsys):
    def run(*args):
        return main([*map(str, args)]), *capsys.readouterr()

    return run


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
