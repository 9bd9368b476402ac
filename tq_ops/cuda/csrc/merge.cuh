// From the warps' states to a sequence's output: within a thread block, and among those that share the sequence.
#pragma once

#include "step.cuh"

struct Scratch {
    float sums[FOLDED_WARPS][SUMS][32];
    float maxima[WARPS][COLUMNS], totals[WARPS][COLUMNS];
};

static_assert(TABLE_BYTES + sizeof(Scratch) == SHARED_BYTES, "shared_bytes of decode.py");
static_assert(COLUMNS * (HEAD_DIM + MOST_BLOCKS) * 4 <= sizeof(Scratch::sums), "an output, and the weights of its parts");

__device__ __forceinline__ Scratch& scratch() { return *(Scratch*)(shared + TABLE_BYTES); }

// The query head of a lane's number `sum` of the output, and its column in layout.kernel_order.
__device__ __forceinline__ int column_of(int sum, int lane) { return sum / (4 * STEPS) * 8 + lane % 4 * 2 + sum % 2; }

__device__ __forceinline__ int place_in_vector(int sum, int lane) {
    int step = sum / 4 % STEPS;
    return sum % 4 / 2 * BYTES + column_of_level<V_BITS, 8>(lane / 4, step / 4, step % 4);
}

// All warps' states in warp 0's: `out` in units of 1, `peak` the thread block's, `total` of all tokens and equal in all lanes
// of a column.
__device__ __forceinline__ void fold_warps(State& state) {
    Scratch& at = scratch();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    for (int n = 0; n < COLUMN_TILES; n++)
        for (int c = 0; c < 2; c++) {
            float total = sum_of_tokens(state.total[n][c]);
            if (lane < 4) {
                at.maxima[warp][8 * n + 2 * t + c] = state.peak[n][c];
                at.totals[warp][8 * n + 2 * t + c] = total;
            }
        }
    __syncthreads();
    for (int n = 0; n < COLUMN_TILES; n++)
        for (int c = 0; c < 2; c++) {
            int column = 8 * n + 2 * t + c;
            // A share of sinks alone has no maximum; any finite one gives it the weight 0.
            float peak = SINK ? LEAST_PEAK : MINUS_INFINITY, total = 0.0f;
            for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, at.maxima[w][column]);
            for (int w = 0; w < WARPS; w++) total += at.totals[w][column] * exp2_fast(at.maxima[w][column] - peak);
            float grow = exp2_fast(state.peak[n][c] - peak) * state.unit;
            for (int step = 0; step < STEPS; step++)
                for (int i = c; i < 4; i += 2) state.out[n][step][i] *= grow;
            state.peak[n][c] = peak;
            state.total[n][c] = total;
        }
    for (int half = WARPS / 2; half; half /= 2) {
        float* own = &state.out[0][0][0];
        if (half <= warp && warp < 2 * half)
#pragma unroll
            for (int i = 0; i < SUMS; i++) at.sums[warp - half][i][lane] = own[i];
        __syncthreads();
        if (warp < half)
#pragma unroll
            for (int i = 0; i < SUMS; i++) own[i] += at.sums[warp][i][lane];
        __syncthreads();
    }
}

// Eight numbers of the rotation's row from `index` on.
__device__ __forceinline__ void load_rotation(float (&out)[8], const Arguments& given, int index) {
#if ROTATION_FP32
    for (int i = 0; i < 8; i += 4) *(float4*)(out + i) = *(const float4*)((const float*)given.rotation + index + i);
#else
    uint4 four = *(const uint4*)((const half_bits*)given.rotation + index);
    word pairs[4] = {four.x, four.y, four.z, four.w};
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(pairs[i] << 16);
        out[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
#endif
}

// The rotation is needed last, by whoever merges, and lies in no cache: ask for it first.
__device__ __forceinline__ void fetch_rotation(const Arguments& given) {
    constexpr int SIZE = HEAD_DIM * HEAD_DIM * (ROTATION_FP32 ? 4 : 2);
    for (int i = 128 * threadIdx.x; i < SIZE; i += 128 * THREADS)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)given.rotation + i));
}

// Writes the output of a sequence and KV head, of which `y` [COLUMNS][HEAD_DIM] holds the normalized sums, in
// layout.kernel_order.
__device__ __forceinline__ void write_out(const float* y, const Arguments& given, int sequence, int head) {
    half_bits* out = given.out + (long long)(sequence * HEADS + head) * GROUP * HEAD_DIM;
    // Back is `y @ rotation.T`: a thread multiplies a row of the matrix by a share of the columns.
    constexpr int AT_ONCE = THREADS / HEAD_DIM;
    int coordinate = threadIdx.x % HEAD_DIM;
    constexpr int SHARE = (GROUP + AT_ONCE - 1) / AT_ONCE;
    int column = threadIdx.x / HEAD_DIM * SHARE;
    float sums[SHARE] = {};
#pragma unroll 4
    for (int i = 0; i < HEAD_DIM; i += 8) {
        float row[8];
        load_rotation(row, given, coordinate * HEAD_DIM + i);
        for (int n = 0; n < SHARE; n++) {
            float numbers[8];
            // Columns past the group's are there, and their sums are not used.
            for (int j = 0; j < 8; j += 4)
                *(float4*)(numbers + j) = *(const float4*)(y + (column + n) % COLUMNS * HEAD_DIM + i + j);
            for (int j = 0; j < 8; j++) sums[n] += numbers[j] * row[j];
        }
    }
    for (int n = 0; n < SHARE; n++)
        if (column + n < GROUP) out[(column + n) * HEAD_DIM + coordinate] = to_bf16(sums[n]);
}

