"""The op table of CPUs, in C++.

Signatures and rounding points are those of `tq_ops.reference`, except where a docstring says otherwise.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.calls import IS_BF16, LayerCalls, has_kernel, is_bf16, prepare, stored_weight, too_long
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.kv.layer import LayerKV
from haarkv.tq_ops.weight import Blocks, Weight, activations, weight_numbers


class CpuOps:
    """The table, compiled for one instruction set.

    Args:
        isa: one of `library.isas()`; the CPU's best unless given.
    Attributes:
        isa, isa_number: the instruction set, and its index in `library.ISAS`.
    Raises:
        KernelsMissingError: the kernels are not built.
        InputError: this CPU does not have that instruction set.
    """

    def __init__(self, isa: str | None = None) -> None:
        self._library = library.load()
        available = library.isas()
        self.isa = isa or available[-1]
        if self.isa not in available:
            raise InputError(f"this CPU has no kernels for {self.isa!r}; choose from {', '.join(available)}")
        self.isa_number = library.ISAS.index(self.isa)
        self._blocks: WeakKeyDictionary[Blocks, library.Structure] = WeakKeyDictionary()
        self._given = threading.local()
        self._layer_calls: WeakKeyDictionary[LayerKV, LayerCalls | None] = WeakKeyDictionary()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it is open, torch has one thread and the kernels all others: torch's spin for milliseconds after each loop."""
        threads, before = torch.get_num_threads(), getattr(self._given, "threads", None)
        if before is not None or threads == 1:
            yield
            return
        self._given.threads = threads
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            del self._given.threads

    @contextmanager
    def _threads_for_torch(self) -> Iterator[None]:
        """The inverse, inside `alone`."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    @property
    def threads(self) -> int:
        """Threads of the kernels."""
        return getattr(self._given, "threads", None) or torch.get_num_threads()

    def _run(self, symbol: str, call: library.Structure, /, **fields: Tensor | float) -> int:
        """Fills in a call, makes it and returns its status. Tensors live until it returns."""
        for name, value in fields.items():
            setattr(call, name, value.data_ptr() if isinstance(value, Tensor) else value)
        call.isa, call.threads = self.isa_number, self.threads
        status: int = getattr(self._library, symbol)(ctypes.byref(call))
        return status

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`reference.rms_norm`; FP32 sums are in another order, the same for every row."""
        if weight.dtype not in IS_BF16:
            return reference.rms_norm(x, weight, eps)
        x, weight = x.contiguous(), weight.contiguous()
        y, width = torch.empty_like(x), weight.shape[0]
        self._run(
            "haarkv_rms_norm", library.RmsNorm.__new__(library.RmsNorm), x=x, weight=weight, y=y, rows=x.numel() // width,
            width=width, eps=eps, bf16=is_bf16(x), weight_bf16=is_bf16(weight),
        )  # fmt: skip
        return y

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`reference.rope`."""
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        y = torch.empty_like(x)
        self._run(
            "haarkv_rope", library.Rope.__new__(library.Rope), x=x, cos=cos, sin=sin, y=y, rows=x.shape[0] * x.shape[1],
            heads=x.shape[1], half=x.shape[2] // 2,
        )  # fmt: skip
        return y

    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        """`reference.silu_mul`; a gate below -87.3 counts as -87.3 (silu -1e-36)."""
        return self._gated_mul(gate, up, dtype, library.Gate.SILU)

    def gelu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        """`reference.gelu_mul`, without the difference `1 + tanh`, which loses digits where a gate is negative."""
        return self._gated_mul(gate, up, dtype, library.Gate.GELU)

    def sigmoid_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        """`reference.sigmoid_mul`; a gate below -87.3 counts as -87.3."""
        return self._gated_mul(gate, up, dtype, library.Gate.SIGMOID)

    def _gated_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype, function: library.Gate) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty(gate.shape, dtype=dtype)
        self._run(
            "haarkv_gated_mul", library.GatedMul.__new__(library.GatedMul), gate=gate, up=up, y=y, count=gate.numel(),
            function=function, bf16=is_bf16(y),
        )  # fmt: skip
        return y

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """`reference.linear` of a weight as it lies in memory; blocks of a type outside `library.BLOCKS` are restored at each
        call. The bits of a number depend on its token and its row of the weight alone.

        Rounding points: FP32 sums in the order of the instruction set. Where the CPU has BF16 products, `avx512vnni` and `amx`
            multiply BF16 by BF16: numbers below 2**-126 count as zero.

            With blocks, each 32 numbers of x, times the columns' scales, become integers of one step: the larger of their
            largest size / 32,767 and the sum of their sizes / 524,000; of 8 bits, that of `weight.activations`.
            Products with levels are exact. 32 numbers below 3e-31 become zeros.
        """
        if not has_kernel(weight):
            x, weight = activations(x.float(), weight), weight_numbers(weight)
        x = x.contiguous()
        y = torch.empty(x.shape[0], weight.shape[0])
        call = library.Linear.__new__(library.Linear)
        if isinstance(weight, Blocks):
            call.weight = self._weight_struct(weight)
        else:
            weight = weight.contiguous()
            call.weight.data, call.weight.stored = weight.data_ptr(), is_bf16(weight)
        call.outputs, call.inputs = weight.shape
        self._run("haarkv_linear", call, x=x, y=y, tokens=x.shape[0], bf16=is_bf16(x))
        return y

    def _weight_struct(self, weight: Blocks) -> library.Structure:
        """The structure of a weight, cached."""
        if (struct := self._blocks.get(weight)) is None:
            struct = self._blocks[weight] = stored_weight(weight)
        return struct

    def store_kv(self, k: Tensor, v: Tensor, at: LayerView) -> None:
        """As `reference.store_kv`, of K and V [T, Hkv, D] fp32 or bf16. If the kernels do not read K's or V's format, the
        reference stores both.

        Raises:
            IndexError, NonFiniteError: as the reference; nothing of this layer was written.
            InputError: a head_dim without kernels.
        Rounding points: those of the format. FP32 sums have another order, so a level may differ at a boundary.
        """
        layer_calls, batch = self.layer_calls(at.kv), at.batch
        if layer_calls is None:
            with self._threads_for_torch():
                return reference.store_kv(k, v, at)
        at.require_room()
        k, v, slots = k.contiguous(), v.contiguous(), batch.slot_mapping.contiguous()
        call = library.Store.from_buffer_copy(layer_calls.store)
        call.k.x, call.v.x, call.k.bf16, call.v.bf16 = k.data_ptr(), v.data_ptr(), is_bf16(k), is_bf16(v)
        status = self._run(
            "haarkv_store", call, slots=slots, tokens=k.shape[0], positions=batch.positions.contiguous(),
            query_start=batch.query_start_loc.contiguous(), rows=batch.rows.contiguous(), sequences=len(batch.rows),
            residual_slots=0 if batch.residual_slots is None else batch.residual_slots.contiguous(),
        )  # fmt: skip
        if status:
            # Nothing was written. The reference meets the same fault and names it.
            reference.store_kv(k, v, at)
        return None

    def paged_attention(self, q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
        """`reference.paged_attention` in the rotated domain; formats outside `READS` are left to the reference.

            logits = (q @ rotation . centroids[level]) * k_scale * softmax_scale
            out = sum((p * v_scale) * centroids[level]) / sum(p) @ rotation.T

        Learned keys take `rows.T` of the KV head as rotation. What q makes of K's mean is the same for every key and drops
        out. BF16 and FP32 do not rotate.

        Tokens that a query sees in BF16 (`ResidualWindow.visible`) take part in the same softmax: their logits replace those
        of the packed ones, less `softmax_scale * (q . K's mean)`, and their values are summed in the model's own domain.

        Keys are summed 1,024 at a time and merged in order: results do not depend on the number of threads, on the rest of
        the batch or on how a prompt was cut. Rotated queries and partial sums take 4 to 16 MB, whatever the prompt.

        Raises:
            InputError: a head_dim without kernels.
        Rounding points of a bf16 q: the rotated q stays FP32. A block's probabilities are exp(logit - the block's maximum),
            rounded to BF16; the denominator is the sum of the rounded ones. From `avx512vnni` on exponentials are off by 3e-6
            before that. Blocks are merged in FP32; the output to BF16.

            From `avx512vnni` on, levels of up to 4 bits and learned keys are summed exactly as 16-bit integers. Rounded, by
            at most half a step each: centroids (`tq4`: 5e-5 of a coordinate's standard deviation); rotated q to steps of
            max|q| / 32,639, or sum|q| * (largest integer) / 2**31 if that is larger; p * v_scale of up to 128 keys likewise,
            by row. A logit's root mean square error is 1.1e-4 of the logits' standard deviation, of learned keys up to
            2.0e-4, where rounding q to BF16 cost 1.1e-3. 128 weights together are off by at most 2e-3 of the largest.

            `amx` multiplies `bf16` K and V, and rotates, by tiles of BF16 products: p, q rotated and what goes back are
            sums of two BF16 numbers, off by at most 2**-17; FP32 sums are in the tiles' order. Its sums of integers are the
            bits of `avx512vnni`.
        """
        layer_calls, batch = self.layer_calls(at.kv), at.batch
        if layer_calls is None or too_long(batch, at.kv.block_size):
            with self._threads_for_torch():
                return reference.paged_attention(q, at, softmax_scale)
        q = q.contiguous()
        out = torch.empty_like(q)
        call = library.Attention.from_buffer_copy(layer_calls.attention)
        call.sequences, call.max_blocks = batch.block_table.shape
        if batch.residual_table is not None:
            call.residual_blocks = batch.residual_table.shape[1]
        self._run(
            "haarkv_attention", call, q=q, out=out, positions=batch.positions.contiguous(), num_heads=q.shape[1],
            block_table=batch.block_table.contiguous(), query_start=batch.query_start_loc.contiguous(),
            rows=batch.rows.contiguous(), bf16=is_bf16(q), softmax_scale=softmax_scale,
            residual_table=0 if batch.residual_table is None else batch.residual_table.contiguous(),
        )  # fmt: skip
        return out

    def gated_delta(
        self, x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, at: LayerView
    ) -> Tensor:
        """The gated delta rule; arguments and result as the reference's.

        `S^T k` is taken of the matrix before it is scaled. FP32 sums are in another order, one for every number: results do
        not depend on the number of threads, on the rest of the batch or on how a prompt was split. Raises as the reference.
        """
        state, batch = at.state, at.batch
        windows, memories = state.tensors["conv"], state.tensors["delta"]
        channels, taps = conv.shape[0], conv.shape[2]
        _, versions, value_heads, key_dim, value_dim = memories.shape
        out, qkv, gates = (torch.empty(len(x), *size) for size in ((value_heads, value_dim), (channels,), (value_heads, 2)))
        operands = {"x": x, "a": a, "b": b, "conv": conv, "a_log": a_log, "dt_bias": dt_bias}
        status = self._run(
            "haarkv_gated_delta", library.GatedDelta.__new__(library.GatedDelta),
            **{name: tensor.float().contiguous() for name, tensor in operands.items()}, out=out, mixed=qkv, gates=gates,
            windows=windows, memories=memories, seen=state.counts, positions=batch.positions.contiguous(),
            slots=batch.slot_mapping.contiguous(), rows=batch.rows.contiguous(),
            query_start=batch.query_start_loc.contiguous(), channels=channels, sequences=len(batch.rows), versions=versions,
            taps=taps, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim,
            key_heads=(channels - value_heads * value_dim) // (2 * key_dim),
        )  # fmt: skip
        if status:
            state.read(batch)  # raises: it names the tokens that no state has seen
        return out

    def layer_calls(self, kv: LayerKV) -> LayerCalls | None:
        """The calls of one layer of a cache, cached: filling them in takes longer than storing a token. None where the
        reference's ops have to run.
        """
        if kv not in self._layer_calls:
            self._layer_calls[kv] = prepare(kv, self.isa_number)
        return self._layer_calls[kv]
