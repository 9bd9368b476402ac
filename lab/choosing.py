"""What a format costs at each place of a model, told from one layer alone, beside the probe that runs all layers behind it.

    python -m lab.choosing model.gguf --learn 512 --tokens 384

`local` is how far the format moves what the layer's MLP reads, n the norm before it:

    local = E |n(h + d) - n(h)|**2 / |n(h)|**2,      h + d: the hidden state after attention that reads the format

It needs the layer's attention alone, no layer behind it and no logits. `probe` is `estimates.Probes`' KL, which `--kv auto`
ranks places by.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from torch import Tensor

from haarkv.engine.plans import SINKS, TAIL, plan_for
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.table import with_ops
from haarkv.validation.planning.auto import PROBES
from haarkv.validation.planning.calibrate import Subject, load_subject
from haarkv.validation.planning.common_text import common_text, prose
from haarkv.validation.planning.estimates import Probes
from haarkv.validation.planning.search import Place, places, run_one_layer, with_format


class _MlpReachedError(Exception):
    """Ends a layer before its MLP."""


def mlp_input(subject: Subject, plan: KVPlan, layer: int, hidden: Tensor) -> Tensor:
    """What a layer's MLP reads [T, hidden] fp32, after attention over a cache of this plan."""
    pieces: list[Tensor] = []

    def run(some: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            y = subject.ops.rms_norm(x, weight, eps)
            if weight is subject.model.weights.layers[layer]["post_norm"]:
                pieces.append(y.float())
                raise _MlpReachedError
            return y

        try:
            return subject.model.layers(some, span, batch, cache, with_ops(subject.ops, {"rms_norm": rms_norm}))
        except _MlpReachedError:
            return some

    run_one_layer(run, plan, subject.config, layer, hidden)
    return torch.cat(pieces)


@torch.inference_mode()
def local_costs(subject: Subject, base: KVPlan, tokens: Tensor, calibration: Calibration) -> dict[Place, float]:
    """`local` of the probed format at each place, of positions behind the tail and the sinks.

    Args:
        base: K and V in bf16, with the tail and sinks of the caches to compare.
        tokens: token ids [T] int64 of one text.
    """
    hidden, first, costs = subject.model.embed(tokens).to(subject.runner.device), (base.recent or 0) + base.sink, {}
    for layer in range(subject.config.num_layers):
        exact = mlp_input(subject, base, layer, hidden)[first:]
        for side, name in PROBES.items():
            moved = mlp_input(subject, with_format(base, (layer, side), name, calibration), layer, hidden)[first:]
            costs[layer, side] = float(((moved - exact).square().sum(-1) / exact.square().sum(-1)).mean())
        hidden = run_one_layer(subject.runner.layers, base, subject.config, layer, hidden)
    return costs


def spread(local: dict[Place, float], probe: dict[Place, float]) -> float:
    """Root mean square of ln(local / probe) over places, each as a share of its sum."""
    total_local, total_probe = sum(local.values()), sum(probe.values())
    logs = [math.log((local[place] / total_local) / (probe[place] / total_probe)) for place in local]
    return math.sqrt(sum(x * x for x in logs) / len(logs))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.choosing", description="Costs of a cache's formats, by two ways.")
    parser.add_argument("model")
    parser.add_argument("--learn", type=int, default=512, metavar="N", help="tokens to learn coordinates from")
    parser.add_argument("--tokens", type=int, default=384, metavar="N", help="tokens to measure costs on")
    args = parser.parse_args(argv)
    subject = load_subject(args.model)
    learning = subject.learn([torch.tensor(common_text(subject.tokenizer, args.learn))], ())
    calibration = subject.calibration_file(learning, {}).calibration
    base_spec, text = KVSpec("bf16", TAIL, SINKS), torch.tensor(prose(subject.tokenizer)[: args.tokens])
    local = local_costs(subject, plan_for(base_spec, subject.config), text, calibration)
    probes = Probes(subject.model, subject.session(base_spec), text)
    probe = {place: probes.cost(place, PROBES[place[1]], calibration) for place in places(subject.config)}
    for (layer, side), cost in local.items():
        print(f"{side.upper()} of layer {layer:2}: local {cost:.2e}, probe {probe[layer, side]:.2e}")
    factor = sum(probe.values()) / sum(local.values())
    print(f"probe = {factor:.2f} local; spread of places {spread(local, probe):.2f} (root mean square, natural logarithm)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
