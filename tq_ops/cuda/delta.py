"""The gated delta rule: which versions of a state are read and written, and a head's memory token by token.

Two launches, and nothing that waits for the device, so that a graph can hold a step. The first chooses versions from `seen`
and writes them to `turns`; the second alone changes `seen`. So nothing depends on the order of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.layout import STATE
from haarkv.tq_ops.cuda.schedule import sequence_bits, token_sequence
from haarkv.tq_ops.kv.cache import LayerView

# In place of a version: zeros before a sequence's first token; nothing for padding; nothing where no version has seen the
# tokens before.
ZEROS, DEAD, UNSEEN = tl.constexpr(-1), tl.constexpr(-2), tl.constexpr(-3)
_NO_HEAD, _LAST = tl.constexpr(STATE), tl.constexpr(2**63 - 1)


# Masks are made of numbers: where a block's truths meet a single one, the interpreter gives them another type.
@triton.jit
def choose_versions(counts, version, past_tokens, slot, number, VERSIONS: tl.constexpr):
    """The version that a sequence reads, and the one that the state after its last token but `number` overwrites: the oldest
    first, before it any of another continuation.

    Args:
        counts, version: [SIZE] int64 and int32, tokens that each version has seen; -1 where there is none.
        past_tokens, slot: tokens before the sequence's first new one, and that one's slot.
    Returns:
        the version read, or `ZEROS`, `DEAD` or `UNSEEN`; whether this state is stored; and the version that it overwrites.
    """
    match = tl.min(tl.where(counts == past_tokens, version, 2147483647), 0)
    read_version = tl.where(match == 2147483647, UNSEEN, match)
    before = tl.where(slot < 0, DEAD, tl.where(past_tokens == 0, ZEROS, read_version))
    is_saved = (number < VERSIONS - 1) & (before >= ZEROS)
    age = tl.where(counts >= tl.where(past_tokens == 0, 0, past_tokens + 1), -1, counts)
    age, target = tl.where(version < VERSIONS, age, _LAST), 0
    for _ in range(tl.where(is_saved, number + 1, 0)):
        target = tl.min(tl.where(age == tl.min(age, 0), version, 2147483647), 0)
        age = tl.where(version == target, _LAST, age)
    return before, is_saved, target


@triton.jit
def softplus(z):
    """log(1 + exp(z)), to the last places of FP32 wherever it is small: log1p(e) is 2 atanh(e / (2 + e)), a short series."""
    small = tl.exp(-tl.abs(z))
    w = small / (2.0 + small)
    s = w * w
    series = 1.0 / 15 + s * (1.0 / 17)
    series = 1.0 / 9 + s * (1.0 / 11 + s * (1.0 / 13 + s * series))
    series = 1.0 + s * (1.0 / 3 + s * (1.0 / 5 + s * (1.0 / 7 + s * series)))
    return tl.maximum(z, 0.0) + 2.0 * w * series


@triton.jit
def convolve(
    x, conv, token, begin, first, dim, before_at, saved_at, has_before, is_saved, SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The convolution of a token's `dim` channels from `first` on, [SIZE]; with `is_saved` its inputs are stored.

    `before_at`, `saved_at`: [TAPS - 1, CHANNELS], inputs before the sequence's first new token, and those after this one.
    """
    column, total = tl.arange(0, SIZE), tl.zeros((SIZE,), tl.float32)
    channel = first + column
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        new = source >= begin
        older = before_at + (TAPS - 1 - begin + source) * CHANNELS
        value = tl.load(x + source.to(tl.int64) * CHANNELS + channel, column < tl.where(new, dim, 0), 0.0)
        value += tl.load(older + channel, column < tl.where(new | (has_before == 0), 0, dim), 0.0)
        if tap > 0:
            tl.store(saved_at + (tap - 1) * CHANNELS + channel, value, column < tl.where(is_saved, dim, 0))
        total += value * tl.load(conv + channel * TAPS + tap, column < dim, 0.0)
    return total


