// Unpacks levels that are no nibbles: to nibbles (of 2 and 3 bits), or to FP32 numbers; and the products with such numbers.

constexpr int kTileKeys = 16;  // vectors that are numbers at a time

// By what sums shrink that have shrunk already.
constexpr float kOnes[kMaxRows] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

// Places a plane's bits of n vectors in cells, SHIFT bits up, beside those that are there if SHIFT. A word's bits go to the
// place of the word in each part; the mask drops what a shift brings over from the byte beside.
template <class Word, int CELL, int WIDTH, int SHIFT>
inline void unpack_words(const uint8_t* codes, int64_t bytes, int n, int levels, uint8_t* out) {
    constexpr int kParts = CELL / WIDTH;
    constexpr uint64_t kByteMask = ((1u << WIDTH) - 1u) * (CELL == kNibble ? 0x11u : 1u);
    const int part = levels * WIDTH / 8;
    Word mask;
    std::memset(&mask, static_cast<int>(kByteMask), sizeof mask);
    for (int key = 0; key < n; ++key, codes += bytes, out += levels * CELL / 8)
        for (int j = 0; j < part; j += static_cast<int>(sizeof(Word))) {
            Word word, before;
            std::memcpy(&word, codes + j, sizeof word);
#pragma GCC unroll 8
            for (int p = 0; p < kParts; ++p) {
                Word bits = ((word >> (p * WIDTH)) & mask) << SHIFT;
                if (SHIFT) std::memcpy(&before, out + p * part + j, sizeof before), bits |= before;
                std::memcpy(out + p * part + j, &bits, sizeof bits);
            }
        }
}

typedef uint64_t TwoWords __attribute__((vector_size(16)));

template <int CELL, int WIDTH, int SHIFT>
inline void unpack_plane(const uint8_t* codes, int64_t bytes, int n, int levels, uint8_t* out) {
    if (levels * WIDTH / 8 % 16 == 0) return unpack_words<TwoWords, CELL, WIDTH, SHIFT>(codes, bytes, n, levels, out);
    unpack_words<uint64_t, CELL, WIDTH, SHIFT>(codes, bytes, n, levels, out);
}

// Levels of n vectors in cells of `side.cell` bits: [n, levels * cell / 8].
inline void unpack(const Side& side, const uint8_t* codes, int n, uint8_t* out) {
    const int levels = side.levels, first = side.planes[0], second = side.planes[1];
    const uint8_t* rest = codes + levels * first / 8;
    if (side.cell == kNibble) {
        unpack_plane<kNibble, 2, 0>(codes, side.bytes, n, levels, out);
        if (second == 1) unpack_plane<kNibble, 1, 2>(rest, side.bytes, n, levels, out);
        return;
    }
    unpack_plane<kByte, 4, 0>(codes, side.bytes, n, levels, out);
    if (first == 4 && second == 1) unpack_plane<kByte, 1, 4>(rest, side.bytes, n, levels, out);
    if (first == 4 && second == 2) unpack_plane<kByte, 2, 4>(rest, side.bytes, n, levels, out);
}

// Bits by which each eight bytes of N / 2 move down: byte j of the cells is byte j % part of a plane of PLANE bits a level.
template <int LEVELS, int PLANE> struct Moves {
    static constexpr int kPart = LEVELS * PLANE / 8;  // bytes
    alignas(64) uint64_t bits[LEVELS / 16] = {};

    constexpr Moves() {
        for (int i = 0; i < LEVELS / 16; ++i) bits[i] = static_cast<uint64_t>(8 * i / kPart * PLANE);
    }
};

// Levels of n vectors as nibbles, a register at a time: two bits each, and a third where THREE says so.
template <class Register, int LEVELS, bool THREE>
inline void unpack_levels(const uint8_t* codes, int64_t bytes, int n, uint8_t* out) {
    typedef Moves<LEVELS, 2> Two;
    typedef Moves<LEVELS, 1> One;
    static constexpr Two kTwo;
    static constexpr One kOne;
    constexpr int kBytes = 4 * Register::width;
    constexpr int kOfTwo = Two::kPart < kBytes ? Two::kPart : kBytes, kOfOne = One::kPart < kBytes ? One::kPart : kBytes;
    for (int key = 0; key < n; ++key, codes += bytes)
#pragma GCC unroll 4
        for (int at = 0; at < LEVELS / 2; at += kBytes, out += kBytes) {
            const auto two = Register::down(Register::template repeated<kOfTwo>(codes + at % Two::kPart), kTwo.bits + at / 8);
            if constexpr (THREE) {
                const auto one = Register::template repeated<kOfOne>(codes + LEVELS / 4 + at % One::kPart);
                Register::store_words(out, Register::three_bits(two, one, kOne.bits + at / 8));
            } else {
                Register::store_words(out, Register::two_bits(two));
            }
        }
}

// As `unpack`, of levels of 2 and 3 bits.
template <class Simd> inline void unpack_nibbles(const Side& side, const uint8_t* codes, int n, uint8_t* out) {
    if constexpr (!Simd::moves_each) {
        unpack(side, codes, n, out);
    } else {
        auto by = [&](auto one, auto levels) __attribute__((always_inline)) {
            typedef decltype(one) Register;
            constexpr int kLevels = decltype(levels)::value;
            if (side.planes[1]) return unpack_levels<Register, kLevels, true>(codes, side.bytes, n, out);
            unpack_levels<Register, kLevels, false>(codes, side.bytes, n, out);
        };
        if (side.levels == 64) return by(typename Simd::Half{}, Int<64>{});
        if (side.levels == 128) return by(Simd{}, Int<128>{});
        by(Simd{}, Int<256>{});
    }
}

