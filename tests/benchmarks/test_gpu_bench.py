"""The benchmark for GPUs, rehearsed without one: every part, a part that fails, a cut, going on after it, and the page."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from places import ROOT

from haarkv.benchmarks.attention import stored_copies
from haarkv.benchmarks.cases import Case, random_kv, random_queries
from haarkv.benchmarks.gpu import __main__ as command
from haarkv.benchmarks.gpu import checks, page, peers
from haarkv.benchmarks.gpu.attention import Attention, off
from haarkv.benchmarks.gpu.device import DRY
from haarkv.benchmarks.gpu.log import DeviceLostError, Log, drop_half_row, is_result, outcomes, read_rows, unfinished
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OP_NAMES


# -- The whole of it ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A folder that a rehearsal filled, and how it ended."""
    pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
    folder = tmp_path_factory.mktemp("gpu") / "out"
    return folder, rehearse(folder)


def rehearse(folder, *options):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "haarkv.benchmarks.gpu", str(folder), "--dry-run", *options]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_rehearsal_runs_every_part(rehearsed):
    folder, done = rehearsed
    found = outcomes(read_rows(folder))
    [failed] = [row for row in found.values() if "error" in row]
    assert (failed["key"], failed["exit"]) == ("a check that fails", 1)  # and the other parts ran all the same
    assert done.returncode == 1, done.stderr
    assert {of for of, _ in found} == set(command.SHARES)
    for key in (
        "2 x 32 tq4", "2 x 32 copy", "2 x 32 bf16 copy", "2 x 32 sdpa bf16 rows", "2 x 32 sdpa bf16 gqa",
    ):  # fmt: skip
        assert found["attention", key]["us"] > 0
    assert found["attention", "2 x 32 tq4"]["off"] < 0.01
    assert "not installed" in found["attention", "2 x 32 flashinfer"]["missing"]
    assert found["attention", "2 x 32 best"]["best"].startswith("sdpa")
    assert found["append", "2 x 1 new tq4"]["us"] > 0
    assert found["prefill", "8 behind 16 tq4"]["off"] < 0.01
    assert found["steps", "2 x 32 best"]["gain"] > 0
    assert found["checks", "contract rms_norm"]["passed"] == 3
    text = (folder / page.PAGE).read_text(encoding="utf-8")
    for words in ("rehearsal", "sdpa bf16 rows", "a check that fails", "Whole decode steps", "8 behind 16 flashinfer"):
        assert words in text
    facts = found["machine", "facts"]  # the header of every benchmark
    assert facts.keys() >= {"benchmark", "date", "cpu", "threads", "versions", "model", "context", "kv"}


@pytest.mark.slow
def test_after_a_cut_it_goes_on_with_what_is_missing(rehearsed, tmp_path):
    rows = [row for row in read_rows(rehearsed[0]) if row["part"] == "append"]
    lost = next(row for row in rows if "us" in row and row["who"] == "bf16 index_copy")
    kept = [row for row in rows if row != lost]
    half = json.dumps(lost)[:40]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept) + half, encoding="utf-8")
    done = rehearse(tmp_path, "--parts", "append")
    assert done.returncode == 0, done.stderr
    now = read_rows(tmp_path)
    assert now[: len(kept)] == kept
    assert [(row["key"], "begun" in row) for row in now[len(kept) :]] == [(lost["key"], True), (lost["key"], False)]


# -- Parts that break ----------------------------------------------------------------------------------------------------
BREAKS = """
import os, sys, time
from pathlib import Path
from haarkv.benchmarks.gpu.log import DeviceLostError, Log
folder, part = Path(sys.argv[1]), sys.argv[3]
seconds, since = float(sys.argv[5]), int(sys.argv[7])
log = Log(folder, part, seconds, since)
try:
    for key in ("one", "dies", "two", "loses the device", "three", "hangs", "four"):
        if part == "machine" or not log.wants(key):
            continue
        with log.attempt(key) as row:
            if key == "dies":
                os.abort()
            if key == "loses the device":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if key == "hangs":
                time.sleep(600)
            row["us"] = 1.0
except DeviceLostError:
    sys.exit(3)
"""


