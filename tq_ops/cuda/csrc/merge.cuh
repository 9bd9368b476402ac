// From the warps' states to a sequence's output: within a thread block, and among those that share the sequence.
#pragma once

#include "step.cuh"
#include "work.cuh"

// Beside the table. While no table is needed, its place holds what threads hand to each other.
struct Scratch {
    float y[COLUMNS * HEAD_DIM];          // a sequence's output, normalized, in layout.kernel_order
    float weights[MOST_BLOCKS][COLUMNS];  // of its parts, in `place_of_weight`
    float maxima[WARPS][COLUMNS], totals[WARPS][COLUMNS];
    float peak[COLUMNS], total[COLUMNS];  // of the thread block's tokens, then of all that are packed
    Step step;                            // the thread block's, while registers are needed for other things
    int is_last;
};

static_assert(TABLE_BYTES + sizeof(Scratch) == SHARED_BYTES, "shared_bytes of decode.py");
static_assert(WARPS * SUMS * 32 * 4 <= TABLE_BYTES, "all warps' outputs in the table's place");

__device__ __forceinline__ Scratch& scratch() { return *(Scratch*)(shared + TABLE_BYTES); }

// What shared memory holds now, whatever the compiler knows of it: so it keeps nothing of it in registers meanwhile.
__device__ __forceinline__ Step reread(const Step& step) {
    Step out;
    word at = __cvta_generic_to_shared(&step);
#pragma unroll
    for (int i = 0; i < (int)(sizeof(Step) / 4); i++)
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(((int*)&out)[i]) : "r"(at + 4 * i) : "memory");
    return out;
}

// The query head of a lane's number `sum` of the output, and its column in layout.kernel_order.
__device__ __forceinline__ int column_of(int sum, int lane) { return sum / (4 * STEPS) * 8 + lane % 4 * 2 + sum % 2; }

__device__ __forceinline__ int place_in_vector(int sum, int lane) {
    int step = sum / 4 % STEPS;
    return sum % 4 / 2 * BYTES + column_of_level<V_BITS, 8>(lane / 4, step / 4, step % 4);
}

// Numbers of the output that a thread adds up: four lanes' of one sum, so of columns 2 apart.
constexpr int NUMBERS = SUMS * 32;

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Read anew: a number kept since before the loop would take a register there.
__device__ __forceinline__ int thread() {
    int out;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(out));
    return out;
}

// All warps' outputs in the table's place, in units of 1 and of the thread block's peak; that and the total in `scratch`.
__device__ __forceinline__ void gather_warps(const State& state) {
    Scratch& at = scratch();
    int lane = thread() % 32, warp = thread() / 32, t = lane % 4;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float total = sum_of_tokens(state.total[n][c]);
            if (lane < 4) {
                at.maxima[warp][8 * n + 2 * t + c] = state.peak[n][c];
                at.totals[warp][8 * n + 2 * t + c] = total;
            }
        }
    __syncthreads();
    float* out = (float*)shared + warp * NUMBERS + lane;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int column = 8 * n + 2 * t + c;
            // A share of sinks alone has no maximum; any finite one gives it the weight 0.
            float peak = SINK ? LEAST_PEAK : MINUS_INFINITY, total = 0.0f;
            for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, at.maxima[w][column]);
            for (int w = 0; w < WARPS; w++) total += at.totals[w][column] * exp2_fast(at.maxima[w][column] - peak);
            float grow = exp2_fast(state.peak[n][c] - peak) * state.unit;
            for (int step = 0; step < STEPS; step++)
                for (int i = c; i < 4; i += 2) out[((n * STEPS + step) * 4 + i) * 32] = state.out[n][step][i] * grow;
            if (thread() < 4) at.peak[column] = peak, at.total[column] = total;
        }
    __syncthreads();
}

// Four numbers of the thread block's output, from `index` on.
__device__ __forceinline__ float4 sum_of_warps(int index) {
    float4 sum = *(const float4*)((const float*)shared + index);
    for (int w = 1; w < WARPS; w++) sum = plus(sum, *(const float4*)((const float*)shared + w * NUMBERS + index));
    return sum;
}