inline bool unpacks_nibbles(const Side& side) { return side.cell == kNibble && side.planes[0] != kNibble; }

// Levels of BITS bits, a byte each.
template <class Simd, int BITS>
__attribute__((always_inline)) inline void from_bytes(const Side& side, Place at, int key, int n, const uint8_t* level,
                                                      float* out) {
    float scales[kTileKeys];
    widen_halves<Simd>(at.scales + key, n, n, scales);
    const auto table = Simd::template wide_table<BITS>(side.centroids);
    for (int i = 0; i < n; ++i, level += side.levels, out += side.levels) {
        const typename Simd::F scale = Simd::set1(scales[i]);
        for (int j = 0; j < side.levels; j += Simd::width)
            Simd::store(out + j, Simd::mul(Simd::template lookup_bytes<BITS>(table, level + j), scale));
    }
}

// Vectors key ... key + n - 1 of a block as numbers [n, N], scales included. n <= kTileKeys; scratch `bytes` as many.
template <class Simd>
__attribute__((noinline)) void numbers_of(const Side& side, Place at, int key, int n, uint8_t* bytes, float* out) {
    const uint8_t* codes = at.codes + static_cast<int64_t>(key) * side.bytes;
    if (side.cell == kFp32) {
        std::memcpy(out, codes, static_cast<size_t>(n) * side.levels * sizeof(float));
        return;
    }
    if (side.cell == kBf16) {
        for (int i = 0; i < n * side.levels; i += Simd::width)
            Simd::store(out + i, Simd::load(reinterpret_cast<const uint16_t*>(codes) + i));
        return;
    }
    const uint8_t* level = codes;
    if (side.planes[0] != kByte) unpack(side, codes, n, bytes), level = bytes;
    const int bits = side.planes[0] + side.planes[1];
    if (bits == 5) return from_bytes<Simd, 5>(side, at, key, n, level, out);
    if (bits == 6) return from_bytes<Simd, 6>(side, at, key, n, level, out);
    from_bytes<Simd, 8>(side, at, key, n, level, out);
}

// A block's first n vectors as numbers, kTileKeys at a time: body(key, keys), of `numbers` as `numbers_of` leaves them.
template <class Simd, class Body>
inline void each_numbers(const Side& side, Place at, int n, uint8_t* bytes, float* numbers, Body body) {
    for (int key = 0; key < n; key += kTileKeys) {
        const int keys = smaller(n - key, kTileKeys);
        fetch_bytes(at.codes + static_cast<int64_t>(key + keys) * side.bytes, smaller(n - key - keys, kTileKeys) * side.bytes);
        numbers_of<Simd>(side, at, key, keys, bytes, numbers);
        body(key, keys);
    }
}

// logits[r * stride + i] = q[r] . x[i] * factor, of KEYS vectors of FP32 or BF16 numbers. The sum of a product does not depend
// on what else is here.
template <class Simd, int R, int KEYS, class Number>
__attribute__((always_inline)) inline void score_keys(const Number* x, int dim, const float* const* q, float factor,
                                                      int stride, float* logits) {
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
    for (int r = 0; r < R; ++r) {
        float* to = logits + r * stride;
        if constexpr (KEYS == 4)
            Simd::reduce_each(acc[0][r], acc[1][r], acc[2][r], acc[3][r], to);
        else
            for (int k = 0; k < KEYS; ++k) to[k] = Simd::reduce_add(acc[k][r]);
        for (int k = 0; k < KEYS; ++k) to[k] *= factor;
    }
}

// The same of any number of vectors [n, dim]: four vectors by as many rows at a time as leave the sums in registers, for
// four sums are added up at once.
template <class Simd, int R, class Number>
void score_numbers(const Number* x, int n, int dim, const float* const* q, float factor, int stride, float* logits) {
    constexpr int kRows = smaller(R, kAccumulators<Simd> / 4);
    if constexpr (R > kRows) {
        constexpr int kFirst = (R + 1) / 2;
        score_numbers<Simd, kFirst>(x, n, dim, q, factor, stride, logits);
        score_numbers<Simd, R - kFirst>(x, n, dim, q + kFirst, factor, stride, logits + kFirst * stride);
    } else {
        int key = 0;
        for (; key + 4 <= n; key += 4) score_keys<Simd, R, 4>(x + key * dim, dim, q, factor, stride, logits + key);
        for (; key < n; ++key) score_keys<Simd, R, 1>(x + key * dim, dim, q, factor, stride, logits + key);
    }
}

// COLUMNS registers of sums[r] = sums[r] * shrink[r] + weights[r] @ x, of n vectors `dim` apart.
template <class Simd, int R, int COLUMNS, class Number>
inline void mix_columns(const Number* x, int n, int dim, const float* weights, int stride, const float* shrink, float* sums) {
    typename Simd::F acc[COLUMNS][R];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[c][r] = Simd::mul(Simd::load(sums + r * dim + c * Simd::width), Simd::set1(shrink[r]));
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
template <class Simd, int R, class Number>
void mix_numbers(const Number* x, int n, int dim, const float* weights, int stride, const float* shrink, float* sums) {
    constexpr int kColumns = R * 4 <= kAccumulators<Simd> ? 4 : R * 2 <= kAccumulators<Simd> ? 2 : 1;
    for (int column = 0; column < dim; column += kColumns * Simd::width)
        mix_columns<Simd, R, kColumns>(x + column, n, dim, weights, stride, shrink, sums + column);
}

// Sums [R, n] for keys of which none is here.
template <int R> void shrink_sums(const float* shrink, int n, float* sums) {
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < n; ++i) sums[r * n + i] *= shrink[r];
}
