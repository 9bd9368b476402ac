// Decode attention over packed levels: one new token a sequence, in the domain of the codes, merged and rotated back.
//
// Compiled at run time for one shape. Defined by the caller: HEADS KV heads, GROUP query heads of each (up to 16), HEAD_DIM
// (64, 128 or 256; 64 for 4 bits alone), K_BITS and V_BITS of a level (2, 3 or 4), BLOCK tokens of a block (a multiple of 16),
// PROCESSOR_BLOCKS thread blocks a processor, ROTATION_FP32.
//
// How it works. `mma.m16n8k16` multiplies 16 rows by 8 columns; the columns are the query heads of a group.
//   Q.K   A = K, 16 tokens x 16 coordinates.  A lane's two numbers of a register are the coordinates j and j + D/2 of one
//         token: exactly the two levels of byte j. So a lane loads a quarter of a token's bytes, and no byte moves again.
//   P.V   A = V transposed, 16 coordinates x 16 tokens. A lane's two numbers are two tokens' same coordinate: the low levels
//         of two bytes, or their high levels, which a shift and a bit select put into one byte.
// Either way one byte names a pair of centroids. A table in shared memory holds the 256 pairs, once for each lane: lane n
// reads bank n alone, and `prmt` puts the byte into the address. Lookups thus neither conflict nor compute.
//
// Levels of 2 bits: a byte holds four, and a shift by two brings the other two to where those of 4 bits lie; the table ignores
// the bits between. Levels of 3 bits have their third in a plane of its own, from where a shift and a bit select bring it.
//
// Each warp takes 32 tokens of every TILE and keeps maximum, sum and output in registers. Tiles of all sequences form one list
// that the thread blocks of a KV head share evenly, whatever the lengths. A thread block that holds a whole sequence writes its
// output; of several that share one, each leaves a part, and the last to arrive merges them. Which one that is does not change
// a bit: parts are added in the order of the context.

typedef unsigned int word;
typedef unsigned short half_bits;

constexpr int WARPS = 8, THREADS = 32 * WARPS, SPAN = 32, TILE = SPAN * WARPS;
constexpr int BYTES = HEAD_DIM / 2;              // of a vector of two levels a byte
constexpr int COLUMN_TILES = (GROUP + 7) / 8;    // of 8 query heads
constexpr int COLUMNS = 8 * COLUMN_TILES;
constexpr int K_WORDS = BYTES / 16;              // of two levels a byte, that a lane holds of K's token: a quarter
constexpr int V_WORDS = BYTES / 32;              // and of V's: an eighth
__device__ constexpr int stored(int words, int bits) { return bits == 2 ? words / 2 : words; }  // of those, as they are stored
__device__ constexpr int vector_bytes(int bits) { return HEAD_DIM * bits / 8; }
constexpr int STEPS = HEAD_DIM / 16;             // products of Q.K, and of P.V, for 16 tokens
constexpr int SUMS = 4 * STEPS * COLUMN_TILES;   // a lane's numbers of the output
constexpr int PAIRS = 256, PAIR_STRIDE = 256;    // bytes from a pair to the next: 32 lanes of K's, then of V's
constexpr int TABLE_BYTES = PAIRS * PAIR_STRIDE;
constexpr int FOLDED_WARPS = WARPS / 2;          // whose outputs wait in shared memory at once
constexpr unsigned ALL = 0xffffffffu;
#define MINUS_INFINITY __int_as_float(0xff800000)
constexpr float LEAST_UNIT = 9.313225746154785e-10f;  // 2**-30, below every FP16 number

// Where a thread block's shared memory begins; what lies before it is the driver's. The kernel stops where that is not so.
#if __CUDA_ARCH__ >= 900
#define SHARED_BASE 1024
#else
#define SHARED_BASE 0
#endif

extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ float to_float(word half) {
    float out;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(out) : "r"(half));
    return out;
}