def test_what_breaks_a_part_costs_one_row_and_the_parts_after_it_run(tmp_path, monkeypatch):
    script = tmp_path / "part.py"
    script.write_text(BREAKS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(command, "SHARES", {"checks": 300.0, "machine": 0.0})
    run = command.Run(tmp_path, ["checks", "machine"], dry=True, program=[str(script)])
    once, started = run._once, []

    class Impatient(subprocess.Popen):
        """Its time is over as soon as it hangs, however long a busy machine takes to start it."""

        def wait(self, timeout=None):
            while self.poll() is None:
                if "hangs" in unfinished(read_rows(tmp_path), "checks"):
                    assert timeout <= 300 + command._GRACE_S
                    return super().wait(0.1)
                time.sleep(0.02)
            return super().wait()

    def counted(part, seconds):
        started.append(part)
        return once(part, seconds)

    monkeypatch.setattr(command.subprocess, "Popen", Impatient)
    monkeypatch.setattr(run, "_once", counted)
    assert run.all() == 1
    found = {key: row for (part, key), row in outcomes(read_rows(tmp_path)).items() if part == "checks"}
    assert [key for key, row in found.items() if is_result(row)] == ["one", "two", "three"]
    assert found["dies"]["error"].startswith("its process ended with code -6")
    assert "illegal memory access" in found["loses the device"]["error"]
    assert found["hangs"]["error"] == "its time was over"
    assert "four" not in found
    assert started == ["checks"] * 3 + ["machine"]
    assert (tmp_path / page.PAGE).exists()


def test_a_part_whose_time_is_over_says_what_it_left_out(tmp_path):
    log = Log(tmp_path, "attention", 0.0)
    assert not log.wants("8 x 32768 best")
    [row] = read_rows(tmp_path)
    assert row["missing"] == "not measured: the 0 s of part attention were over"
    assert command.is_wrong(row)
    # The next run tries again; this one does not.
    assert Log(tmp_path, "attention", 60.0, since=1).wants("8 x 32768 best")
    assert not Log(tmp_path, "attention", 60.0, since=0).wants("8 x 32768 best")


def test_an_error_is_a_row_and_a_lost_device_ends_the_process(tmp_path):
    log = Log(tmp_path, "steps", 60.0)
    with log.attempt("a") as row:
        row["batch"] = 8
        raise ValueError("no such thing\nmore")
    with pytest.raises(DeviceLostError), log.attempt("outer"), log.attempt("b"):
        raise RuntimeError("CUDA error: misaligned address")
    rows = read_rows(tmp_path)
    assert outcomes(rows)["steps", "a"] == {"part": "steps", "key": "a", "batch": 8, "error": "ValueError: no such thing"}
    assert "misaligned" in outcomes(rows)["steps", "b"]["error"]
    assert unfinished(rows, "steps") == ["outer"]  # it goes on with its other rows


def test_a_cut_row_is_dropped_and_a_strange_file_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"part": "p", "key": "k", "us": 1}\n{"part": "p", "ke', encoding="utf-8")
    assert len(read_rows(tmp_path)) == 1
    drop_half_row(tmp_path)
    assert file.read_text(encoding="utf-8").endswith("1}\n")
    file.write_text("something else\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1 of .* is no row of this benchmark; name another folder"):
        read_rows(tmp_path)
    assert command.main([str(tmp_path)]) == 2


def test_without_a_gpu_it_is_one_clear_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command.main([str(tmp_path), "--one", "machine"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert command.main([str(tmp_path), "--page"]) == 0


def test_a_checkout_that_is_not_installed_is_found_by_the_parts():
    assert command.ROOT == checks.ROOT == ROOT
    assert (command.ROOT / "haarkv" / "__init__.py").exists()


def test_the_checks_need_no_zstd():
    """A machine with a card may lack it, and only stored conversations are packed."""
    program = "import sys; sys.modules['zstandard'] = None; import haarkv.engine.session, haarkv.validation.ops.__main__"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_it_takes_less_than_nine_minutes():
    assert sum(command.SHARES.values()) + len(command.SHARES) * 3 < 9 * 60


def test_checks_that_take_too_long_are_ended(tmp_path, monkeypatch):
    commands = {"slow": ["-c", "import time; print('begun', flush=True); time.sleep(60)"], "quick": ["-c", "print('done')"]}
    monkeypatch.setattr(checks, "commands", lambda dry: commands)
    began = time.monotonic()
    checks.run(Log(tmp_path, "checks", 60.0), 1.5, dry=False)
    assert time.monotonic() - began < 20
    found = {row["key"]: row for row in read_rows(tmp_path)}
    assert found["slow"]["error"] == "it was ended: the time of this part was over"
    assert found["slow"]["end"] == ["begun"]
    assert found["quick"]["exit"] == 0


def test_the_checks_that_a_card_runs_are_whole():
    commands = checks.commands(dry=False)
    for op in OP_NAMES:
        shares = [words[-1] for words in commands.values() if words[-3:-2] == [op]]
        assert shares == [f"{part}/{len(shares)}" for part in range(1, len(shares) + 1)] != []
    for words in commands.values():
        assert all((ROOT / word).exists() for word in words if word.endswith((".py", ".txt"))), words


# -- The data, and others' attention ---------------------------------------------------------------------------------------
CONFIG: ModelConfig = DRY.config


def dry_attention(folder, ops=reference):
    return Attention(DRY, torch.device("cpu"), ops, Log(folder, "attention", 60.0))


def test_what_is_timed_is_the_attention_of_every_copy():
    """Sequences have numbers of their own, and what FP32 says of the first is what each copy gives."""
    device, case = torch.device("cpu"), Case(4, 150)
    k, v = random_kv(CONFIG, case, device)
    assert not torch.equal(k[0], k[1])
    q = random_queries(CONFIG, 4, device)
    cache, batch = stored_copies(KVSpec("bf16").plan(1), CONFIG, case, k, v, 3)
    for layer in range(3):
        reference.store_kv(k[:, :, -1].float(), v[:, :, -1].float(), cache, layer, batch)
        out = reference.paged_attention(q, cache, layer, batch, CONFIG.attentions[0].scale)
        p = torch.einsum("bhgd,bhsd->bhgs", q.double().view(4, 1, 2, -1), k.double()) * CONFIG.attentions[0].scale
        exact = torch.einsum("bhgs,bhsd->bhgd", p.softmax(-1), v.double()).view(q.shape)
        assert off(out, exact[:2].float()) < 0.01


def test_a_result_that_is_not_attentions_is_not_timed(tmp_path):
    def zeros(q, *_):
        return torch.zeros_like(q)

    timed = dry_attention(tmp_path, SimpleNamespace(paged_attention=zeros, store_kv=reference.store_kv))
    timed.decode()
    [row] = [row for row in read_rows(tmp_path) if row["key"] == "2 x 32 tq4" and "begun" not in row]
    assert "not attention" in row["error"]
    assert "us" not in row
    best = timed.log.results["2 x 32 best"]
    assert best["ours_us"] == {}
    assert best["best_us"] > 0


def fake_flash(q, k, v, cache_seqlens, causal):
    """FlashAttention's signature and shapes, [B, T, H, D], in plain torch; a query sees what stands before it and itself."""
    assert causal
    assert cache_seqlens.tolist() == [k.shape[1]] * len(q)
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True,
        attn_mask=torch.ones(q.shape[1], k.shape[1]).bool().tril(k.shape[1] - q.shape[1]),
    ).transpose(1, 2)  # fmt: skip


class FakeFlashInfer:
    """FlashInfer's decode over pages [pages, Hkv, 16, D], in plain torch."""

    def __init__(self, _workspace, layout, **buffers):
        assert layout == "HND"
        assert buffers["use_cuda_graph"]
        assert set(buffers) >= {"paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"}

    def plan(self, indptr, indices, last, heads, kv_heads, dim, page_size, **_):
        assert (last == page_size).all()
        self.indptr, self.indices = indptr.tolist(), indices.long()

    def run(self, q, paged):
        outs = []
        for row, begin, end in zip(q, self.indptr, self.indptr[1:], strict=False):
            k, v = (x[self.indices[begin:end]].transpose(0, 1).flatten(1, 2)[None] for x in paged)
            outs.append(torch.nn.functional.scaled_dot_product_attention(row[None, :, None], k, v, enable_gqa=True)[0, :, 0])
        return torch.stack(outs)


def test_flash_attention_and_flash_infer_are_asked_as_their_signatures_want(tmp_path, monkeypatch):
    def single(q, k, v, causal):
        return fake_flash(q[None], k[None], v[None], torch.tensor([len(k)]), causal)[0]

    modules = {
        "flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=fake_flash),
        "flash_attn": SimpleNamespace(flash_attn_with_kvcache=lambda *a, **kw: (fake_flash(*a, **kw), None)),
        "flashinfer": SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer, single_prefill_with_kv_cache=single),
    }
    monkeypatch.setattr(peers, "find_spec", lambda name: name in modules)
    monkeypatch.setattr(peers, "import_module", modules.__getitem__)
    timed = dry_attention(tmp_path)
    timed.decode()
    timed.prefill()
    for case in ("2 x 32", "8 behind 16"):
        for name in ("flash-attention 3", "flash-attention 2", "flashinfer"):
            assert timed.log.results[f"{case} {name}"]["off"] < 0.01


# -- The page ----------------------------------------------------------------------------------------------------------------
def attention_rows():
    for context, ours, best in ((1024, 5.0, 7.0), (32768, 90.0, 250.0)):
        row = {"part": "attention", "batch": 8, "context": context, "bytes": 8.0 * context, "low_us": 1.0, "high_us": 300.0}
        yield {**row, "key": f"8 x {context} tq4", "who": "tq4", "side": "ours", "us": ours, "tb_s": 1.5, "off": 0.002}
        yield {**row, "key": f"8 x {context} copy", "who": "copy", "side": "copy", "us": ours / 2, "tb_s": 3.0}
        for number, who in enumerate(("a", "b")):
            yield {**row, "key": f"8 x {context} {who}", "who": who, "side": "peer", "us": best + number, "bytes": 1.0}


def test_the_page_compares_with_the_best_of_the_others_with_a_copy_and_with_what_was_predicted():
    predicted = [{
        "batch": 8, "context": 32768, "kernel": "decode", "who": "tq4", "bytes_us": 64.0, "least_us": 91.0,
        "bound_by": "alu", "likely_us": 100.0, "drawn": True,
    }]  # fmt: skip
    text = page.html(list(attention_rows()), predicted)
    assert "2.78" in text  # 250 / 90
    assert "50 %" in text  # of a copy of the same bytes
    assert '<tr class="bad"><td class=left>8 x 32,768</td><td class=left>decode</td>' in text  # 90 is less than the least
    assert "rehearsal" in text  # no row says which GPU


def test_plots_are_drawn_where_matplotlib_is(monkeypatch):
    best = {"part": "attention", "batch": 8, "who": "-", "ours_us": {"tq4": 9.0}, "best_us": 11.0}
    rows = [*attention_rows(), *({**best, "context": c, "key": f"8 x {c} best", "copy_us": 3.0} for c in (1024, 32768))]
    if find_spec("matplotlib"):
        assert all(words in page.html(rows, page.predictions()) for words in ("<svg", "best of all peers", "predicted"))
    monkeypatch.setattr(page, "find_spec", lambda _: None)
    assert "<svg" not in page.html(rows, page.predictions())
