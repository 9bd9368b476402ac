// Codes: where they lie, how a warp loads them, and the table that makes pairs of centroids of them.
#pragma once

#include "learned.cuh"

// Where a thread block's shared memory begins; what lies before it is the driver's. The kernel stops where that is not so.
#if __CUDA_ARCH__ >= 900
#define SHARED_BASE 1024
#else
#define SHARED_BASE 0
#endif

extern __shared__ __align__(1024) unsigned char shared[];

// What the table is made of: loaded early, used late.
struct Centroids {
    float low, high[16 / WARPS];
};

__device__ __forceinline__ Centroids load_centroids(const Arguments& args) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Half a warp writes a pair's copies for K, the other half those for V.
    const float* centroids = lane < 16 ? args.k_centroids : args.v_centroids;
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

// The centroids of the two levels in byte i of `codes`. `place`: where this lane's copy of pair 0 lies, below 256.
__device__ __forceinline__ word pair_of(word codes, int i, word place) {
    word out;
    // The base is part of the instruction; added by itself it would cost as much as the lookup. Volatile: it must not pass a
    // barrier.
    asm volatile("ld.shared.b32 %0, [%1 + %2];"
                 : "=r"(out)
                 : "r"(__byte_perm(codes, place, 0x5504 | i << 4)), "n"(SHARED_BASE));
    return out;
}

// Codes and scales of 32 tokens, as this lane holds them.
struct Codes {
    word k[2][2][K_STORED];                 // of token_of_row(g) and 8 tokens further, of either 16
    word v[2][4][stored(V_WORDS, V_BITS)];  // of tokens t, t + 4, t + 8 and t + 12
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

// A lane's share of a token's codes: the `share`-th of `SHARES` equal parts of each plane. The plane of the third bits has
// half the bytes of the other, each for two of those, so two shares read the same ones.
template <int BITS, int SHARES, int N>
__device__ __forceinline__ void load_share(word (&out)[N], const unsigned char* vector, int share) {
    if constexpr (BITS == 4) load_codes(out, vector + share * (HEAD_DIM / 2 / SHARES));
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

// The column, in the order of layout.kernel_order, of the level in the low half of byte `i` of word `w` of a share; that in
// the high half is HEAD_DIM / 2 further.
template <int BITS, int SHARES> __device__ __forceinline__ int column_of_level(int share, int w, int i) {
    if constexpr (BITS == 4) return share * (HEAD_DIM / 2 / SHARES) + 4 * w + i;
    int byte = share % (SHARES / (BITS == 3 ? 2 : 1)) * (HEAD_DIM / 4 / SHARES) + w / 2 * 4 + i;
    return BITS == 2 ? 2 * byte + w % 2 : 4 * byte + w % 2 + share / (SHARES / 2) * 2;
}

// Which of 8 tokens stands in a row of Q.K. The order is such that the tokens 2t and 2t + 1 of P.V's operand are t and t + 4,
// so that one load of V covers four tokens that follow each other.
__device__ __forceinline__ int token_of_row(int row) { return row / 2 + row % 2 * 4; }

// The codes of a side's 16 tokens: those of their first.
__device__ __forceinline__ const unsigned char* codes_of(const Side& side, const Place& place, int r, int vector_bytes) {
    return side.codes + (long long)place.block[r] * side.codes_stride + place.row[r] * vector_bytes;
}

__device__ __forceinline__ void load_k(Codes& codes, const Arguments& args, const Place& place, int left) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Scales first: they are needed first after the products.
    codes.scales = 0;
    if (lane < left) {
        int half = lane / 16, row = (half ? place.row[1] : place.row[0]) + lane % 16;
        long long block = half ? place.block[1] : place.block[0];
        codes.scales = load_scale(args.k.scales + (block * args.k.scales_stride + row)) |
                       load_scale(args.v.scales + (block * args.v.scales_stride + row)) << 16;
    }
    for (int r = 0; r < 2; r++) {
        const unsigned char* at = codes_of(args.k, place, r, K_VECTOR) + token_of_row(g) * K_VECTOR;
        for (int i = 0; i < 2; i++) {
#if K_LEARNED
            load_units(codes.k[r][i], at + 8 * i * K_VECTOR, t);
#else
            load_share<K_BITS, 4>(codes.k[r][i], at + 8 * i * K_VECTOR, t);
#endif
        }
    }
}

__device__ __forceinline__ void load_v(Codes& codes, const Arguments& args, const Place& place) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int r = 0; r < 2; r++) {
        const unsigned char* at = codes_of(args.v, place, r, V_VECTOR) + t * V_VECTOR;
        for (int i = 0; i < 4; i++) load_share<V_BITS, 8>(codes.v[r][i], at + 4 * i * V_VECTOR, g);
    }
}