__device__ __forceinline__ word to_halves(float low, float high) {
    word out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ half_bits to_bf16(float x) {
    half_bits out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Codes and scales are read once: they need no place in L1.
template <int N> __device__ __forceinline__ void load_codes(word (&out)[N], const unsigned char* at) {
    if constexpr (N == 1) asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(out[0]) : "l"(at));
    if constexpr (N == 2) asm("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "l"(at));
    if constexpr (N >= 4)
        for (int i = 0; i < N; i += 4)
            asm("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                : "=r"(out[i]), "=r"(out[i + 1]), "=r"(out[i + 2]), "=r"(out[i + 3]) : "l"(at + 4 * i));
}

__device__ __forceinline__ word load_scale(const half_bits* at) {
    half_bits out;
    asm("ld.global.nc.L1::no_allocate.b16 %0, [%1];" : "=h"(out) : "l"(at));
    return out;
}

__device__ __forceinline__ void multiply(float* sums, word a0, word a1, word a2, word a3, word b0, word b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An 8 x 8 tile of FP16: from row lane / 4, columns 2 * (lane % 4) and the next, to the same of the transposed tile.
__device__ __forceinline__ word transposed(word pair) {
    word out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// The centroids of the two levels in byte i of `codes`. `place`: where this lane's copy of pair 0 lies, below 256.
__device__ __forceinline__ word pair_of(word codes, int i, word place) {
    word out;
    // The base is part of the instruction; added by itself it would cost as much as the lookup.
    asm("ld.shared.b32 %0, [%1 + %2];" : "=r"(out) : "r"(__byte_perm(codes, place, 0x5504 | i << 4)), "n"(SHARED_BASE));
    return out;
}

// Largest over the eight lanes that hold the same columns, and sum.
__device__ __forceinline__ float largest_of_tokens(float x) {
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

__device__ __forceinline__ float sum_of_tokens(float x) {
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

struct Side {
    const unsigned char* codes;
    const half_bits* scales;
    int codes_stride, scales_stride;  // from a block to the next, in bytes and in scales
};

struct Arguments {
    const half_bits* q;           // [sequences, HEADS * GROUP, D] FP16, rotated, in layout.kernel_order
    half_bits* out;               // [sequences, HEADS * GROUP, D] BF16
    const void* rotation;         // [D, D] BF16 or FP32; null leaves the output rotated
    float* parts;                 // [gridDim.x, HEADS, 2, SUMS, 32]
    float* part_maxima;           // [gridDim.x, HEADS, 2, COLUMNS], in units of log2
    float* part_sums;             // likewise
    int* arrived;                 // [sequences, HEADS], zeros before and after
    const long long* positions;   // [sequences] of the new tokens
    const int* seq_lens;          // [sequences]
    const int* block_table;       // [sequences, table_width]
    const float *k_centroids, *v_centroids;  // [16]
    Side k, v;
    int sequences, table_width;
    float scale;                  // softmax scale times log2(e)
};

// -- The work of a thread block -------------------------------------------------------------------------------------------
__device__ __forceinline__ int stored_tokens(const Arguments& given, int sequence) {
    return min(given.seq_lens[sequence], (int)given.positions[sequence] + 1);
}

struct Found {
    int sequence, tokens, first_tile, tiles;
};

// The sequence that tile `wanted` of the list belongs to; with none, `first_tile` is the length of the list. Whole warps.
__device__ __forceinline__ Found find_sequence(const Arguments& given, int wanted) {
    int lane = threadIdx.x % 32, before = 0;
    for (int base = 0; base < given.sequences; base += 32) {
        int tokens = base + lane < given.sequences ? stored_tokens(given, base + lane) : 0;
        int tiles = (tokens + TILE - 1) / TILE, through = tiles;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(ALL, through, step);
            if (lane >= step) through += other;
        }
        unsigned reached = __ballot_sync(ALL, before + through > wanted);
        if (reached) {
            int at = __ffs(reached) - 1;
            tiles = __shfl_sync(ALL, tiles, at);
            return {base + at, __shfl_sync(ALL, tokens, at), before + __shfl_sync(ALL, through, at) - tiles, tiles};
        }
        before += __shfl_sync(ALL, through, 31);
    }
    return {-1, 0, before, 0};
}

// The thread block, of `blocks` that share `tiles` evenly, that takes a tile; `first_of` is the first tile it takes.
__device__ __forceinline__ int taker_of(int tile, int tiles, int blocks) {
    return (int)(((long long)(tile + 1) * blocks - 1) / tiles);
}

__device__ __forceinline__ int first_of(int block, int tiles, int blocks) { return (int)((long long)block * tiles / blocks); }

// What the table is made of: loaded early, used late.
struct Centroids {
    float low, high[16 / WARPS];
};

__device__ __forceinline__ Centroids load_centroids(const Arguments& given) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Half a warp writes a pair's copies for K, the other half those for V.
    const float* centroids = lane < 16 ? given.k_centroids : given.v_centroids;
    int levels = 1 << (lane < 16 ? K_BITS : V_BITS);
    Centroids out;
    out.low = centroids[lane % levels];
    for (int i = 0; i < 16 / WARPS; i++) out.high[i] = centroids[(warp + WARPS * i) % levels];
    return out;
}

__device__ __forceinline__ void fill_table(const Centroids& centroids) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < 16 / WARPS; i++) {
        word pair = to_halves(centroids.low, centroids.high[i]);
        for (int level = 0; level < 16; level++) {
            word one = __shfl_sync(ALL, pair, level, 16);
            *(uint2*)(shared + (16 * (warp + WARPS * i) + level) * PAIR_STRIDE + 8 * lane) = make_uint2(one, one);
        }
    }
}

// -- What a warp holds ------------------------------------------------------------------------------------------------------
struct State {
    float peak[COLUMN_TILES][2], total[COLUMN_TILES][2];  // of columns 2 * (lane % 4) and the next; `total` of this lane's tokens
    float unit;                                           // a power of two: `out` is in units of it
    float out[COLUMN_TILES][STEPS][4];
};

// Codes and scales of 32 tokens, as this lane holds them.
struct Codes {
    word k[2][2][stored(K_WORDS, K_BITS)];  // of tokens g and g + 8 of either 16
    word v[2][4][stored(V_WORDS, V_BITS)];  // of tokens 2t, 2t + 1, 2t + 8 and 2t + 9
    word scales;                            // of token `lane`: K's, and V's above it; 0 past the end
};

// Where 32 tokens lie: blocks of either 16, and their rows in these.
struct Place {
    int block[2], row[2];
};

__device__ __forceinline__ Place place_of(const int* table, int head, int token, int end) {
    Place place;
    for (int r = 0; r < 2; r++) {
        if (BLOCK % 32 == 0 && r) {
            place.block[1] = place.block[0], place.row[1] = place.row[0] + 16;
        } else {
            // A 16 without any token is not in the table, perhaps; whatever is read in its place counts nothing.
            int some = min(token + 16 * r, end - 1);
            place.block[r] = table[some / BLOCK], place.row[r] = head * BLOCK + some % BLOCK / 16 * 16;
        }
    }
    return place;
}

// A lane's share of a token's codes: the `share`-th of `SHARES` equal parts of each plane. The plane of the third bits has half
// the bytes of the other, each for two of those, so two shares read the same ones.
template <int BITS, int SHARES, int N>
__device__ __forceinline__ void load_share(word (&out)[N], const unsigned char* vector, int share) {
    if constexpr (BITS == 4) load_codes(out, vector + share * (BYTES / SHARES));
    if constexpr (BITS == 2) load_codes(out, vector + share * (HEAD_DIM / 4 / SHARES));
    if constexpr (BITS == 3) {
        word pairs[N / 2], thirds[N / 2];
        load_codes(pairs, vector + share * (HEAD_DIM / 4 / SHARES));
        load_codes(thirds, vector + HEAD_DIM / 4 + share % (SHARES / 2) * (HEAD_DIM / 4 / SHARES));
        for (int i = 0; i < N / 2; i++) out[i] = pairs[i], out[N / 2 + i] = thirds[i];
    }
}

// The same as two levels a byte, one in the low bits of each half; what is above them may be anything.
template <int BITS, int SHARES, int N, int M>
__device__ __forceinline__ void spread(word (&out)[M], const word (&codes)[N], int share) {
    for (int i = 0; i < M; i++) {
        if constexpr (BITS == 4) {
            out[i] = codes[i];
        } else {
            out[i] = codes[i / 2] >> i % 2 * 2;
            // Bits 2 and 6 of a byte. Of eight third bits the even ones belong to the first half of the shares.
            if constexpr (BITS == 3) {
                int odd = share / (SHARES / 2);
                word thirds = i % 2 ? codes[N / 2 + i / 2] >> odd : codes[N / 2 + i / 2] << (2 - odd);
                out[i] = (out[i] & 0xbbbbbbbbu) | (thirds & 0x44444444u);
            }
        }
    }
}

// The column, in the order of layout.kernel_order, of the level in the low half of byte `i` of word `w` of a share; that in the
// high half is D/2 columns further.
template <int BITS, int SHARES> __device__ __forceinline__ int column_of_level(int share, int w, int i) {
    if constexpr (BITS == 4) return share * (BYTES / SHARES) + 4 * w + i;
    int byte = share % (SHARES / (BITS == 3 ? 2 : 1)) * (HEAD_DIM / 4 / SHARES) + w / 2 * 4 + i;
    return BITS == 2 ? 2 * byte + w % 2 : 4 * byte + w % 2 + share / (SHARES / 2) * 2;
}

// The codes of a side's 16 tokens: those of their first.
__device__ __forceinline__ const unsigned char* codes_of(const Side& side, const Place& place, int r, int vector_bytes) {
    return side.codes + (long long)place.block[r] * side.codes_stride + place.row[r] * vector_bytes;
}

__device__ __forceinline__ void load_k(Codes& codes, const Arguments& given, const Place& place, int left) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Scales first: they are needed first after the products.
    codes.scales = 0;
    if (lane < left) {
        int half = lane / 16, row = (half ? place.row[1] : place.row[0]) + lane % 16;
        long long block = half ? place.block[1] : place.block[0];
        codes.scales = load_scale(given.k.scales + (block * given.k.scales_stride + row))
            | load_scale(given.v.scales + (block * given.v.scales_stride + row)) << 16;
    }
    for (int r = 0; r < 2; r++) {
        const unsigned char* at = codes_of(given.k, place, r, vector_bytes(K_BITS)) + g * vector_bytes(K_BITS);
        load_share<K_BITS, 4>(codes.k[r][0], at, t);
        load_share<K_BITS, 4>(codes.k[r][1], at + 8 * vector_bytes(K_BITS), t);
    }
}

__device__ __forceinline__ void load_v(Codes& codes, const Arguments& given, const Place& place) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int r = 0; r < 2; r++) {
        const unsigned char* at = codes_of(given.v, place, r, vector_bytes(V_BITS)) + 2 * t * vector_bytes(V_BITS);
        for (int i = 0; i < 4; i++) load_share<V_BITS, 8>(codes.v[r][i], at + (i % 2 + i / 2 * 8) * vector_bytes(V_BITS), g);
    }
}

