"""The load on a server: what is asked of it, how rounds are read and summed up, and that nothing is left running."""

import json
import math
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from haarkv.models.catalog import TINY, read_config
from haarkv.tq_ops.errors import InputError
from lab.bench import serve
from lab.bench.__main__ import main
from lab.bench.serve_process import Child, Server, ending, last_reason, parse_metrics
from lab.bench.serve_rounds import Case, Round, Rounds, client_args, ratio, read_round, summary_row, write_prompts

CASE = Case(users=3, prompt=128, output=5)
METRICS = """# HELP vllm:num_preemptions_total Times.
vllm:num_preemptions_total{engine="0",model_name="a} b"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
plain 2e-05
vllm:cache_config_info{block_size="128",kv_cache_size_tokens="42240",engine="0"} 1.0
"""
LOG = """INFO starting
Traceback (most recent call last):
(EngineCore pid=7) ValueError: No available memory for the cache blocks.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
INFO leaving
"""


def make_round(rate=10.0, tpot=(100.0,), ttft=(500.0,), cpu=20.0, **others):
    counts = {"failures": 0, "preemptions": 0, "hit_share": 0.9, **others}
    return Round(output_rate=rate, total_rate=3 * rate, ttft=ttft, tpot=tpot, cpu_ms=cpu, **counts)


# -- What is asked -----------------------------------------------------------------------------------------------------


def test_every_user_has_a_prompt_of_its_own_and_no_case_shares_any(tmp_path):
    seeds = []
    for number in (1, 2):
        write_prompts(tmp_path / "p", CASE, number)
        lines = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
        assert [(p["input_length"], p["output_length"]) for p in lines] == [(129, 5)] * 3
        seeds += [seed for p in lines for seed in p["hash_ids"]]
    assert len(set(seeds)) == 6


def test_the_client_sends_all_at_once_and_takes_whole_answers(tmp_path):
    args = client_args(TINY, 81, CASE, tmp_path / "p", 7)
    flags = dict(pairwise(args))
    assert (flags["--num-prompts"], flags["--max-concurrency"], flags["--port"], flags["--seed"]) == ("3", "3", "81", "7")
    assert flags["--timed-trace-chunk-hash-size"] == "129"  # one draw fills a prompt
    assert {"--ignore-eos", "--save-detailed", "--no-self-timed"} <= set(args)


def make_request(**changes):
    defaults = {"model": "random:0.6b", "layers": None, "kv": "bf16,tq4", "users": (1,), "prompt_tokens": (128,),
             "output_tokens": 64, "memory": 64, "cold": 1, "repeats": 1, "seed": 0}  # fmt: skip
    return serve.request_of(**(defaults | changes))


