"""The command `tq`: what it prints, and that everything a user can get wrong is one line on stderr and exit code 2."""

import io
import json
import subprocess
import sys

import pytest
from checkpoints import TEMPLATE, saying, write_checkpoint
from refusals import assert_refused, snapshot

import tq as public
from haarkv.models.catalog import TINY
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.plan import KVSpec
from tq.cli import main


@pytest.fixture
def tq(run, tmp_path):
    """Runs the command in this process, in an empty folder that it must leave as it was."""

    def run_unchanged(*args):
        before = snapshot(tmp_path)
        ran = run(*args)
        assert snapshot(tmp_path) == before
        return ran

    return run_unchanged


def test_a_closed_stdin_is_refused(tq, checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert_refused(tq("generate", "--model", checkpoint, "--prompt-file", "-"), "--prompt-file -")


# -- The process ----------------------------------------------------------------------------------------------------------


def test_help_and_the_bare_package_do_not_import_torch():
    code = (
        "import sys, tq\n"
        "from tq.cli import main\n"
        "from tq.cli import cli\n"
        "names = cli.list_commands(None)\n"
        "assert len(names) > 10\n"
        "for args in [[], ['--help'], ['--version'], *([name, '--help'] for name in names)]:\n"
        "    assert main(args) == 0\n"
        "slow = {'torch', 'tokenizers', 'matplotlib'} & sys.modules.keys()\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    assert "--max-new-tokens" in done.stdout


# -- generate -------------------------------------------------------------------------------------------------------------


def test_json_has_the_promised_keys_and_consistent_numbers(tq, checkpoint):
    ran = tq("generate", "--model", checkpoint, "--prompt", "hello", "--prompt", "a" * 200, "--max-new-tokens", 7, "--json")
    result = ran.json
    assert ran.out.count("\n") == 1
    assert ran.err == ""
    assert result.keys() == {
        "text", "token_ids", "prompt_tokens", "reused_tokens", "new_tokens", "finish", "load_s", "prefill_ms",
        "prefill_tokens_per_s", "decode_ms_per_token", "decode_tokens_per_s", "sampling", "kv", "memory", "executor", "model",
        "completions",
    }  # fmt: skip
    assert result["kv"].keys() == {"format", "bytes_per_token", "bytes", "bf16_bytes"}
    assert [c["prompt_tokens"] for c in result["completions"]] == [5, 200]
    for completion in result["completions"]:
        assert completion.keys() == {"text", "token_ids", "prompt_tokens", "reused_tokens", "new_tokens", "finish"}
        assert completion["new_tokens"] == len(completion["token_ids"]) == 7
        assert completion["finish"] == "length"
    assert {key: result[key] for key in result["completions"][0]} == result["completions"][0]
    assert result["load_s"] > 0
    assert result["prefill_ms"] > 0
    assert result["decode_ms_per_token"] > 0
    assert result["prefill_tokens_per_s"] == pytest.approx(205e3 / result["prefill_ms"])
    # Six steps of two sequences.
    assert result["decode_tokens_per_s"] == pytest.approx(2e3 / result["decode_ms_per_token"])
    assert result["sampling"]["temperature"] == 0
    assert result["executor"] == "reference"
    assert result["model"] == str(checkpoint)
    # 2 layers, 2 KV heads, K and V; 16 bytes of codes and 2 of scale, or 32 values of 2 bytes. Two blocks a prompt hold 207.
    assert result["kv"] == {
        "format": "tq4",
        "bytes_per_token": 2 * 2 * 2 * 18,
        "bytes": 4 * 128 * 2 * 2 * 2 * 18,
        "bf16_bytes": 4 * 128 * 2 * 2 * 2 * 64,
    }


def test_a_prompt_file_and_stdin_are_read_as_they_are(tq, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_bytes("é\r\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("€\n\n".encode())))
    args = ("--prompt-file", "prompt.txt", "--prompt-file", "-", "--max-new-tokens", 1, "--json")
    result = tq("generate", "--model", checkpoint, *args).json
    assert [c["prompt_tokens"] for c in result["completions"]] == [4, 5]


def test_a_text_that_ends_at_once_is_empty(tq, tmp_path):
    folder = write_checkpoint(tmp_path / "eos", mutate=saying("a"))
    result = tq("generate", "--model", folder, "--prompt", "a", "--json").json
    assert (result["finish"], result["text"], result["token_ids"]) == ("eos", "", [])
    assert tq("generate", "--model", folder, "--prompt", "a").ended() == "\n"


def test_cost_goes_to_stderr_with_the_names_as_they_are(tq, tmp_path):
    folder = write_checkpoint(tmp_path / "a[bf16]" / "m[" / "b] :smile:", mutate=saying("ab"))
    ran = tq("generate", "--model", folder, "--prompt", "a")
    assert ran.ended() == "b\n"
    assert str(folder) in ran.notes("144 bytes a token", "(eos)").replace("\n", "")
    assert str(folder) in tq("info", folder).out.replace("\n", "")


def test_several_texts_are_printed_one_after_the_other_unchanged(tq, tmp_path):
    folder = write_checkpoint(tmp_path / "colour", mutate=saying("a\x1b[31m"))
    ran = tq("generate", "--model", folder, "--prompt", "a", "--prompt", "[")
    assert ran.ended() == "── prompt 1\n\x1b[31m\n── prompt 2\n31m\n"


def test_an_output_that_cannot_show_a_character_does_not_fail(checkpoint, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "utf8", mutate=saying("aé"))
    for json_flag, text in (([], "?"), (["--json"], None)):
        narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
        monkeypatch.setattr(sys, "stdout", narrow)
        assert main(["generate", "--model", str(folder), "--prompt", "a", *json_flag]) == 0
        narrow.flush()
        output = narrow.buffer.getvalue().decode("ascii")
        assert output == f"{text}\n" if text else json.loads(output)["text"] == "é"


# -- The chat template ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "prompt"), [((), "[user]hi[assistant]"), (["--chat"], "[user]hi[assistant]"), (["--no-chat"], "hi")]
)
def test_a_chat_template_is_applied_unless_refused(tq, tmp_path, flags, prompt):
    folder = write_checkpoint(tmp_path / "chat", tokenizer_config={"chat_template": TEMPLATE})
    result = tq("generate", "--model", folder, "--prompt", "hi", "--max-new-tokens", 1, "--json", *flags).json
    assert result["prompt_tokens"] == len(prompt)


# -- info and formats -----------------------------------------------------------------------------------------------------


def test_info_tiny_counts_every_kv_byte(tq):
    info = tq("info", "tiny", "--json", "--memory", "1GiB", "--dtype", "bfloat16").json
    sizes = {row["format"]: row["bytes_per_token"] for row in info["kv"]}
    assert sizes["tq4"] == 2 * 6 * 2 * 66
    assert sizes["bf16"] == 2 * 6 * 2 * 256
    assert info["weight_bytes"] == 2 * info["parameters"]
    # The file holds the weights and a header of some thousand bytes.
    assert 0 < (TINY / "model.safetensors").stat().st_size - info["weight_bytes"] < 20_000
    for row in info["kv"]:
        assert row["ratio"] == sizes["bf16"] / row["bytes_per_token"]
        assert row["max_tokens"] % 128 == 0
        # Tokens in groups wait in BF16: all but one and room for 16 new ones, of each side that has groups.
        groups = [kv_format.group_tokens for kv_format in formats.parse(row["format"], formats.unlearned([(2, 128)] * 6))]
        waiting = sum(6 * 2 * (group - 1 + 16) * 256 for group in groups if group > 1)
        fits = (info["memory"] - info["weight_bytes"] - info["work_bytes"] - waiting) / row["bytes_per_token"]
        assert fits - 128 < row["max_tokens"] <= fits


def test_info_tells_what_a_context_takes(tq):
    """A context that just fits takes no more than the memory, and one block more does."""

    def tq4(*args):
        info = tq("info", "random:14b", "--json", "--memory", "64GiB", *args).json
        return info, next(row for row in info["kv"] if row["format"] == "tq4")

    info, row = tq4("--context", 200_000)
    assert row["bytes"] == info["weight_bytes"] + info["work_bytes"] + 1563 * 128 * 42_240
    for context, fits in ((row["max_tokens"], True), (row["max_tokens"] + 128, False)):
        assert (tq4("--context", context)[1]["bytes"] <= 64 * 2**30) == fits
    assert "GiB at 200,000 tokens" in tq("info", "random:14b", "--context", 200_000).out


@pytest.mark.parametrize(
    ("memory", "size"),
    [("1000000", 10**6), ("80B", 80), ("2k", 2048), ("1.5 GiB", 3 * 2**29), ("24GB", 24 * 10**9), ("1T", 2**40)],
)
def test_info_reads_amounts_of_memory(tq, memory, size):
    info = tq("info", "random:14b", "--json", "--memory", memory).json
    assert info["memory"] == size
    if size < info["weight_bytes"]:
        assert {row["max_tokens"] for row in info["kv"]} == {0}
    assert tq("info", "random:14b", "--memory", memory).code == 0


def test_info_counts_the_weights_that_generate_loads(tq, checkpoint):
    """FP32 on a CPU, unless another dtype is asked for: the same for a model that is only drawn."""
    for model in (checkpoint, TINY):
        for dtype in ([], ["--dtype", "bfloat16"]):
            options = {"dtype": dtype[1]} if dtype else {}
            weights = public.load(model, **options).load_record.weights
            assert tq("info", model, "--json", *dtype).json["weight_bytes"] == weights.total, (model, dtype)
    text = " ".join(tq("info", "random:14b").out.split())
    assert "59.073 GB in float32 on cpu, half with --dtype bfloat16" in text
    assert "29.537 GB in bfloat16 on cpu" in " ".join(tq("info", "random:14b", "--dtype", "bfloat16").out.split())


@pytest.mark.chooses
def test_info_says_which_cache_one_gets_and_how_long_a_sequence_may_be(tq, checkpoint, monkeypatch):
    tq("info", checkpoint).shows(
        "a sequence holds at most 1,024 tokens, the model's positions",
        "without --kv the first run chooses a cache, layer by layer (--kv auto); later runs take it\n",
    )
    assert tq("info", checkpoint, "--json").json["default"] is None
    chosen = KVSpec("k=tq6,v=tq4", 124, 4)
    monkeypatch.setattr("haarkv.validation.planning.choice_cache.saved_choice", lambda *_: chosen)
    tq("info", checkpoint).shows(
        "without --kv a run takes k=tq6,v=tq4; tail 124; sink 4: ", "bits a value at 1,024 tokens, those in BF16 included"
    )
    assert tq("info", checkpoint, "--json").json["default"] == "k=tq6,v=tq4; tail 124; sink 4"
    assert "at most" not in tq("info", checkpoint, "--memory", "2KB").out


def test_info_takes_a_model_as_its_siblings_do(tq, checkpoint):
    assert tq("info", "-m", checkpoint, "--json").json == tq("info", checkpoint, "--json").json


def test_formats_lists_every_format_with_its_bytes(tq):
    rows = {row["name"]: row for row in tq("formats", "--json").json}
    assert list(rows) == [*formats.names(), "lr2", "lr3", "lr4", "lr5"]
    assert (rows["lr3"]["bytes_per_vector"], rows["lr3"]["bits_per_value"]) == (50, 50 * 8 / 128)
    tq4 = rows["tq4"]
    assert tq4.keys() == {"name", "bits_per_value", "bytes_per_vector", "ratio", "purpose", "to_compare"}
    assert (tq4["bytes_per_vector"], tq4["bits_per_value"], tq4["ratio"]) == (66, 66 * 8 / 128, 256 / 66)
    assert rows["bf16"]["ratio"] == 1
    half_rows = {row["name"]: row for row in tq("formats", "--head-dim", 64, "--json").json}
    assert half_rows["tq4"]["bytes_per_vector"] == 34
    assert "lr4" not in {row["name"] for row in tq("formats", "--head-dim", 80, "--json").json}  # 32 must divide it
    table = tq("formats").out
    assert all(name in table for name in rows)
    assert ("q4_0*" in table, "tq4*" in table) == (True, False)