// Puts four numbers of the output, those from `index` on, where they belong in `y`.
__device__ __forceinline__ void place_numbers(float4 numbers, int index) {
    float* y = scratch().y + place_in_vector(index / 32, index % 32);
    int column = column_of(index / 32, 0);
    y[column * HEAD_DIM] = numbers.x;
    y[(column + 2) * HEAD_DIM] = numbers.y;
    y[(column + 4) * HEAD_DIM] = numbers.z;
    y[(column + 6) * HEAD_DIM] = numbers.w;
}

// The output of a sequence that this thread block holds whole.
__device__ __forceinline__ void normalize() {
    const float* total = scratch().total;
    for (int i = 4 * thread(); i < NUMBERS; i += 4 * THREADS) {
        float4 sum = sum_of_warps(i);
        int column = column_of(i / 32, 0);
        sum.x /= total[column], sum.y /= total[column + 2], sum.z /= total[column + 4], sum.w /= total[column + 6];
        place_numbers(sum, i);
    }
}

// Eight numbers of the rotation's row from `index` on.
__device__ __forceinline__ void load_rotation(float (&out)[8], const Arguments& args, int index) {
    uint4 four = *(const uint4*)((const half_bits*)args.rotation + index);
    word pairs[4] = {four.x, four.y, four.z, four.w};
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(pairs[i] << 16);
        out[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

// The rotation is needed last, by the block that merges, and lies in no cache: ask for it first.
__device__ __forceinline__ void fetch_rotation(const Arguments& args) {
    constexpr int SIZE = HEAD_DIM * HEAD_DIM * 2;
    for (int i = 128 * thread(); i < SIZE; i += 128 * THREADS)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)args.rotation + i));
}

// Writes the output of a sequence and KV head, whose normalized sums are `y` of scratch.
__device__ __forceinline__ void write_out(const Arguments& args, int sequence, int head) {
    half_bits* out = args.out + (long long)(sequence * HEADS + head) * GROUP * HEAD_DIM;
    // Back is `y @ rotation.T`: a thread multiplies a share of a row of the matrix with all columns.
    constexpr int SHARERS = THREADS / HEAD_DIM, ROW = HEAD_DIM / SHARERS;
    int coordinate = thread() % HEAD_DIM, share = thread() / HEAD_DIM;
    float sums[GROUP] = {};
#pragma unroll 4
    for (int i = share * ROW; i < share * ROW + ROW; i += 8) {
        float row[8];
        load_rotation(row, args, coordinate * HEAD_DIM + i);
#pragma unroll
        for (int n = 0; n < GROUP; n++)
            for (int j = 0; j < 8; j += 4) {
                float4 y = *(const float4*)(scratch().y + n * HEAD_DIM + i + j);
                sums[n] += y.x * row[j] + y.y * row[j + 1] + y.z * row[j + 2] + y.w * row[j + 3];
            }
    }
    if (SHARERS > 1) {
        float* others = (float*)shared + coordinate;
        if (share)
            for (int n = 0; n < GROUP; n++) others[((share - 1) * GROUP + n) * HEAD_DIM] = sums[n];
        __syncthreads();
        if (share) return;
        for (int s = 0; s < SHARERS - 1; s++)
            for (int n = 0; n < GROUP; n++) sums[n] += others[(s * GROUP + n) * HEAD_DIM];
    }
    for (int n = 0; n < GROUP; n++) out[n * HEAD_DIM + coordinate] = to_bf16(sums[n]);
}

// Parts of a sequence: of thread block `first`, its second slot, and the first slot of those after it.
__device__ __forceinline__ long long slot_of(int block, int first, int head) {
    return ((long long)block * HEADS + head) * 2 + (block == first);
}

__device__ __forceinline__ void leave_part(const Arguments& args, long long slot) {
    for (int i = 4 * thread(); i < NUMBERS; i += 4 * THREADS) *(float4*)(args.parts + slot * NUMBERS + i) = sum_of_warps(i);
    if (thread() < COLUMNS) {
        args.part_maxima[slot * COLUMNS + thread()] = scratch().peak[thread()];
        args.part_sums[slot * COLUMNS + thread()] = scratch().total[thread()];
    }
    __threadfence();
}

