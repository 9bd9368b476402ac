"""What a user can get wrong, by command: one line on stderr, exit code 2, and no file; `test_options` has what all share."""

import io
import json
import shlex
import sys

import pytest
from calibration_files import write_calibration
from checkpoints import CONFIG, FINAL_NORM, byte_tokenizer, cut_off, shard_name, write_checkpoint
from refusals import assert_refused, snapshot

from haarkv.serving import serve as serving
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from tq.cli import main

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n" * 2
UNSEEN = "def bridge(name, quest):\n    if quest == 'grail':\n        return name\n    raise KeyError(quest)\n"
SPOKEN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NINES = "9" * 5000
IS_A_CACHE = "it is a stored cache, which --load-cache takes"
WORDS = ("²", NINES, "1e9", "٣x", "")
"""No numbers, though some of Python's functions take them for such, or take long over them."""

GENERATE = "generate --model m --prompt a"
EVAL = "eval --model m --text text.txt"
PLAN = (
    "plan --model m --text text.txt --verify unseen.txt --budget 3.5 --out new.json --candidates tq2,tq4 --tails 0 "
    "--context 60 --tokens 60 --verify-tokens 60"
)
CALIBRATE = (
    "calibrate --model m --text text.txt --verify unseen.txt --out new.safetensors --tokens 60 --verify-tokens 60 --window 60"
)
DRAFT = "generate --executor cpu --prompt 'def main(' --max-new-tokens 40 --threads 1"
VALIDATE = "validate --model m --executor reference --prompt spam"

