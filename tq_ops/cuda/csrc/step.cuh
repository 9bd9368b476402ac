// Attention of a warp: 32 tokens a step, the state in registers.
#pragma once

#include "codes.cuh"

struct State {
    float peak[COLUMN_TILES][2],
        total[COLUMN_TILES][2];  // of columns 2 * (lane % 4) and the next; `total` of this lane's tokens
    float unit;                  // a power of two: `out` is in units of it
    float out[COLUMN_TILES][STEPS][4];
};

static_assert(STRETCH % SPAN == 0, "a warp's tokens are of one stretch");

// The first of a group's queries, as the keys of a stretch meet them.
__device__ __forceinline__ long long query_of(const Arguments& args, int stretch, int sequence, int head) {
    return (((long long)stretch * args.sequences + sequence) * HEADS + head) * GROUP;
}

// The queries of this lane's column of each tile, as the products' right operand; `first` is the group's first.
__device__ __forceinline__ void load_queries(word (&q)[COLUMN_TILES][STEPS][2], const Arguments& args, long long first) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int n = 0; n < COLUMN_TILES; n++) {
        int column = 8 * n + g;
        const half_bits* at = args.q + (first + column) * HEAD_DIM;
#if !K_LEARNED && K_BITS == 4
        // A lane's coordinates follow each other, as its levels do.
        word low[STEPS] = {}, high[STEPS] = {};
        if (column < GROUP) {
            load_codes(low, (const unsigned char*)(at + t * (HEAD_DIM / 8)));
            load_codes(high, (const unsigned char*)(at + t * (HEAD_DIM / 8) + HEAD_DIM / 2));
        }
        for (int step = 0; step < STEPS; step++) {
            q[n][step][0] = __byte_perm(low[step], high[step], 0x5410);
            q[n][step][1] = __byte_perm(low[step], high[step], 0x7632);
        }
#else
        for (int step = 0; step < STEPS; step++) {
            for (int i = 0; i < 2; i++) {
#if K_LEARNED
                Pair pair = pair_at(2 * step + i);
                int low = column_of_pair(pair, t), high = low + 4 * pair.step;
#else
                int low = column_of_level<K_BITS, 4>(t, step / 2, step % 2 * 2 + i), high = low + HEAD_DIM / 2;
#endif
                q[n][step][i] = column < GROUP ? at[low] | (word)at[high] << 16 : 0;
            }
        }
#endif
    }
}

#if K_LEARNED
template <int STEP = 0>
__device__ __forceinline__ void multiply_units(float (&logits)[COLUMN_TILES][2][4], const Codes& codes, int r,
                                               const word (&q)[COLUMN_TILES][STEPS][2]) {
    word a0 = centroids_of_pair<2 * STEP>(codes.k[r][0]), a1 = centroids_of_pair<2 * STEP>(codes.k[r][1]);
    word a2 = centroids_of_pair<2 * STEP + 1>(codes.k[r][0]), a3 = centroids_of_pair<2 * STEP + 1>(codes.k[r][1]);
    for (int n = 0; n < COLUMN_TILES; n++) multiply(logits[n][r], a0, a1, a2, a3, q[n][STEP][0], q[n][STEP][1]);
    if constexpr (STEP + 1 < STEPS) multiply_units<STEP + 1>(logits, codes, r, q);
}

__device__ __forceinline__ void multiply_k(float (&logits)[COLUMN_TILES][2][4], const Codes& codes,
                                           const word (&q)[COLUMN_TILES][STEPS][2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        for (int n = 0; n < COLUMN_TILES; n++)
            for (int i = 0; i < 4; i++) logits[n][r][i] = 0.0f;
        multiply_units(logits, codes, r, q);
    }
}
#else
__device__ __forceinline__ void multiply_k(float (&logits)[COLUMN_TILES][2][4], const Codes& codes,
                                           const word (&q)[COLUMN_TILES][STEPS][2]) {
    word lane = threadIdx.x % 32, place = lane * 4;
    for (int r = 0; r < 2; r++) {
        word rows[2][K_WORDS];
        for (int i = 0; i < 2; i++) spread<K_BITS, 4>(rows[i], codes.k[r][i], lane % 4);
        for (int n = 0; n < COLUMN_TILES; n++)
            for (int i = 0; i < 4; i++) logits[n][r][i] = 0.0f;
        for (int step = 0; step < STEPS; step++) {
            int w = step / 2, i = step % 2 * 2;
            word a0 = pair_of(rows[0][w], i, place), a1 = pair_of(rows[1][w], i, place);
            word a2 = pair_of(rows[0][w], i + 1, place), a3 = pair_of(rows[1][w], i + 1, place);
            for (int n = 0; n < COLUMN_TILES; n++) multiply(logits[n][r], a0, a1, a2, a3, q[n][step][0], q[n][step][1]);
        }
    }
}
#endif

