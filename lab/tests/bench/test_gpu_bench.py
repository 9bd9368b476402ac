"""The benchmark for GPUs, rehearsed without one: checks, timings, a part that fails, a cut, the page."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from places import ROOT

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.table import OP_NAMES
from lab.bench import prefill
from lab.bench.gpu import __main__ as command


def test_a_rehearsal_runs_every_part_and_goes_on_after_a_cut(tmp_path):
    pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
    folder = tmp_path / "out"
    done = rehearse(folder)
    rows = command.read_rows(folder)
    assert [key for key, row in rows.items() if "error" in row] == ["a check that fails"]
    assert done.returncode == 1, done.stderr
    assert set(rows) == {*command.checks(dry=True), *command.timings(dry=True, memory=0)}
    assert rows["contract rms_norm"]["passed"] == 3
    times = {(r["kind"], r["who"]): r["ms"] for row in rows.values() for r in row.get("result", {}).get("rows", ())}
    for key in (("attention", "sdpa bf16 gqa"), ("store", "reference tq4"), ("prefill", "sdpa bf16 causal")):
        assert times[key] > 0
    assert {who.removeprefix("sdpa bf16 ") for kind, who in times if kind == "step"} & {"rows in our step", "gqa in our step"}
    result = rows["attention of 1"]["result"]  # the header of every benchmark
    assert result.keys() >= {"benchmark", "date", "cpu", "threads", "versions", "model", "context", "kv"}
    assert rows["a prompt behind 32768"]["result"]["stored"] == 16
    text = (folder / command.PAGE).read_text(encoding="utf-8")
    for words in ("rehearsal", "sdpa bf16 rows", "it fails on purpose", "whole decode step"):
        assert words in text
    lines = (folder / command.ROWS).read_text(encoding="utf-8").splitlines()
    lost_line = next(line for line in lines if '"contract rms_norm"' in line)
    kept_lines = [line for line in lines if line != lost_line and '"a check that fails"' not in line]
    (folder / command.ROWS).write_text("\n".join([*kept_lines, lost_line[:40]]), encoding="utf-8")
    rehearse(folder)
    now = (folder / command.ROWS).read_text(encoding="utf-8").splitlines()
    assert now[: len(kept_lines)] == kept_lines
    assert {json.loads(line)["key"] for line in now[len(kept_lines) :]} == set(command.checks(dry=True))


def rehearse(folder):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "lab.bench.gpu", str(folder), "--dry-run"]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_strange_file_is_refused_and_a_cut_row_dropped(tmp_path):
    file = tmp_path / command.ROWS
    file.write_text('{"key": "k", "exit": 0}\n{"ke', encoding="utf-8")
    assert list(command.read_rows(tmp_path)) == ["k"]
    command._drop_half_row(tmp_path)
    assert file.read_text(encoding="utf-8").endswith("0}\n")
    file.write_text("something else\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1 of .* is no row of this benchmark; name another folder"):
        command.read_rows(tmp_path)
    assert command.main([str(tmp_path), "--dry-run"]) == 2


def test_without_a_gpu_it_is_one_clear_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command.main([str(tmp_path)]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_checkout_that_is_not_installed_is_found_by_the_parts():
    assert ROOT.resolve() == command.ROOT
    assert (command.ROOT / "haarkv" / "__init__.py").exists()


def test_the_checks_need_no_zstd():
    """A machine with a card may lack it, and only stored conversations are packed."""
    program = "import sys; sys.modules['zstandard'] = None; import lab.bench.gpu.__main__, lab.bench.contract"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_it_takes_less_than_nine_minutes():
    groups = command.timings(dry=False, memory=2**37)
    assert command.CHECKS_S + sum(timing.seconds for timing in groups.values()) < 9 * 60


def test_what_takes_too_long_is_ended_and_takes_no_other_with_it():
    commands = {
        "slow": ["-c", "import time; print('begun', flush=True); time.sleep(60)"],
        "quick": ["-c", "print('done')"],
        "dies": ["-c", "import os; os.abort()"],
    }
    began = time.monotonic()
    rows = {name: command.parse_row(code, text) for name, (code, text, _) in command.outputs(commands, 2.5)}
    assert time.monotonic() - began < 20
    assert (rows["slow"]["error"], rows["slow"]["end"]) == ("it was ended: its time was over", ["begun"])
    assert rows["dies"]["error"].startswith("exit code -6: ")
    assert rows["quick"] == {"exit": 0, "end": ["done"]}


def test_a_row_of_ours_without_a_time_is_wrong_and_one_of_a_peer_is_not():
    def result_line(who):
        return json.dumps({"result": {"rows": [{"who": who, "note": "no CUDA graph can hold it"}]}})

    assert command.parse_row(0, result_line("cuda tq4"))["error"] == "no time of cuda tq4"
    assert "error" not in command.parse_row(0, result_line("sdpa bf16 rows"))


def test_the_checks_that_a_card_runs_are_whole():
    commands = command.checks(dry=False)
    for op in OP_NAMES:
        shares = [words[-1] for words in commands.values() if words[-3:-2] == [op]]
        assert shares == [f"{part}/{len(shares)}" for part in range(1, len(shares) + 1)] != []
    for words in commands.values():
        assert all((ROOT / word).exists() for word in words if word.endswith((".py", ".txt"))), words


def test_a_pretrained_model_is_validated_and_timed_with_its_own_cache():
    pretrained = command.PretrainedModel("m.gguf", "plan.safetensors")
    (words,) = pretrained.check().values()
    assert words[words.index("--model") + 1 :] == ["m.gguf", "--kv-plan", "plan.safetensors"]
    assert {"--executor", "cuda"} <= set(words)
    (timing,) = pretrained.timings().values()
    assert (timing.request.model, timing.request.kvs) == ("m.gguf", ["tq4", "plan.safetensors"])
    assert pretrained.words() == ["--model", "m.gguf", "--kv-plan", "plan.safetensors"]
    assert command.PretrainedModel("m.gguf", None).timings()["the model"].request.kvs == ["tq4"]


def test_words_that_name_nothing_are_refused_with_the_names_there_are(tmp_path, capsys):
    """Those of a given model among them."""
    assert command.main([str(tmp_path), "--dry-run", "--model", "tiny", "--only", "nothing of this name"]) == 2
    assert "validate the model, attention of 1" in capsys.readouterr().err


# -- The data, and others' attention -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("window", "prefix_tokens"), [(None, 0), (None, 5), (3, 5), (3, 0), (20, 5)])
def test_a_prompt_behind_stored_tokens_sees_them(window, prefix_tokens):
    new, whole = 4, 4 + prefix_tokens
    mask = prefill.causal_mask(window, prefix_tokens, new, torch.device("cpu"))
    q, k = torch.randn(1, 1, new, 8), torch.randn(1, 1, whole, 8)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, is_causal=mask is None)
    last, first = (
        prefix_tokens + torch.arange(new).unsqueeze(1),
        prefix_tokens + torch.arange(new).unsqueeze(1) - (window or whole),
    )
    visible = (torch.arange(whole) <= last) & (torch.arange(whole) > first)
    exact = (q @ k.mT / 8**0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ k
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-5)