# No layout may depend on where a tensor begins or on how long a batch is: sums would be in another order.
@triton.jit(do_not_specialize=["x", "a", "b", "sequences", "layer"])
def delta_inputs_kernel(
    x, a, b, conv, a_log, dt_bias, windows, seen, positions, slots, rows, query_start_loc, sequences, fault, layer,
    mixed, gates, turns,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr,
    VERSIONS: tl.constexpr, VERSIONS_SIZE: tl.constexpr, SEQUENCE_BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """q, k, v and gates of tokens, and the states of the convolution. Grid: [T, 2 * KEY_HEADS + VALUE_HEADS].

    The first token of a sequence whose state no version has seen is noted in `fault` [1] int64, for `layout.fault_place`.

    Args:
        x, a, b, conv, a_log, dt_bias: as of `gated_delta`, fp32.
        windows, seen: of a `Recurrent`, [num_rows + 1, VERSIONS, …].
        mixed: [T, channels] fp32, q over its length and the root of KEY_DIM, k over its length, and v.
        gates: [T, VALUE_HEADS, 2] fp32, decay of the memory, and share that is written.
        turns: [sequences, VERSIONS] int32, the versions that the states of the last tokens overwrite, the very last first; at
            the end the one that is read, or `ZEROS`, `DEAD` or `UNSEEN`.
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    token, unit, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(0)
    if SEQUENCE_BITS > 0:
        sequence = tl.max(token_sequence(token + tl.zeros((1,), tl.int32), query_start_loc, sequences, SEQUENCE_BITS), 0)
    begin, end = tl.load(query_start_loc + sequence), tl.load(query_start_loc + sequence + 1)
    row, past_tokens, slot = tl.load(rows + sequence), tl.load(positions + begin), tl.load(slots + begin)
    version = tl.arange(0, VERSIONS_SIZE)
    counts = tl.load(seen + row * VERSIONS + version, version < tl.where(slot < 0, 0, VERSIONS), -1)
    number = end - 1 - token
    before, is_saved, target = choose_versions(counts, version, past_tokens, slot, number, VERSIONS)
    if unit == 0:
        tl.store(turns + sequence * VERSIONS + number, target, is_saved)
        tl.store(turns + sequence * VERSIONS + VERSIONS - 1, before, number == 0)
        key = (layer.to(tl.int64) << 49) + (token.to(tl.int64) << 16) + _NO_HEAD
        tl.atomic_min(fault, key, mask=(token == begin) & (before == UNSEEN))
    if before >= ZEROS:
        is_key = unit < 2 * KEY_HEADS
        head = unit - 2 * KEY_HEADS
        first = tl.where(is_key, unit * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM)
        dim, inputs = tl.where(is_key, KEY_DIM, VALUE_DIM), (TAPS - 1) * CHANNELS
        value = convolve(
            x, conv, token, begin, first, dim, windows + (row * VERSIONS + before) * inputs,
            windows + (row * VERSIONS + target) * inputs, before >= 0, is_saved, SIZE, CHANNELS, TAPS,
        )  # fmt: skip
        value = value / (1.0 + tl.exp(-value))
        length = tl.rsqrt(tl.sum(value * value, 0) + 1e-6) * tl.where(unit < KEY_HEADS, KEY_DIM**-0.5, 1.0)
        column = tl.arange(0, SIZE)
        to = mixed + token.to(tl.int64) * CHANNELS + first + column
        tl.store(to, value * tl.where(is_key, length, 1.0), column < dim)
        if is_key == 0:
            at = token * VALUE_HEADS + head
            forgotten = tl.exp(tl.load(a_log + head)) * softplus(tl.load(a + at) + tl.load(dt_bias + head))
            tl.store(gates + 2 * at, tl.exp(-forgotten))
            tl.store(gates + 2 * at + 1, 1.0 / (1.0 + tl.exp(-tl.load(b + at))))


@triton.jit
def read_token(mixed, gates, token, q_at, k_at, v_at, head, keys, values, CHANNELS: tl.constexpr, VALUE_HEADS: tl.constexpr):
    """q and k [KEY_SIZE], v [COLUMNS], and both gates of one token."""
    token_at, gates_at = mixed + token.to(tl.int64) * CHANNELS, gates + 2 * (token * VALUE_HEADS + head)
    return (
        tl.load(token_at + q_at, keys, 0.0), tl.load(token_at + k_at, keys, 0.0), tl.load(token_at + v_at, values, 0.0),
        tl.load(gates_at), tl.load(gates_at + 1),
    )  # fmt: skip


@triton.jit
def note_seen(seen, turns, positions, begin, end, VERSIONS: tl.constexpr, VERSIONS_SIZE: tl.constexpr):
    """Update the token counts `seen` [VERSIONS] of one sequence."""
    version = tl.arange(0, VERSIONS_SIZE)
    inside, past_tokens = version < VERSIONS, tl.load(positions + begin)
    counts = tl.load(seen + version, inside, -1)
    counts = tl.where(counts >= tl.where(past_tokens == 0, 0, past_tokens + 1), -1, counts)
    for number in range(tl.minimum(end - begin, VERSIONS - 1)):
        token = end - 1 - number
        counts = tl.where(version == tl.load(turns + number), tl.load(positions + token) + 1, counts)
    tl.store(seen + version, counts, inside)


@triton.jit
def delta_rule_kernel(
    mixed, gates, turns, memories, seen, positions, rows, query_start_loc, out,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VERSIONS: tl.constexpr, VERSIONS_SIZE: tl.constexpr, KEY_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """S = S * decay + k (v - S^T k) * share, out = S^T q, token by token, COLUMNS of a head a program, S in registers.

    A column's numbers depend on no other column, and on no later token. Grid: [sequences * VALUE_HEADS, VALUE_DIM / COLUMNS].

    Args:
        mixed, gates, turns: of `delta_inputs_kernel`.
        memories, seen: of a `Recurrent`, [num_rows + 1, VERSIONS, …].
        out: [T, VALUE_HEADS, VALUE_DIM] fp32: zeros where a sequence pads the batch, NaN where its state is not there.
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    sequence, head = tl.program_id(0) // VALUE_HEADS, tl.program_id(0) % VALUE_HEADS
    begin, end = tl.load(query_start_loc + sequence), tl.load(query_start_loc + sequence + 1)
    row, turns = tl.load(rows + sequence), turns + sequence * VERSIONS
    before = tl.load(turns + VERSIONS - 1, begin < end, DEAD)
    key, column = tl.arange(0, KEY_SIZE), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keys, values = key < KEY_DIM, column < VALUE_DIM
    out += begin.to(tl.int64) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + column
    if before >= ZEROS:
        at, inside = key[:, None] * VALUE_DIM + column[None, :], keys[:, None] & values[None, :]
        version_stride, head_memory = VALUE_HEADS * KEY_DIM * VALUE_DIM, memories + head * (KEY_DIM * VALUE_DIM)
        read = (key < tl.where(before >= 0, KEY_DIM, 0))[:, None] & values[None, :]
        memory = tl.load(head_memory + (row * VERSIONS + before) * version_stride + at, read, 0.0)
        q_at = head * KEY_HEADS // VALUE_HEADS * KEY_DIM + key
        k_at, v_at = q_at + KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        q, k, v, keep_gate, write_gate = read_token(
            mixed, gates, begin, q_at, k_at, v_at, head, keys, values, CHANNELS, VALUE_HEADS
        )  # fmt: skip
        for token in range(begin, end):
            # The next token is loaded while this one is worked on.
            following = tl.minimum(token + 1, end - 1)
            next_q, next_k, next_v, next_keep, next_write = read_token(
                mixed, gates, following, q_at, k_at, v_at, head, keys, values, CHANNELS, VALUE_HEADS
            )  # fmt: skip
            memory = memory * keep_gate
            change = (v - tl.sum(memory * k[:, None], 0)) * write_gate
            memory = memory + k[:, None] * change[None, :]
            read_out = tl.sum(memory * q[:, None], 0)
            tl.store(out, read_out, values)
            out += VALUE_HEADS * VALUE_DIM
            number = end - 1 - token
            if number < VERSIONS - 1:
                target = tl.load(turns + number)
                tl.store(head_memory + (row * VERSIONS + target) * version_stride + at, memory, inside)
            q, k, v, keep_gate, write_gate = next_q, next_k, next_v, next_keep, next_write
        if (head == 0) & (tl.program_id(1) == 0):
            note_seen(seen + row * VERSIONS, turns, positions, begin, end, VERSIONS, VERSIONS_SIZE)
    else:
        nothing = tl.where(before == UNSEEN, float("nan"), 0.0) + tl.zeros((COLUMNS,), tl.float32)
        for _ in range(begin, end):
            tl.store(out, nothing, values)
            out += VALUE_HEADS * VALUE_DIM


def advance(
    x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, at: LayerView, fault: Tensor
) -> Tensor:
    """As `tq_ops.reference.gated_delta`, in two launches, without waiting for the device: [T, Hv, dv] fp32.

    Padding gives 0. A sequence whose state no version has seen gives NaN, stores nothing and is noted in `fault`. Sums are in
    one order, whatever the batch and however a prompt is cut.
    """
    state, batch = at.state, at.batch
    windows, memories = state.tensors["conv"], state.tensors["delta"]
    _, versions, value_heads, key_dim, value_dim = memories.shape
    (tokens, channels), taps, sequences = x.shape, conv.shape[2], len(batch.rows)
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    x, a, b, conv, a_log, dt_bias = (tensor.float().contiguous() for tensor in (x, a, b, conv, a_log, dt_bias))
    mixed, gates, out = (
        torch.empty(tokens, *size, device=x.device) for size in ((channels,), (value_heads, 2), (value_heads, value_dim))
    )
    turns = torch.empty(sequences, versions, dtype=torch.int32, device=x.device)
    shape = {
        "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim,
        "VERSIONS": versions, "VERSIONS_SIZE": triton.next_power_of_2(versions),
    }  # fmt: skip
    key_size = triton.next_power_of_2(key_dim)
    launch(delta_inputs_kernel, (tokens, 2 * key_heads + value_heads))(
        x, a, b, conv, a_log, dt_bias, windows, state.counts, batch.positions, batch.slot_mapping, batch.rows,
        batch.query_start_loc, sequences, fault, at.layer, mixed, gates, turns, TAPS=taps, SEQUENCE_BITS=sequence_bits(batch),
        SIZE=max(key_size, triton.next_power_of_2(value_dim)), num_warps=1, **shape,
    )  # fmt: skip
    # Columns of a head's memory that one warp holds in registers: 64 numbers a lane, and with them all of a step. A row of
    # them is 64 bytes. Qwen3.5-0.8B has 128 such programs a sequence, so that few sequences keep a GPU busy.
    columns = max(4, min(16, 2048 // key_size))
    launch(delta_rule_kernel, (sequences * value_heads, triton.cdiv(value_dim, columns)))(
        mixed, gates, turns, memories, state.counts, batch.positions, batch.rows, batch.query_start_loc, out,
        KEY_SIZE=key_size, COLUMNS=columns, num_warps=1, **shape,
    )  # fmt: skip
    return out