// Turns logits into probabilities times V's scale, as P.V's right operand, and brings the state up to them. Of the tokens
// those from `left` on do not count, nor do the first `unseen`; one at least does.
__device__ __forceinline__ void soften(word (&p)[COLUMN_TILES][2][2], float (&logits)[COLUMN_TILES][2][4], State& state,
                                       word scales, int left, int unseen, float scale, const float (&gains)[COLUMN_TILES][2]) {
    int row = token_of_row(threadIdx.x % 32 / 4);
    // In units of a power of two just below the largest V scale, a probability times a scale fits FP16 for any scales.
    float widest = __uint_as_float(__float_as_uint(to_float(__reduce_max_sync(ALL, scales >> 16))) & 0x7f800000u);
    float unit = fmaxf(state.unit, widest), per_unit = __uint_as_float((254u << 23) - __float_as_uint(unit));
    float k_scale[2][2], v_scale[2][2];
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 2; i++) {
            word both = __shfl_sync(ALL, scales, 16 * r + 8 * i + row);
            k_scale[r][i] = to_float(both & 0xffff) * scale;
            v_scale[r][i] = to_float(both >> 16) * per_unit;
        }
    for (int n = 0; n < COLUMN_TILES; n++) {
        float shrink[2];
        for (int c = 0; c < 2; c++) {
            float peak = MINUS_INFINITY;
            for (int r = 0; r < 2; r++)
                for (int i = 0; i < 2; i++) {
                    float& logit = logits[n][r][2 * i + c];
                    logit *= k_scale[r][i];
                    if (K_LEARNED) logit *= gains[n][c];
                    if (left < SPAN && 16 * r + 8 * i + row >= left) logit = MINUS_INFINITY;
                    if (LOWER && 16 * r + 8 * i + row < unseen) logit = MINUS_INFINITY;
                    peak = fmaxf(peak, logit);
                }
            peak = fmaxf(state.peak[n][c], largest_of_tokens(peak));
            shrink[c] = exp2_fast(state.peak[n][c] - peak);
            state.peak[n][c] = peak;
            state.total[n][c] *= shrink[c];
            shrink[c] *= state.unit * per_unit;
        }
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < 2; i++) {
                float weight[2];
                for (int c = 0; c < 2; c++) {
                    weight[c] = exp2_fast(logits[n][r][2 * i + c] - state.peak[n][c]);
                    state.total[n][c] += weight[c];
                    weight[c] *= v_scale[r][i];
                }
                p[n][r][i] = transposed(to_halves(weight[0], weight[1]));
            }
        // Once a context's largest logit has been seen, there is nothing to shrink.
        if (__any_sync(ALL, shrink[0] != 1.0f || shrink[1] != 1.0f))
            for (int step = 0; step < STEPS; step++)
                for (int i = 0; i < 4; i++) state.out[n][step][i] *= shrink[i % 2];
    }
    state.unit = unit;
}

