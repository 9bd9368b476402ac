"""What planted faults cost: `tiny` with large channels, biases and first tokens, with and without balance.

python -m haarkv.validation.fidelity.planted --text held_out.txt --kv tq4 --kv tq3 --without-norms qwen2 --out rows.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.executors import catalog
from haarkv.models import planted
from haarkv.models.balance import balance
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity.evaluation import FidelityRow, Setup, Workload, evaluate, make_workload

BIASED = (1, 4)
SINK_NORM = 1300.0
"""Of the K of one token: a hundred times that of the others."""


@dataclass(frozen=True)
class Group:
    """Models that are measured against one baseline: the first, with K and V in bf16.

    Attributes:
        caches: name -> the model, and what its cache is.
        first: tokens before each window.
    """

    caches: Mapping[str, tuple[DecoderModel, KVSpec]]
    base: DecoderModel
    first: tuple[int, ...] = ()


def groups(token_ids: list[int], kvs: Sequence[str], model_type: str | None, instead: Sequence[str] = ()) -> dict[str, Group]:
    """All models by what was planted.

    Args:
        token_ids: a text, whose first tokens say how large Q and K are before their norms.
        kvs: formats for the first group; the others are measured in the first of them.
        model_type: of a family with biases and without norms of Q and K, for faults that norms would take away; None for none.
        instead: formats of the layers that have biases, in a balanced model.
    """
    tiny, specs = load_model("tiny"), [KVSpec(kv) for kv in kvs]
    outliers: dict[str, DecoderModel] = {
        "two pairs x 30": planted.outlier_channels(tiny, 30),
        "other pairs x 50": planted.outlier_channels(tiny, 50, pairs=(3, 60), channels=(0, 127)),
        "two pairs x 100": planted.outlier_channels(tiny, 100),
    }
    caches = {f"nothing: {spec.kv}": (tiny, spec) for spec in specs}
    for name, model in outliers.items():
        balanced = balance(model).model
        for spec in specs:
            caches[f"{name}: {spec.kv}"], caches[f"{name}: {spec.kv} balanced"] = (model, spec), (balanced, spec)
    found = {"outlier channels": Group(caches, tiny)}
    return found | _without_norms(tiny, token_ids, specs[0], model_type, instead) if model_type else found


def _without_norms(
    tiny: DecoderModel, token_ids: list[int], spec: KVSpec, model_type: str, instead: Sequence[str]
) -> dict[str, Group]:
    kv, unseen = spec.kv, min(set(range(tiny.config.vocab_size)) - set(token_ids))
    plain = planted.without_norms(tiny, model_type, *planted.measured_rms(tiny, token_ids[:128]))
    found = {"no norms": Group({f"nothing: {kv}": (plain, spec)}, plain)}
    for norm in (400, 600, 900):
        biased = planted.key_biases(plain, norm, BIASED)
        balanced = balance(biased).model
        caches = {kv: (biased, spec), f"{kv} balanced": (balanced, spec)}
        exact = f"k=bf16,v={kv}"
        for model, other in ((biased, exact), *((balanced, given) for given in instead)):
            caches[f"{kv}, in these layers {other}"] = model, replace(spec, layers=dict.fromkeys(BIASED, other))
        found[f"K biases of norm {norm} in layers {BIASED}"] = Group(caches, biased)
    sink = planted.sink_token(plain, unseen, SINK_NORM)
    found["a first token x 100"] = Group(
        {kv: (sink, spec), f"{kv} balanced": (balance(sink).model, spec), f"{kv}, 4 sinks": (sink, replace(spec, sink=4))},
        sink, (unseen,),
    )  # fmt: skip
    return found


def measure(group: Group, token_ids: list[int], tokens: int) -> Iterator[tuple[str, FidelityRow]]:
    """Rows of a group, by the name of the cache."""
    config = group.base.config
    tokenizer = load_tokenizer("tiny", config)

    def session(model: DecoderModel, spec: KVSpec, executor: str = "auto") -> Session:
        plan = plan_for(spec, config)
        return Session("planted", config, catalog.create(executor, model, plan), tokenizer, plan)

    caches = {name: session(*cache) for name, cache in group.caches.items()}
    setup = Setup(group.base, session(group.base, KVSpec("bf16"), "reference"), caches, "")
    windows = workload(token_ids, config.max_position_embeddings, tokens, group.first)
    yield from zip(caches, evaluate(setup, windows), strict=True)


def workload(token_ids: list[int], context: int, tokens: int, first: tuple[int, ...]) -> Workload:
    """Windows of the text as `tq eval` cuts them, each after the tokens `first`."""
    plan = make_workload(token_ids, context, tokens=tokens, prompts=0)
    if not first:
        return plan
    size = plan.windows[0].length + len(first)
    pieces = [[*first, *token_ids[w.begin : w.begin + w.length]] for w in plan.windows]
    text = [token for piece in pieces for token in piece] + [token_ids[0]]
    return make_workload(text, context, window=size, prompts=0)


def main() -> int:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a UTF-8 file that the model has not seen")
    parser.add_argument("--tokens", type=int, default=20480, help="tokens to score")
    parser.add_argument("--kv", action="append", help="a format; repeatable [default: the default format]")
    parser.add_argument("--instead", action="append", default=[], help="formats of the layers with biases, beside K in BF16")
    parser.add_argument("--without-norms", metavar="MODEL_TYPE", help="plant biases and a first token in such a model, too")
    parser.add_argument("--only", help="groups whose name has this in it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ids = load_tokenizer("tiny", load_model("tiny").config).encode(Path(given.text).read_text(encoding="utf-8"))
    rows = []
    print("| planted | cache | bits a value | KL mean | 99.9 % | perplexity | above bf16 |\n|---|---|---|---|---|---|---|")
    for planted_what, group in groups(ids, given.kv or formats.names()[:1], given.without_norms, given.instead).items():
        if given.only and given.only not in planted_what:
            continue
        for name, row in measure(group, ids, given.tokens):
            share = row.ppl_delta / (row.ppl - row.ppl_delta)
            numbers = f"{row.bits_per_value:.3f} | {row.kl_mean:.5f} | {row.kl_p999:.3f} | {row.ppl:.3f} | {share:+.2%}"
            print(f"| {planted_what} | {name} | {numbers} |", flush=True)
            rows.append({"planted": planted_what, "cache": name} | asdict(row))
    if given.out:
        given.out.write_text(json.dumps({"tokens": given.tokens, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
