"""Gated DeltaNet on a CPU: a decode step beside copying the bytes of its states, a prompt beside transformers' own torch.

    python -m lab.bench.delta --value-heads 16,32,48

Times are CPU time of one thread, which other programs on the machine disturb least; with more threads, of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec

_LAYERS = 12
"""So many that their states are larger than a processor's caches."""
_PROMPT, _STEPS = 512, 40


class Layers:
    """States of some layers of one sequence, and inputs for them."""

    def __init__(self, key_heads: int, value_heads: int) -> None:
        self.mixer = DeltaNet(key_heads, value_heads, 128, 128)
        self.cache = PagedKVCache(
            KVSpec("fp32").plan(_LAYERS), (None,) * _LAYERS, num_blocks=16, num_rows=1,
            states=dict.fromkeys(range(_LAYERS), self.mixer.state_shape),
        )  # fmt: skip
        self.paging = PagedSequences(16, self.cache.block_size, num_rows=1)
        self.sequence, channels = self.paging.add(), sum(self.mixer.widths)
        self.weights = torch.randn(channels, 1, 4) / 2, torch.rand(value_heads), torch.zeros(value_heads)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, a and b of a number of tokens."""
        heads = self.mixer.num_value_heads
        return torch.randn(tokens, sum(self.mixer.widths)), torch.randn(tokens, heads), torch.randn(tokens, heads)

    def run(self, ops: CpuOps, given: tuple[Tensor, Tensor, Tensor], layers: int) -> Callable[[], None]:
        """A call of the next tokens in some layers."""
        batch = self.paging.batch([self.sequence], [len(given[0])])

        def run() -> None:
            for layer in range(layers):
                ops.gated_delta(*given, *self.weights, self.cache, layer, batch)

        return run

    def copy(self, step: int) -> None:
        """As many bytes read, and as many written, as by a decode step of all layers, from version to version."""
        for state in self.cache.states.values():
            memory = state.tensors["delta"]  # type: ignore[attr-defined]
            memory[0, (step + 1) % len(memory[0])].copy_(memory[0, step % len(memory[0])])


def measure(key_heads: int, value_heads: int, threads: int) -> Iterator[tuple[str, float]]:
    """(What, figure) of one shape."""
    clock = time.thread_time if threads == 1 else time.perf_counter

    def timed(run: Callable[[], object]) -> float:
        began = clock()
        run()
        return clock() - began

    layers, ops = Layers(key_heads, value_heads), CpuOps()
    given = layers.inputs(1)
    steps = [timed(layers.run(ops, given, _LAYERS)) / _LAYERS for _ in range(_STEPS)]
    copies = [timed(lambda step=step: layers.copy(step)) / _LAYERS for step in range(_STEPS)]  # type: ignore[misc]
    step, copy = statistics.median(steps), statistics.median(copies)
    yield "decode, us a layer", 1e6 * step
    yield "copying its states, us", 1e6 * copy
    yield "decode / copying", step / copy
    given = layers.inputs(_PROMPT)
    yield "prompt, tokens/s a layer", _PROMPT / min(timed(layers.run(ops, given, 1)) for _ in range(3))
    for name, run, tokens in _theirs(layers):
        fastest = min(timed(run) for _ in range(4))
        yield f"transformers, {name}", tokens / fastest if tokens > 1 else 1e6 * fastest


def _theirs(layers: Layers) -> Iterator[tuple[str, Callable[[], object], int]]:
    """transformers' convolution and rule in torch, which it runs where no kernel is installed."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    mixer, (conv, _, _) = layers.mixer, layers.weights
    memory = torch.randn(1, mixer.num_value_heads, 128, 128)
    for name, rule, tokens in (
        ("prompt, tokens/s a layer", theirs.torch_chunk_gated_delta_rule, _PROMPT),
        ("decode, us a layer", theirs.torch_recurrent_gated_delta_rule, 1),
    ):
        x, a, b = layers.inputs(tokens)
        earlier = torch.nn.functional.pad(x.T[None], (3, 0))

        def run(earlier: Tensor = earlier, a: Tensor = a, b: Tensor = b, rule: Callable[..., object] = rule) -> None:
            with torch.inference_mode():
                mixed = torch.nn.functional.silu(torch.nn.functional.conv1d(earlier, conv, groups=conv.shape[0]))
                parts = torch.split(mixed.transpose(1, 2), list(mixer.widths), dim=-1)
                q, k, v = (part.reshape(1, part.shape[1], -1, 128) for part in parts)
                decay = -torch.nn.functional.softplus(a)[None]
                rule(
                    q, k, v, g=decay, beta=b.sigmoid()[None], initial_state=memory, output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip

        yield name, run, tokens


def main() -> None:
    """Print the figures of each number of heads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--value-heads", default="16,32,48", help="heads of V, separated by commas; 16 heads of K")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for heads in map(int, args.value_heads.split(",")):
        print(f"{heads} heads of V over 16 of K, 128 x 128, {args.threads} threads")
        for what, figure in measure(16, heads, args.threads):
            print(f"  {what:40} {figure:10,.2f}")


if __name__ == "__main__":
    main()