__device__ __forceinline__ void multiply_v(State& state, const Codes& codes, const word (&p)[COLUMN_TILES][2][2]) {
    word lane = threadIdx.x % 32, place = lane * 4 + 128;
    for (int r = 0; r < 2; r++) {
        word tokens[4][V_WORDS];
        for (int i = 0; i < 4; i++) spread<V_BITS, 8>(tokens[i], codes.v[r][i], lane / 4);
        for (int w = 0; w < V_WORDS; w++) {
            // Two tokens' low levels, and their high levels, of four bytes; then of the two tokens 8 further on.
            word low[2], high[2];
            for (int i = 0; i < 2; i++) {
                word one = tokens[2 * i][w], other = tokens[2 * i + 1][w];
                low[i] = (one & 0x0f0f0f0fu) | (other << 4 & 0xf0f0f0f0u);
                high[i] = (one >> 4 & 0x0f0f0f0fu) | (other & 0xf0f0f0f0u);
            }
            for (int b = 0; b < 4; b++) {
                word a0 = pair_of(low[0], b, place), a1 = pair_of(high[0], b, place);
                word a2 = pair_of(low[1], b, place), a3 = pair_of(high[1], b, place);
                for (int n = 0; n < COLUMN_TILES; n++)
                    multiply(state.out[n][4 * w + b], a0, a1, a2, a3, p[n][r][0], p[n][r][1]);
            }
        }
    }
}

// Adds `times` what the logits of a stretch lack to the maxima; `first` is the group's first query there.
__device__ __forceinline__ void move_peaks(State& state, const Arguments& args, long long first, float times) {
#if K_LEARNED
    for (int n = 0; n < COLUMN_TILES; n++)
        for (int c = 0; c < 2; c++) {
            int column = 8 * n + threadIdx.x % 4 * 2 + c;
            if (column < GROUP) state.peak[n][c] += times * args.lacks[first + column];
        }
#endif
}

// This warp's share of tokens begin ... end - 1, of which those before `first` do not count. The table is filled while the
// first codes are on their way.
__device__ __forceinline__ void attend(State& state, const Arguments& args, int sequence, int head, int begin, int end,
                                       int first) {
    for (int n = 0; n < COLUMN_TILES; n++) {
        for (int c = 0; c < 2; c++) state.peak[n][c] = MINUS_INFINITY, state.total[n][c] = 0.0f;
        for (int step = 0; step < STEPS; step++)
            for (int i = 0; i < 4; i++) state.out[n][step][i] = 0.0f;
    }
    state.unit = LEAST_UNIT;
    int token = begin + threadIdx.x / 32 * SPAN;
    if (SINK && token + SPAN <= first) token += (first - token - SPAN) / TILE * TILE + TILE;  // sinks alone
    const int* table = args.block_table + (long long)sequence * args.table_width;
    Centroids centroids = load_centroids(args);
    Codes codes;
    // A warp without tokens reads others', for nothing.
    Place place = place_of(table, head, token, end), next = place_of(table, head, token + TILE, end);
    load_k(codes, args, place, end - token);
    load_v(codes, args, place);
    fill_table(centroids);
    __syncthreads();
    if (token >= end) return;
    for (bool more = true; more;) {
        int stretch = K_LEARNED ? token / STRETCH : 0;
        long long queries = query_of(args, stretch, sequence, head);
        word q[COLUMN_TILES][STEPS][2];
        load_queries(q, args, queries);
        float gains[COLUMN_TILES][2] = {};
        if (K_LEARNED)
            for (int n = 0; n < COLUMN_TILES; n++)
                for (int c = 0; c < 2; c++) {
                    int column = 8 * n + threadIdx.x % 4 * 2 + c;
                    gains[n][c] = column < GROUP ? args.gains[queries + column] : 1.0f;
                }
        move_peaks(state, args, queries, -args.scale);
        do {
            float logits[COLUMN_TILES][2][4];
            word p[COLUMN_TILES][2][2], scales = codes.scales;
            multiply_k(logits, codes, q);
            // The next K is on its way while this V is worked on, and the next V during the next K; block numbers a step
            // ahead.
            int left = end - token, unseen = first - token;
            more = left > TILE;
            token += TILE;
            if (more) load_k(codes, args, next, left - TILE);
            soften(p, logits, state, scales, left, unseen, args.scale, gains);
            multiply_v(state, codes, p);
            if (!more) break;
            load_v(codes, args, next);
            next = place_of(table, head, token + TILE, end);
        } while (!K_LEARNED || token < (stretch + 1) * STRETCH);
        move_peaks(state, args, queries, args.scale);
    }
}