// Whether this thread block is the last of `parts` to arrive.
__device__ __forceinline__ bool is_last(const Arguments& args, int sequence, int head, int parts) {
    __syncthreads();
    if (thread() == 0) {
        int* arrived = args.arrived + sequence * HEADS + head;
        bool last = atomicAdd(arrived, 1) == parts - 1;
        if (last) *arrived = 0;
        __threadfence();
        scratch().is_last = last;
    }
    __syncthreads();
    return scratch().is_last;
}

// Adds what a sequence saw in BF16 to `y`, the normalized sums of its packed tokens, or to nothing where it has none.
__device__ __forceinline__ void add_in_bf16(const Arguments& args, int sequence, int head, bool some) {
    float* y = scratch().y;
    for (int i = thread(); i < GROUP * HEAD_DIM; i += THREADS) {
        int column = i / HEAD_DIM;
        long long vector = (long long)(sequence * HEADS + head) * GROUP + column;
        float peak = args.in_bf16_maxima[vector], packed_peak = some ? scratch().peak[column] : LEAST_PEAK;
        float most = fmaxf(peak, packed_peak), grow = exp2_fast(peak - most);
        float packed = some ? scratch().total[column] * exp2_fast(packed_peak - most) : 0.0f;
        float total = packed + grow * args.in_bf16_sums[vector];
        float sum = (some ? y[i] * packed : 0.0f) + grow * args.in_bf16[vector * HEAD_DIM + i % HEAD_DIM];
        y[i] = total == 0.0f ? 0.0f : sum / total;
    }
}

// Where the weight of a column lies: those of `place_numbers` side by side.
__device__ __forceinline__ int place_of_weight(int column) { return column / 8 * 8 + column % 2 * 4 + column % 8 / 2; }

// The output of a sequence whose parts lie in thread blocks first ... last.
__device__ __forceinline__ void merge_parts(const Arguments& args, int head, int first, int last) {
    int lane = thread() % 32, warp = thread() / 32;
    Scratch& to = scratch();
    for (int column = warp; column < COLUMNS; column += WARPS) {
        float maxima[MOST_BLOCKS / 32], weights[MOST_BLOCKS / 32], peak = MINUS_INFINITY, total = 0.0f;
        for (int i = 0; i < MOST_BLOCKS / 32; i++) {
            int b = first + lane + 32 * i;
            long long at = slot_of(b, first, head) * COLUMNS + column;
            maxima[i] = b <= last ? __ldcg(args.part_maxima + at) : MINUS_INFINITY;
            weights[i] = b <= last ? __ldcg(args.part_sums + at) : 0.0f;
        }
        for (int i = 0; i < MOST_BLOCKS / 32; i++) peak = fmaxf(peak, maxima[i]);
        for (int step = 1; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, step));
        for (int i = 0; i < MOST_BLOCKS / 32; i++) {
            float weight = exp2_fast(maxima[i] - peak);
            total += weight * weights[i];
            weights[i] = weight;
        }
        for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(ALL, total, step);
        for (int i = 0; i < MOST_BLOCKS / 32; i++)
            if (first + lane + 32 * i <= last) to.weights[lane + 32 * i][place_of_weight(column)] = weights[i] / total;
        if (lane == 0) to.peak[column] = peak, to.total[column] = total;
    }
    __syncthreads();
    for (int i = 4 * thread(); i < NUMBERS; i += 4 * THREADS) {
        int place = place_of_weight(column_of(i / 32, 0));
        float4 sum = {};
#pragma unroll 8
        for (int b = first; b <= last; b++) {
            float4 part = __ldcg((const float4*)(args.parts + slot_of(b, first, head) * NUMBERS + i));
            float4 weight = *(const float4*)(to.weights[b - first] + place);
            sum.x += weight.x * part.x, sum.y += weight.y * part.y, sum.z += weight.z * part.z, sum.w += weight.w * part.w;
        }
        place_numbers(sum, i);
    }
}
