// Vectors whose levels are not nibbles already: unpacked to nibbles, or to FP32 numbers a few at a time, and the products of
// those.

constexpr int kTileKeys = 16;  // vectors that are numbers at a time

// Places PLANE's bits of n vectors in cells of 4 or 8 bits, `shift` bits up; part p of a plane is p * bytes / parts ahead.
// Eight bytes at a time: the mask drops what a shift brings over from the byte beside.
template <bool ADD>
inline void unpack_plane(const uint8_t* codes, int64_t bytes, int n, int cell, int width, int shift, int levels, uint8_t* out) {
    const int part = levels * width / 8, parts = cell / width;
    const uint64_t of_byte = ((1u << width) - 1u) * (cell == kNibble ? 0x11u : 1u), mask = of_byte * 0x0101010101010101u;
    for (int key = 0; key < n; ++key) {
        uint8_t* to = out + key * static_cast<int64_t>(levels * cell / 8);
        for (int p = 0; p < parts; ++p)
            for (int j = 0; j < part; j += 8, to += 8) {
                uint64_t word, before = 0;
                std::memcpy(&word, codes + key * bytes + j, 8);
                if (ADD) std::memcpy(&before, to, 8);
                word = before | ((word >> (p * width)) & mask) << shift;
                std::memcpy(to, &word, 8);
            }
    }
}

// Levels of n vectors in cells of `side.cell` bits: [n, levels * cell / 8].
inline void unpack(const Side& side, const uint8_t* codes, int n, uint8_t* out) {
    unpack_plane<false>(codes, side.bytes, n, side.cell, side.planes[0], 0, side.levels, out);
    if (side.planes[1] == 0) return;
    const uint8_t* second = codes + side.levels * side.planes[0] / 8;
    unpack_plane<true>(second, side.bytes, n, side.cell, side.planes[1], side.planes[0], side.levels, out);
}

inline bool unpacks_nibbles(const Side& side) { return side.cell == kNibble && side.planes[0] != kNibble; }

// Vectors key ... key + n - 1 of a block as numbers [n, levels], scales included; `bytes` is scratch.
template <class Simd>
void numbers_of(const Side& side, Place at, int key, int n, uint8_t* bytes, float* out) {
    const uint8_t* codes = at.codes + static_cast<int64_t>(key) * side.bytes;
    const int levels = side.levels;
    if (side.cell == kBf16) {
        for (int i = 0; i < n * levels; i += Simd::width)
            Simd::store(out + i, Simd::load(reinterpret_cast<const uint16_t*>(codes) + i));
        return;
    }
    const uint8_t* level = codes;
    if (side.planes[0] != kByte) unpack(side, codes, n, bytes), level = bytes;
    const int part = levels / side.scales_per_vector;
    for (int i = 0; i < n; ++i)
        for (int s = 0; s < side.scales_per_vector; ++s) {
            const float scale = half_to_float(at.scales[(key + i) * side.scales_per_vector + s]);
            const int64_t first = static_cast<int64_t>(i) * levels + s * part;
            for (int j = 0; j < part; ++j) out[first + j] = side.centroids[level[first + j]];
            for (int j = 0; j < part; j += Simd::width)
                Simd::store(out + first + j, Simd::mul(Simd::load(out + first + j), Simd::set1(scale)));
        }
}

// logits[r * stride + i] = q[r] . x[i] * factor, of KEYS vectors. The sum of a product does not depend on what else is here.
template <class Simd, int R, int KEYS>
inline void score_keys(const float* x, int dim, const float* const* q, float factor, int stride, float* logits) {
    typename Simd::F acc[KEYS][R];
    for (int k = 0; k < KEYS; ++k)
        for (int r = 0; r < R; ++r) acc[k][r] = Simd::zero();
    for (int i = 0; i < dim; i += Simd::width) {
        typename Simd::F value[KEYS];
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; ++k) value[k] = Simd::load(x + k * dim + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Simd::F query = Simd::load(q[r] + i);
#pragma GCC unroll 8
            for (int k = 0; k < KEYS; ++k) acc[k][r] = Simd::fma(value[k], query, acc[k][r]);
        }
    }
    for (int k = 0; k < KEYS; ++k)
        for (int r = 0; r < R; ++r) logits[r * stride + k] = Simd::reduce_add(acc[k][r]) * factor;
}

// The same of any number of vectors [n, dim].
template <class Simd, int R>
void score_numbers(const float* x, int n, int dim, const float* const* q, float factor, int stride, float* logits) {
    constexpr int kKeys = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    int key = 0;
    for (; key + kKeys <= n; key += kKeys) score_keys<Simd, R, kKeys>(x + key * dim, dim, q, factor, stride, logits + key);
    for (; key < n; ++key) score_keys<Simd, R, 1>(x + key * dim, dim, q, factor, stride, logits + key);
}

// COLUMNS registers of sums[r] = sums[r] * shrink[r] + weights[r] @ x, of n vectors `dim` apart.
template <class Simd, int R, int COLUMNS>
inline void mix_columns(const float* x, int n, int dim, const float* weights, int stride, const float* shrink, float* sums) {
    typename Simd::F acc[COLUMNS][R];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            acc[c][r] = Simd::mul(Simd::load(sums + r * dim + c * Simd::width), Simd::set1(shrink[r]));
    for (int key = 0; key < n; ++key) {
        typename Simd::F value[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) value[c] = Simd::load(x + key * dim + c * Simd::width);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Simd::F weight = Simd::set1(weights[r * stride + key]);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) acc[c][r] = Simd::fma(value[c], weight, acc[c][r]);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) Simd::store(sums + r * dim + c * Simd::width, acc[c][r]);
}

// sums [R, dim], of all columns.
template <class Simd, int R>
void mix_numbers(const float* x, int n, int dim, const float* weights, int stride, const float* shrink, float* sums) {
    constexpr int kColumns = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    for (int column = 0; column < dim; column += kColumns * Simd::width)
        mix_columns<Simd, R, kColumns>(x + column, n, dim, weights, stride, shrink, sums + column);
}

// Sums [R, n] for keys of which none is here.
template <int R> void shrink_sums(const float* shrink, int n, float* sums) {
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < n; ++i) sums[r * n + i] *= shrink[r];
}

// Logits [R, stride] of a block's first n keys.
template <class Simd, int R>
void score_unpacked(const Side& side, Place at, int n, const float* const* q, float factor, int stride, uint8_t* bytes,
                    float* numbers, float* logits) {
    for (int key = 0; key < n; key += kTileKeys) {
        const int keys = smaller(n - key, kTileKeys);
        numbers_of<Simd>(side, at, key, keys, bytes, numbers);
        score_numbers<Simd, R>(numbers, keys, side.levels, q, factor, stride, logits + key);
    }
}

// Adds a block's first n vectors to sums [R, levels], which shrink first.
template <class Simd, int R>
void mix_unpacked(const Side& side, Place at, int n, const float* weights, int stride, const float* shrink, uint8_t* bytes,
                  float* numbers, float* sums) {
    float one[R];
    for (int r = 0; r < R; ++r) one[r] = 1.0f;
    for (int key = 0; key < n; key += kTileKeys) {
        const int keys = smaller(n - key, kTileKeys);
        numbers_of<Simd>(side, at, key, keys, bytes, numbers);
        mix_numbers<Simd, R>(numbers, keys, side.levels, weights + key, stride, key ? one : shrink, sums);
    }
}