def test_arguments_become_cases_prompts_outside_users_inside():
    request = make_request(users=(1, 8, 1), prompt_tokens=(16, 32), kv="bf16,k=q8_0,v=tq3,bf16")
    assert [(c.users, c.prompt) for c in request.cases] == [(1, 16), (8, 16), (1, 32), (8, 32)]
    assert (request.kvs, request.layers) == (["bf16", "k=q8_0,v=tq3"], 4)
    assert make_request(model="tiny").layers is None


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--users", "1,x"], "'1,x'"),
        (["--users", "0"], "'0'"),
        (["--kv", "bf16,q9_0"], "q9_0"),
        (["--kv", "bf16,k=lr4,v=tq4"], "lr4"),
        (["--repeats", "0"], "--repeats"),
        ([], "vLLM is not installed in this Python; `python -m haarkv.serving.vllm_plugin.install`"),
    ],
)
def test_what_cannot_be_measured_is_one_line(argv, word, capsys, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    assert main(["serve", "--model", "tiny", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.strip().splitlines())) == ("", 1)
    assert word in err


def test_all_servers_get_the_same_flags_and_room_for_whole_pages(tmp_path):
    served_model = serve.model_folder("tiny", None, tmp_path)
    flags = serve.server_flags(make_request(model="tiny"), served_model)
    flag_values = dict(pairwise(flags))
    assert (flag_values["--max-model-len"], flag_values["--kv-cache-memory-bytes"]) == ("256", str(64 * 2**20))
    assert "dummy" not in flags
    with pytest.raises(InputError, match="4096 tokens, not for 4155"):
        serve.server_flags(make_request(model="tiny", prompt_tokens=(4090,)), served_model)


def test_a_random_model_is_a_folder_that_vllm_can_read(tmp_path):
    served_model = serve.model_folder("random:0.6b", 4, tmp_path)
    read, whole = read_config(served_model.folder), read_config("random:0.6b")
    assert read.layers == whole.with_layers(4).layers
    assert read.hidden_size == whole.hidden_size
    assert read.vocab_size == 21760
    assert "4 of 28 layers" in served_model.description
    assert "21,760 of 151,936 words" in served_model.description
    assert "random weights" in served_model.description
    assert {"tokenizer.json", "tokenizer_config.json"} <= {f.name for f in served_model.folder.iterdir()}
    assert served_model.flags == ("--load-format", "dummy")


# -- How it is read ----------------------------------------------------------------------------------------------------


def test_metrics_are_added_up_over_labels():
    metrics = parse_metrics(METRICS)
    assert metrics["vllm:num_preemptions_total"] == 7
    assert metrics["vllm:kv_cache_usage_perc"] == 0.25
    assert metrics["plain"] == 2e-5
    assert metrics["tokens"] == 42240


def test_the_reason_is_the_error_that_is_not_about_another_one():
    assert last_reason(LOG) == "ValueError: No available memory for the cache blocks."
    assert last_reason("one\n\ntwo\n") == "two"
    assert last_reason("tq: no such model: x; give tiny\n") == "tq: no such model: x; give tiny"
    assert last_reason("") == "it said nothing"


def test_a_round_is_what_changed_between_both_ends():
    result = {
        "ttfts": [0.5, 0.7, 0.0], "latencies": [0.9, 1.5, 0.0], "output_lens": [5, 5, 0], "errors": ["", "", "refused"],
        "total_output_tokens": 10, "output_throughput": 6.6, "total_token_throughput": 99.0,
    }  # fmt: skip
    before = {
        "vllm:prefix_cache_queries_total": 100.0,
        "vllm:prefix_cache_hits_total": 40.0,
        "vllm:num_preemptions_total": 1.0,
    }
    after = {**before, "vllm:prefix_cache_queries_total": 300.0, "vllm:prefix_cache_hits_total": 190.0, "tokens": 1000.0,
             "vllm:num_preemptions_total": 3.0, "vllm:iteration_tokens_total_count": 6.0}  # fmt: skip
    read = read_round(result, before, after, cpu_seconds=0.5)
    assert (read.failures, read.preemptions) == (1, 2)
    assert read.ttft == [500, 700]
    assert read.tpot == pytest.approx([100, 200])  # four tokens after the first
    assert (read.hit_share, read.cpu_ms) == (0.75, 50)
    assert (read.output_rate, read.total_rate) == (6.6, 99.0)


def test_cold_rounds_give_the_first_token_and_the_others_the_rest():
    rounds = Rounds(
        [
            make_round(rate=1.0, tpot=(900.0,), ttft=(500.0, 700.0), cpu=70.0, preemptions=1),
            make_round(rate=2.0, tpot=(900.0,), ttft=(600.0, 800.0), cpu=80.0),
        ],
        [
            make_round(rate=10.0, tpot=(100.0, 110.0), ttft=(1.0,), cpu=20.0),
            make_round(rate=30.0, tpot=(90.0, 120.0), ttft=(1.0,), cpu=30.0, failures=2),
            make_round(rate=20.0, tpot=(95.0, 105.0), ttft=(1.0,), cpu=25.0),
        ],
    )
    row = summary_row("tq4", CASE, 42240, rounds)
    assert [row[name] for name in ("output_rate", "low", "high", "tpot", "tpot_p99")] == [20, 10, 30, 102.5, 119.5]
    assert [row[name] for name in ("ttft", "cold_rate", "cold_cpu_ms", "cpu_ms", "ttft_p99")] == [650, 4.5, 75, 25, 797]
    assert [row[name] for name in ("preempted", "failed", "capacity")] == [1, 2, 42240]


def test_rounds_are_divided_by_their_neighbours():
    """The machine is fast in the middle one; quotients within rounds are 3, 2 and 1.5, of medians 1.5; of the cold 3 and 5."""

    def rounds(cold, warm, cpu, ttft):
        return Rounds(*([make_round(rate=r, tpot=(1e3 / r,), cpu=cpu, ttft=(ttft,)) for r in rates] for rates in (cold, warm)))

    slow, fast = rounds((1.0, 1.0), (10.0, 80.0, 40.0), 10.0, 400.0), rounds((3.0, 5.0), (30.0, 160.0, 60.0), 4.0, 200.0)
    assert ratio(CASE, fast, slow) == {
        "users": 3, "prompt": 128, "output_rate": 2, "low": 1.5, "high": 3, "tpot": 0.5, "cpu_ms": 0.4, "ttft": 0.5,
        "cold_rate": 4, "cold_cpu_ms": 0.4,
    }  # fmt: skip


class Turns(serve.Bench):
    """A bench whose rounds say who ran and with which prompts."""

    def __init__(self, scratch):
        super().__init__(None, None, [SimpleNamespace(kv="bf16"), SimpleNamespace(kv="tq4")], None, scratch, print)
        self.seen = []

    def _round(self, server, case, prompts):
        self.seen.append((server.kv, prompts.read_text()))
        return make_round()


def test_servers_take_turns_with_the_same_prompts_new_ones_while_cold(tmp_path):
    bench = Turns(tmp_path)
    rounds = bench.rounds(CASE, 1, cold=2, warm=2)
    bench.rounds(CASE, 2, cold=1, warm=0)
    assert [kv for kv, _ in bench.seen] == ["bf16", "tq4"] * 5
    prompts = [text for _, text in bench.seen]
    assert prompts[::2] == prompts[1::2]
    first, second, third, fourth, other = prompts[::2]
    assert second == third == fourth
    assert len({first, second, other}) == 3
    assert [(len(r.cold), len(r.warm)) for r in rounds.values()] == [(2, 2)] * 2


def test_nobody_answered():
    row = summary_row(
        "tq4", CASE, 1, Rounds([make_round(ttft=(), tpot=(), failures=3)], [make_round(ttft=(), tpot=(), failures=3)])
    )
    assert math.isnan(row["tpot"])
    assert math.isnan(row["ttft_p99"])
    assert row["failed"] == 6


def test_the_ratio_stands_below_the_rows_of_its_case():
    request, rounds = make_request(users=(1, 8), prompt_tokens=(128, 1024)), Rounds([make_round()], [make_round()])
    rows = [summary_row(kv, case, 42240, rounds) for case in request.cases for kv in ("bf16", "tq4")]
    result = serve.report(request, "m", rows, [ratio(case, rounds, rounds) for case in request.cases])
    (table,) = result.tables
    cases = [(users, prompt) for prompt in ("128", "1,024") for users in ("1", "8")]
    assert [cells[:3] for cells in table.rows] == [(*case, kv) for case in cases for kv in ("bf16", "tq4", "ratio")]
    assert {len(cells) for cells in table.rows} == {len(table.columns)}
    assert table.rows[2][3] == "1.00"
    line = json.loads(result.line())
    assert (line["context"], line["kv"], line["rows"][0]["capacity"]) == ([128, 1024], ["bf16", "tq4"], 42240)


# -- Processes ---------------------------------------------------------------------------------------------------------

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    print(subprocess.Popen([sys.executable, __file__, "grandchild"]).pid, file=sys.stderr, flush=True)
time.sleep(99)
"""


def wait_for_output(child):
    """What it says first."""
    while not (log_text := child.log.read_text()):
        time.sleep(0.02)
    return log_text.strip()


def interrupt(child):
    """Ctrl-C while it runs; the processes there were."""
    pids = {}
    with suppress(KeyboardInterrupt), ending([child]):
        pids = {child.process.pid, int(wait_for_output(child))}
        assert set(child.members()) == pids
        raise KeyboardInterrupt
    return pids


def test_ending_leaves_nobody_of_the_group_behind(tmp_path, monkeypatch):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    child = Child([str(tmp_path / "stubborn.py")], tmp_path / "log")
    monkeypatch.setattr(child, "stop", partial(child.stop, patience=0.5))
    pids = interrupt(child)
    assert len(pids) == 2
    assert child.members() == {}


def test_processor_time_is_that_of_the_group_alone(tmp_path):
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(99)"
    child = Child(["-c", busy], tmp_path / "log")
    with ending([child]):
        started_working = time.monotonic()
        while not child.log.read_text() and time.monotonic() < started_working + 30:
            time.sleep(0.02)
        ((name, _),) = child.members().values()
        assert 0.25 < child.cpu_seconds(name) < 2
        assert child.cpu_seconds("x" + name) == 0


def test_a_server_that_does_not_start_is_one_line(tmp_path):
    server = Server(tmp_path / "no such folder", "tq4", (), tmp_path / "log")
    with ending([server]), pytest.raises(InputError) as excinfo:
        server.wait(60)
    assert str(excinfo.value).startswith("the server with tq4 did not start: tq: ")
    assert "\n" not in str(excinfo.value)