// The queries of this lane's column of each tile, as the products' right operand.
__device__ __forceinline__ void load_queries(word (&q)[COLUMN_TILES][STEPS][2], const Arguments& given, int sequence, int head) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int n = 0; n < COLUMN_TILES; n++) {
        int column = 8 * n + g;
        const half_bits* at = given.q + ((long long)(sequence * HEADS + head) * GROUP + column) * HEAD_DIM;
        for (int step = 0; step < STEPS; step++) {
            for (int i = 0; i < 2; i++) {
                const half_bits* low = at + column_of_level<K_BITS, 4>(t, step / 2, step % 2 * 2 + i);
                q[n][step][i] = column < GROUP ? low[0] | (word)low[BYTES] << 16 : 0;
            }
        }
    }
}

// -- One step: 32 tokens ----------------------------------------------------------------------------------------------------
__device__ __forceinline__ void multiply_k(
    float (&logits)[COLUMN_TILES][2][4], const Codes& codes, const word (&q)[COLUMN_TILES][STEPS][2]) {
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

// Turns logits into probabilities times V's scale, as P.V's right operand, and brings the state up to them.
__device__ __forceinline__ void soften(
    word (&p)[COLUMN_TILES][2][2], float (&logits)[COLUMN_TILES][2][4], State& state, word scales, int left, float scale) {
    int lane = threadIdx.x % 32, g = lane / 4;
    // In units of a power of two just below the largest V scale, a probability times a scale fits FP16 for any scales.
    float widest = __uint_as_float(__float_as_uint(to_float(__reduce_max_sync(ALL, scales >> 16))) & 0x7f800000u);
    float unit = fmaxf(state.unit, widest), per_unit = __uint_as_float((254u << 23) - __float_as_uint(unit));
    float k_scale[2][2], v_scale[2][2];
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 2; i++) {
            word both = __shfl_sync(ALL, scales, 16 * r + 8 * i + g);
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
                    if (left < SPAN && 16 * r + 8 * i + g >= left) logit = MINUS_INFINITY;
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
            // Two tokens' low levels, and their high levels, of four bytes; of tokens 2t and 2t + 1, then 8 further on.
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

// This warp's share of tokens begin ... end - 1.
__device__ __forceinline__ void attend(State& state, const Arguments& given, int sequence, int head, int begin, int end) {
    for (int n = 0; n < COLUMN_TILES; n++) {
        for (int c = 0; c < 2; c++) state.peak[n][c] = MINUS_INFINITY, state.total[n][c] = 0.0f;
        for (int step = 0; step < STEPS; step++)
            for (int i = 0; i < 4; i++) state.out[n][step][i] = 0.0f;
    }
    state.unit = LEAST_UNIT;
    int token = begin + threadIdx.x / 32 * SPAN;
    if (token >= end) return;
    const int* table = given.block_table + (long long)sequence * given.table_width;
    Codes codes;
    Place place = place_of(table, head, token, end), next = place_of(table, head, token + TILE, end);
    load_k(codes, given, place, end - token);
    load_v(codes, given, place);
    word q[COLUMN_TILES][STEPS][2];
    load_queries(q, given, sequence, head);
    while (true) {
        float logits[COLUMN_TILES][2][4];
        word p[COLUMN_TILES][2][2], scales = codes.scales;
        multiply_k(logits, codes, q);
        // The next K is on its way while this V is worked on, and the next V during the next K; block numbers a step ahead.
        int left = end - token;
        bool more = left > TILE;
        token += TILE;
        if (more) load_k(codes, given, next, left - TILE);
        soften(p, logits, state, scales, left, given.scale);
        multiply_v(state, codes, p);
        if (!more) return;
        load_v(codes, given, next);
        next = place_of(table, head, token + TILE, end);
    }
}

// -- Merging ----------------------------------------------------------------------------------------------------------------
struct Scratch {
    float sums[FOLDED_WARPS][SUMS][32];
    float maxima[WARPS][COLUMNS], totals[WARPS][COLUMNS];
    bool last;
};

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
            float peak = MINUS_INFINITY, total = 0.0f;
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
            for (int i = 0; i < SUMS; i++) at.sums[warp - half][i][lane] = own[i];
        __syncthreads();
        if (warp < half)
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
    if (given.rotation)
        for (int i = 128 * threadIdx.x; i < SIZE; i += 128 * THREADS)
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)given.rotation + i));
}