REFUSALS = {
    "": [
        ("generate", "no prompt", "--prompt"),
        ("bogus", "there is no command 'bogus'; `tq --help` lists them all"),
        ("genrate 'spam'", "did you mean generate?"),
        ("--bogus", "--bogus"),
        ("bench decod", "there is no command 'decod'; did you mean decode?"),
        ("dev bring-up", "did you mean bringup?"),
        ("generate why is the sky blue", "in quotes"),
        ("generate --model m --load-cache absent --system 'Be brief.'", "no chat template wraps; leave out --system"),
        ("calibrate --model random:qwen3.5-0.8b --layers 3 --out c.safetensors", "no layer of this model has K and V"),
        ("chat --model m", "stdin", "UTF-8"),
        ("chat --model m --max-context 1025", "--max-context must lie in 1 … 1024"),
        ("chat --model m --system 'You are a knight.'", "--system"),
        ("serve ./absent", "no such model: ./absent;"),
        ("serve ~no_such_user/model", "no such model: ~no_such_user/model;"),
        ("serve models/of/mine", "no such model: models/of/mine;"),
        ("serve ''", "no such model: '';"),
        ("serve m.gguf", "tq serve reads no GGUF file; give a folder in Hugging Face format"),
    ],
    GENERATE: [
        ("--rank-timeout 5", "give --tensor-parallel as well"),
        ("--kv auto --kv-tail 3", "--kv auto sets the whole cache; leave out --kv-tail"),
        ("--kv tq4 --kv-loss 0.1", "--kv-loss says what --kv auto may lose"),
        ("--kv ''", "unknown KV format ''"),
        ("--kv auto --kv-loss inf", "--kv-loss is a mean KL in nats a token, above 0, not inf"),
        ("--kv lr64", "there is no lr64: learned keys take lr2, lr3, lr4, lr5"),
        ("--model ''", "no such model: ''"),
        (f"--model {'a' * 5000}", "no such model"),
        ("--model random:99b", "random:99b", "random:14b"),
        ("--prompt abcde --max-context 4", "5 tokens", "4", "--max-context"),
        (f"--prompt {'a' * 1025}", "1025 tokens", "context only 1024"),
        ("--max-context 1025", "1024", "--max-context"),
        ("--prompt ''", "prompt 2", "empty"),
        ("--prompt caf\udce9", "prompt 2", "UTF-8"),
        ("--prompt-file .", "--prompt-file .", "directory"),
        ("--prompt-file latin1", "latin1", "UTF-8", "byte 3"),
        ("--prompt-file -", "--prompt-file -", "UTF-8"),
        ("--temperature -1", "temperature", "-1"),
        ("--seed abc", "'--seed': 'abc' is not a valid integer."),
        ("--stop a --stop ''", "--stop", "empty"),
        ("--system 'Be brief.'", "chat template", "--system"),
        ("--tensor-parallel 2", "torchrun --nproc-per-node 2 -m tq"),
        ("--executor cpu --device cuda:0", "cpu", "cuda:0"),
        ("--layers 1", "--layers"),
        ("--chat", "chat template"),
        ("--promt a", "--promt"),
        ("b", "give PROMPT, or --prompt and --prompt-file, but not both"),
        ("--top-k 40", "top-k chooses among tokens, and this model takes the likeliest; give a temperature as well"),
        ("--kv k=lr4,v=tq4", "lr4 needs", "give its file with --calibration"),
        ("--threads 999", "--threads 999: this machine has", "give at most"),
        ("--kv tq4 --kv-tail 100000000000", "longer than this model's context of 1,024"),
        (f"--kv-skip-layers {NINES}", "is not a list of layers"),
        ("--kv tq4 --kv-skip-layers 99", "no layer 99"),
        ("--kv tq4 --kv-skip-layers 1,-1", "layer 1 is named twice"),
        ("--tensor-parallel 1000000", "cannot be split evenly over 1000000 ranks"),
        ("--kv kivi2 --kv-tail 30", "kivi2", "tail=31"),
        ("--kv-plan other.json", "another model", "hidden 80"),
        ("--kv-plan text.txt", "text.txt is no KV plan"),
        ("--load-cache absent", "cannot be read"),
        ("--load-cache stored --kv tq3", "in tq4, and this run in tq3"),
        ("--load-cache made", "made is no stored cache: ", "it is a calibration, which --calibration takes"),
        ("--calibration bad", "bad is no calibration"),
        ("--calibration stored", "stored is no calibration: ", IS_A_CACHE),
        ("--calibration foreign", "learned from other weights", "tq calibrate"),
        ("--calibration made --model tiny", "made for another model", "hidden 256"),
        ("--kv-plan stored", "stored is no KV plan: ", IS_A_CACHE),
        ("--kv-plan made", "is a calibration without a plan"),
        ("--save-cache absent/x", "does not exist"),
        ("--prompt b --save-cache x", "stores one sequence"),
        ("--kv-plan plan.json --kv tq4", "--kv-plan", "leave out --kv"),
    ],
    "chat --model spoken --session": [
        ("talk --system 'You are a king.'", "another system message"),
        ("talk --kv tq3", "in tq4, and this run in tq3"),
        ("m", "not a regular file"),
        ("text.txt", "is no stored cache"),
        ("stored", "without a conversation"),
    ],
    DRAFT: [
        ("--draft random:0.6b", "has another tokenizer"),
        ("--draft nowhere", "no such model: nowhere"),
        ("--draft ngrm", "there is no draft 'ngrm'; did you mean ngram?"),
        ("--draft-tokens 3", "give --draft as well"),
        ("--draft-kv tq2", "give --draft as well"),
        ("--draft ngram --draft-kv tq2", "ngram has no cache; leave out --draft-kv"),
        ("--draft self", "no such model: self"),
    ],
    "quantize m --out new.gguf": [("--imatrix-tokens 100", "give --imatrix as well")],
    "info": [
        ("nothing/here", "no such model"),
        ("m --model tiny", "give MODEL, or --model, but not both"),
        ("random:14b --layers 41", "--layers", "40"),
        ("--layers 1", "--layers"),
        ("--memory lots", "lots", "24GiB"),
        ("--memory 80", "80 has no unit; write 80GiB"),
        ("--memory -3G", "-3G"),
        ("--memory '24 quarts'", "24 quarts"),
        (f"--memory {'9' * 400}", "memory"),
    ],
    "formats": [("--head-dim 127", "127"), *((f"--head-dim '{word}'", "--head-dim") for word in WORDS)],
    "export --model m --out o": [("--kv tq3", "exported graphs read tq4, not tq3\n")],
    "export --out o": [
        ("--model tiny-hybrid", "it mixes tokens by DeltaNet"),
        ("--opset 99", "no opset 99"),
        ("--layers 4:9", "does not fit"),
        ("--layers 2", "a checkpoint runs whole"),
        *((f"--layers '{word}'", "--layers") for word in WORDS),
    ],
    "diff": [("--a tq4", "--b"), ("--b tq4", "--a")],
    "diff --a tq4 --b tq4 --model m": [
        ("--a abacus", "abacus", "EXECUTOR:FORMAT", "reference", "tq4_seed", "k=NAME,v=NAME"),
        ("--b abacus:tq4", "abacus:tq4", "executor of auto, reference"),
        ("--b reference:tq9", "tq9", "format of tq4"),
        *((f"--b '{half}'", half or "''", "EXECUTOR:FORMAT") for half in ("reference:", ":tq4", "")),
        ("--a k=tq4", "k=tq4", "k=NAME,v=NAME"),
        ("--a reference:k=tq4,v=tq9", "tq9", "tq4"),
        ("--device sim", "npu cannot run this"),
    ],
    "bench decode --repeats 1 --contexts 40 --model m": [
        ("--contexts 0", "--contexts", "positive integers"),
        ("--batches x", "--batches", "positive integers"),
        ("--executor npu --kv q8_0 --device sim", "cannot run"),
        ("--contexts 999999 --executor reference", "room for", "999999", "lower --contexts"),
        ("--contexts 999999 --executor reference --only prompt", "room for", "999999"),
        ("--executor cpu --isa sse9", "sse9", "choose from"),
        ("--executor reference --isa avx2", "reference", "--isa"),
        ("--model tiny-hybrid --kv tq4", "give --only step or --only prompt"),
    ],
    EVAL: [
        ("--kv bf16,tq9", "tq9", "choose from"),
        ("--kv tq4,k=tq4", "k=NAME,v=NAME"),
        ("--kv k=tq4,k=tq2", "k=NAME,v=NAME"),
        ("--window 1025", "context of 1024", "--window"),
        ("--kv k=lr3,v=tq4 --calibration foreign", "learned from other weights"),
        ("--device sim", "npu cannot run this"),
        ("--resume unseen.txt", "no partial result"),
        ("--text empty", "empty"),
        ("--text short", "too short", "1 token"),
    ],
    PLAN: [
        ("--budget 2.4", "2.4 bits", "smallest takes 2.5"),
        ("--budget 16", "--budget", "below bf16's 16"),
        ("--budget nan", "--budget"),
        ("--calibration bad", "bad is no calibration"),
        ("--candidates tq4,tq9", "tq9", "choose from"),
        ("--candidates ''", "unknown KV format ''"),
        ("--candidates kivi2", "kivi2", "groups"),
        ("--candidates tbq4_0", "tbq4_0", "head_dim 32"),
        ("--tails 8,x", "--tails", "8,x"),
        *((f"--tails '{word}'", "--tails") for word in WORDS),
        ("--tails 0,99999", "tail or sink of 99,999 tokens"),
        ("--context 1025", "context of 1024", "--context"),
        ("--context 100", "too short", "101"),
        ("--resume new.json", "same file"),
        ("--resume text.txt", "no partial result"),
        ("--verify text.txt", "--text and --verify are the same text"),
    ],
    "plan --model m --text text.txt --budget 3.5 --out new.json": [
        ("--verify short", "too short", "each needs 33 at least"),
        ("--verify short --context 1", "each needs 33 at least"),
    ],
    CALIBRATE: [
        ("--window 10000000", "--window must lie in 1 … 1024"),
        ("--verify text.txt", "--text and --verify are the same text"),
    ],
    VALIDATE: [
        ("--reference gpu", "unknown executor"),
        ("--html .", "not a regular file"),
        ("--csv /dev/null", "not a regular file"),
        ("--csv same --html ./same", "same file"),
        ("--csv same --replay ./same", "same file"),
        ("--replay absent/layer", "absent", "does not exist"),
        ("--steps 2000", "context"),
        ("--prompt-tokens 1 --steps 0", "one token"),
    ],
    "validate": [("--prompt-tokens 3", "--prompt-tokens", "--prompt")],
    "dev compile": [
        ("--cpp m", "m exists"),
        ("--cpp a/b", "its parent is not a folder"),
        ("--model random:3b", "no such size: random:3b"),
        ("--program tail", "'tail' is not one of"),
        ("--kv q8_0", "nothing to compile: its programs read tq4, tq4_seed and bf16, not q8_0\n"),
        ("--kv k=lr3,v=tq4", "lr3 needs the coordinates that `tq calibrate` learns"),
        ("--kv k=lr3,v=tq3 --calibration tiny", "its programs read tq4, tq4_seed and bf16, not tq3"),
        ("--kv k=lr3,v=tq4 --calibration tiny --model random:14b", "made for another model"),
    ],
    "dev bringup --prompt a --out new": [
        ("--executor catalog", "unknown executor 'catalog'"),
        ("--executor reference", "compared with itself proves nothing"),
        ("--executor cpu --device npu:0", "runs on the cpu, not on 'npu:0'"),
        ("--executor onnx --kv kivi4", "executor onnx cannot run this"),
        ("--executor cpu --contexts 999999", "and the calls that are timed, not 999999"),
        ("--executor cpu --out m", "name a folder that does not"),
    ],
    "serve tiny": [
        ("--kv tq9", "unknown KV format 'tq9'"),
        ("--kv k=lr4,v=tq3", "lr4 needs the coordinates that `tq calibrate` learns"),
        ("--kv-plan absent.json", "absent.json"),
        ("--kv-plan empty", "is no KV plan"),
        ("--kv-plan empty --kv tq4", "--kv-plan sets the whole cache; leave out --kv"),
        ("--kv-plan empty --kv-skip-layers 0", "leave out --kv-skip-layers"),
        ("--kv-tail 9", "--kv auto, the default, sets the whole cache; leave out --kv-tail"),
        ("--kv tq4 --additional-config {}", "--additional-config is set by tq serve; leave it out, or give --kv bf16"),
    ],
}
CASES = [(f"{command} {args}", words) for command, rows in REFUSALS.items() for args, *words in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    write_checkpoint(folder / "m")
    shape = {name: ModelShape.uniform(2, 2, 32, hidden, 257) for name, hidden in (("plan", 64), ("other", 80))}
    for name, model in shape.items():
        plan_file.save(folder / f"{name}.json", KVSpec("tq4").plan(2), model)
    for name, text in (("text.txt", TEXT), ("unseen.txt", UNSEEN), ("short", "a"), ("empty", "")):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "m.gguf").write_bytes(b"GGUF")
    (folder / "latin1").write_bytes("caf\xe9".encode("latin-1"))
    write_calibration(folder / "made", folder / "m")
    write_calibration(folder / "foreign", folder / "m", weights="0123456789abcdef")
    write_calibration(folder / "tiny")
    (folder / "bad").write_bytes((folder / "made").read_bytes()[:-7])
    write_checkpoint(folder / "spoken", tokenizer_config={"chat_template": SPOKEN})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "stdin", io.StringIO("spam\n"))
        for line in (
            f"{GENERATE} --kv tq4 --save-cache stored",
            "chat --model spoken --kv tq4 --session talk --system 'You are a knight.'",
        ):
            assert main(shlex.split(f"{line} --max-new-tokens 1")) == 0
    return folder