// Parts of a sequence: of thread block `first`, its second slot, and the first slot of those after it.
__device__ __forceinline__ long long slot_of(int block, int first, int head) {
    return ((long long)block * HEADS + head) * 2 + (block == first);
}

__device__ __forceinline__ void leave_part(const State& state, const Arguments& given, long long slot) {
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        const float* own = &state.out[0][0][0];
#pragma unroll
        for (int i = 0; i < SUMS; i++) given.parts[(slot * SUMS + i) * 32 + lane] = own[i];
        for (int n = 0; n < COLUMN_TILES; n++)
            for (int c = 0; c < 2; c++)
                if (lane < 4) {
                    given.part_maxima[slot * COLUMNS + 8 * n + 2 * lane + c] = state.peak[n][c];
                    given.part_sums[slot * COLUMNS + 8 * n + 2 * lane + c] = state.total[n][c];
                }
        __threadfence();
    }
}

// Whether this thread block is the last of `parts` to arrive.
__device__ __forceinline__ bool is_last(const Arguments& given, int sequence, int head, int parts) {
    __syncthreads();
    if (threadIdx.x == 0) {
        int* arrived = given.arrived + sequence * HEADS + head;
        bool last = atomicAdd(arrived, 1) == parts - 1;
        if (last) *arrived = 0;
        __threadfence();
        *(int*)scratch().maxima = last;  // which nobody needs any more
    }
    __syncthreads();
    return *(const int*)scratch().maxima;
}

// Maximum and sum of a column's packed tokens, for `add_in_bf16`.
__device__ __forceinline__ void note_packed(int column, float peak, float total) {
    if (!KEPT) return;
    scratch().maxima[1][column] = peak;
    scratch().totals[1][column] = total;
}

// Adds what a sequence saw in BF16 to `y`, the normalized sums of its packed tokens, or to nothing where it has none.
__device__ __forceinline__ void add_in_bf16(float* y, const Arguments& given, int sequence, int head, bool some) {
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        int column = i / HEAD_DIM;
        long long vector = (long long)(sequence * HEADS + head) * GROUP + column;
        float peak = given.in_bf16_maxima[vector], packed_peak = some ? scratch().maxima[1][column] : LEAST_PEAK;
        float most = fmaxf(peak, packed_peak), grow = exp2_fast(peak - most);
        float packed = some ? scratch().totals[1][column] * exp2_fast(packed_peak - most) : 0.0f;
        float total = packed + grow * given.in_bf16_sums[vector];
        float sum = (some ? y[i] * packed : 0.0f) + grow * given.in_bf16[vector * HEAD_DIM + i % HEAD_DIM];
        y[i] = total == 0.0f ? 0.0f : sum / total;
    }
}

// The output of a sequence whose parts lie in thread blocks first ... last.
__device__ __forceinline__ void merge_parts(float* y, const Arguments& given, int head, int first, int last) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* weights = y + COLUMNS * HEAD_DIM;  // [parts, COLUMNS]
    for (int column = warp; column < COLUMNS; column += WARPS) {
        float peak = MINUS_INFINITY, total = 0.0f;
        for (int b = first + lane; b <= last; b += 32)
            peak = fmaxf(peak, __ldcg(given.part_maxima + slot_of(b, first, head) * COLUMNS + column));
        for (int step = 1; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, step));
        for (int b = first + lane; b <= last; b += 32) {
            long long at = slot_of(b, first, head) * COLUMNS + column;
            float weight = exp2_fast(__ldcg(given.part_maxima + at) - peak);
            total += weight * __ldcg(given.part_sums + at);
            weights[(b - first) * COLUMNS + column] = weight;
        }
        for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(ALL, total, step);
        for (int b = first + lane; b <= last; b += 32) weights[(b - first) * COLUMNS + column] /= total;
        if (lane == 0) note_packed(column, peak, total);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SUMS * 32; i += THREADS) {
        int column = column_of(i / 32, i % 32);
        float sum = 0.0f;
#pragma unroll 8
        for (int b = first; b <= last; b++)
            sum += weights[(b - first) * COLUMNS + column] * __ldcg(given.parts + slot_of(b, first, head) * SUMS * 32 + i);
        y[column * HEAD_DIM + place_in_vector(i / 32, i % 32)] = sum;
    }
}

__device__ __forceinline__ void normalize(float* y, const State& state) {
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        const float* own = &state.out[0][0][0];
        for (int n = 0; n < COLUMN_TILES; n++)
            for (int c = 0; c < 2; c++)
                if (lane < 4) note_packed(8 * n + 2 * lane + c, state.peak[n][c], state.total[n][c]);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            float total = state.total[i / (4 * STEPS)][i % 2];
            y[column_of(i, lane) * HEAD_DIM + place_in_vector(i, lane)] = own[i] / total;
        }
    }
}