// Writes the output of a sequence and KV head, of which `y` [COLUMNS][D] holds the normalized sums, in layout.kernel_order.
__device__ __forceinline__ void write_out(const float* y, const Arguments& given, int sequence, int head) {
    half_bits* out = given.out + (long long)(sequence * HEADS + head) * GROUP * HEAD_DIM;
    if (!given.rotation) {
        for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) out[i] = to_bf16(y[i]);
        return;
    }
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
            for (int j = 0; j < 8; j += 4) *(float4*)(numbers + j) = *(const float4*)(y + (column + n) % COLUMNS * HEAD_DIM + i + j);
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
        scratch().last = last;
    }
    __syncthreads();
    return scratch().last;
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
        for (int i = 0; i < SUMS; i++) {
            float total = state.total[i / (4 * STEPS)][i % 2];
            y[column_of(i, lane) * HEAD_DIM + place_in_vector(i, lane)] = own[i] / total;
        }
    }
}

// Grid: [thread blocks that share the work of a KV head, HEADS].
extern "C" __global__ void __launch_bounds__(THREADS, PROCESSOR_BLOCKS) decode(const __grid_constant__ Arguments given) {
    if ((__cvta_generic_to_shared(shared) & 0xffffff) != SHARED_BASE) __trap();
    int head = blockIdx.y, block = blockIdx.x;
    Centroids centroids = load_centroids(given);
    if (block == 0) fetch_rotation(given);
    int tiles = find_sequence(given, 0x7fffffff).first_tile;
    // A sequence without tokens pads the batch.
    for (int b = block; b < given.sequences; b += gridDim.x)
        if (stored_tokens(given, b) <= 0)
            for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS)
                given.out[(long long)(b * HEADS + head) * GROUP * HEAD_DIM + i] = 0;
    int blocks = min((int)gridDim.x, tiles);
    if (block >= blocks) return;
    fill_table(centroids);
    __syncthreads();
    float* y = &scratch().sums[0][0][0];
    for (int tile = first_of(block, tiles, blocks), stop = first_of(block + 1, tiles, blocks); tile < stop;) {
        Found found = find_sequence(given, tile);
        int until = min(stop, found.first_tile + found.tiles);
        State state;
        int begin = (tile - found.first_tile) * TILE, end = min((until - found.first_tile) * TILE, found.tokens);
        attend(state, given, found.sequence, head, begin, end);
        fold_warps(state);
        int first = taker_of(found.first_tile, tiles, blocks), last = taker_of(found.first_tile + found.tiles - 1, tiles, blocks);
        bool merges = true;
        if (first == last) {
            normalize(y, state);
        } else {
            leave_part(state, given, slot_of(block, first, head));
            merges = is_last(given, found.sequence, head, last - first + 1);
            if (merges) merge_parts(y, given, head, first, last);
        }
        if (merges) {
            __syncthreads();
            write_out(y, given, found.sequence, head);
        }
        __syncthreads();
        tile = until;
    }
}