@pytest.mark.parametrize(("line", "words"), CASES, ids=[f"{number} {line[-40:]}" for number, (line, _) in enumerate(CASES)])
def test_a_mistake_is_one_line_and_2_and_changes_no_file(run, monkeypatch, folder, line, words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    monkeypatch.setattr(serving, "find_spec", lambda _: object())  # else that vLLM is missing is said first
    before = snapshot(folder)
    ran = run(*shlex.split(line))
    if line.startswith("dev bringup"):  # which shows each rung as it is passed
        ran = ran._replace(out="")
    assert_refused(ran, *words)
    # A model's name and click's own words quote all that fits on a line; ours quote the beginning.
    assert len(ran.err) < (400 if "--kv-" in line or "--threads" in line else 2100)
    assert snapshot(folder) == before


# -- Models that cannot be used ---------------------------------------------------------------------------------------------

FIRST, INDEX, SETTINGS, WORDS_FILE = (
    shard_name(1, 3),
    "model.safetensors.index.json",
    "generation_config.json",
    "tokenizer.json",
)


def without(name, **options):
    return lambda folder: (write_checkpoint(folder, **options) / name).unlink()


def lying_index(folder):
    index = write_checkpoint(folder, shards=2) / INDEX
    content = json.loads(index.read_text())
    content["weight_map"][FINAL_NORM] = shard_name(0, 2)
    index.write_text(json.dumps(content))


def large_id(folder):
    content = json.loads(byte_tokenizer().to_str())
    content["model"]["vocab"]["a"] = 5000
    write_checkpoint(folder, files={WORDS_FILE: json.dumps(content)})


def file(name, content):
    return {"files": {name: content}}


def template(source):
    return {"tokenizer_config": {"chat_template": source}}


def sampling_config(**settings):
    return {"generation": {"do_sample": True, **settings}}


THINKING = template("{{ messages[-1].content }}{% if enable_thinking is defined %}{{ enable_thinking | tojson }}{% endif %}")
DAMAGED_MODELS = [
    (without("config.json"), "", "config.json", "does not exist"),
    (file("config.json", json.dumps(CONFIG | {"model_type": "gemma2"})), "", "config.json is a gemma2 model; this project"),
    ({"config": {"quantization_config": {"quant_method": "awq"}}}, "", "its weights are quantized by awq, which is not read"),
    (without("model.safetensors"), "", "no weights", "model.safetensors"),
    (without(FIRST, shards=3), "", FIRST, "missing", "model.layers."),
    (lambda folder: cut_off(write_checkpoint(folder, shards=3) / FIRST), "", FIRST, "cannot be read", "fetch it again"),
    *((file(INDEX, text), "", INDEX) for text in ("[]", "{}", '{"weight_map": [1]}', b"\xff")),
    (lying_index, "", shard_name(0, 2), FINAL_NORM),
    (without(WORDS_FILE), "", WORDS_FILE),
    (file(WORDS_FILE, "{"), "", WORDS_FILE),
    ({"config": {"vocab_size": 100}}, "", WORDS_FILE, "100"),
    (large_id, "", WORDS_FILE, "5000", "257"),
    (template("{% if %}"), "", "chat template"),
    (template(3), "", "chat template"),
    (file("chat_template.jinja", b"\xff"), "", "chat_template.jinja"),
    (file(SETTINGS, "eos"), "", SETTINGS),
    (sampling_config(temperature="hot"), "", SETTINGS, "temperature", "hot"),
    (sampling_config(do_sample="yes"), "", SETTINGS, "do_sample", "yes"),
    (sampling_config(eos_token_id=["a"]), "", "eos_token_id"),
    (template(SPOKEN), "--system 'Be brief.' --no-chat", "--system", "--no-chat"),
    (template(SPOKEN), "--system \udcff", "system message", "UTF-8"),
    (template("{{ messages[-1].content }}"), "--system 'Be brief.'", "ignores system messages", "--system"),
    ({}, "--template-arg x=1", "this model has none; drop --template-arg"),
    (THINKING, "--template-arg enable_thinkin=0", "no argument enable_thinkin; did you mean enable_thinking?"),
    (THINKING, "--template-arg enable_thinking", "is no NAME=VALUE"),
    (THINKING, "--template-arg messages=[]", "'messages' is no argument of a chat template"),
    (THINKING, "--template-arg enable_thinking=\udcff", "not valid UTF-8"),
    (THINKING, "--template-arg enable_thinking=1 --no-chat", "--no-chat leaves it out; drop --template-arg"),
]


@pytest.mark.parametrize("row", DAMAGED_MODELS, ids=[f"{number} {row[-1]!a}" for number, row in enumerate(DAMAGED_MODELS)])
def test_a_model_that_cannot_be_used_is_refused_by_name(run, tmp_path, row):
    damage, args, *words = row
    _ = damage(tmp_path / "m") if callable(damage) else write_checkpoint(tmp_path / "m", **damage)
    before = snapshot(tmp_path)
    assert_refused(run(*shlex.split(f"{GENERATE} {args}")), *words)
    assert snapshot(tmp_path) == before
