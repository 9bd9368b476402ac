// Pieces that all kernels share. Each instruction set is one translation unit, which includes these headers inside its own
// unnamed namespace: the linker must not merge functions that were compiled for different instructions. For the same reason
// the headers instantiate nothing of std::.
//
// The kernels are templates over `Simd`, one register of an instruction set. It provides: width (lanes), registers, F
// (floats), I (as many 32-bit words), Table (16 floats); load, store, stream (past the caches, to a whole register's address),
// fence (after it), zero, set1, add, mul, fma, max, round, times_power_of_two, expf, round_bf16, exp_bf16 (exp(x - most),
// rounded to BF16), first(n, a, b), reduce_add, reduce_each (four of them at once, to the same bits), reduce_max; table,
// load_words, shift<N>, shift_by, lookup (by the low 4 bits of each word), wide_table, lookup_bytes, lookup_wide (by the low 5
// or 6 bits), no_words, store_words, add_reached (1 more where y reaches a boundary), interleave, low_bf16, high_bf16,
// load_halves (FP16 to FP32) and transpose. Where `moves_each` says so also Half (a register of 32 bytes), repeated (bytes at
// p again and again), down (each eight bytes moved down by bits of their own), two_bits (the lower ones of each nibble) and
// three_bits (those, and above them bit 0 of another's that were moved down).

// A compile-time number as a value, for generic lambdas.
template <int N> struct Int {
    static constexpr int value = N;
};

// Calls body(Int<0>) ... body(Int<N - 1>).
template <int N, class Body> inline __attribute__((always_inline)) void each_below(Body body) {
    if constexpr (N > 0) each_below<N - 1>(body), body(Int<N - 1>{});
}

// Calls body(Int<n>) for a number n that is known only now, 1 ... MOST.
template <int MOST, class Body> inline void with_number(int n, Body body) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_number<MOST - 1>(n, body);
    body(Int<MOST>{});
}

// Accumulators that fit in the register file beside their operands.
template <class Simd> constexpr int kAccumulators = Simd::registers - 8;

constexpr int kLine = 64;  // bytes of a cache line
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int padded(int n) { return (n + kMaxKeysTile - 1) / kMaxKeysTile * kMaxKeysTile; }

inline Place place(const Side& side, const Cache& cache, int block, int head) {
    const int64_t vector = static_cast<int64_t>(head) * cache.block_size;
    return {side.codes + block * side.codes_stride + vector * side.bytes,
            side.scales ? side.scales + block * side.scales_stride + vector : nullptr};
}

// Bytes from a vector of nibbles to the next, unpacked.
inline int64_t nibble_bytes(const Side& side) { return side.levels / 2; }

// Whether levels have a plane of nibbles, and a bit or two above them in another, whole words each.
inline bool has_planes(const Side& side) {
    return side.cell == kByte && side.planes[0] == 4 && (side.planes[1] == 1 || side.planes[1] == 2);
}

// Words that a vector of keys is read as by products that take it as it is stored, nibbles unpacked.
inline int key_words(const Side& k) { return k.cell == kNibble ? k.levels / 8 : k.bytes / 4; }

// Bytes of each of the next keys that are prefetched with V's codes; the others follow while V is mixed. Where V's codes are
// fewer than K's, each phase thus fetches what it has time for.
inline int64_t early_bytes(const Cache& cache) {
    const int64_t more = cache.k.bytes - cache.v.bytes;
    return more > 0 ? more : 0;
}

// Stretches of bytes to prefetch, an equal part of each with every turn of a loop.
struct Ahead {
    const uint8_t *next, *later;
    int64_t step, later_step;

    Ahead(const uint8_t* begin, int64_t bytes, int64_t turns, const uint8_t* later = nullptr, int64_t later_bytes = 0)
        : next(begin), later(later), step((bytes + turns - 1) / turns), later_step((later_bytes + turns - 1) / turns) {}

    void turn() {
        for (int64_t byte = 0; byte < step; byte += kLine) fetch(next + byte);
        next += step;
        for (int64_t byte = 0; byte < later_step; byte += kLine) fetch(later + byte);
        later += later_step;
    }
};

// Asks for bytes that are read soon: the hardware foresees nothing beyond a page.
inline void fetch_bytes(const void* begin, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += kLine) fetch(static_cast<const char*>(begin) + byte);
}

// The same of the scales of a block's first n vectors.
inline void fetch_scales(Place at, int n) {
    if (at.scales) fetch_bytes(at.scales, n * 2);
}

// n FP16 numbers as FP32, and zeros up to `stride`.
template <class Simd> inline void widen_halves(const uint16_t* p, int n, int stride, float* out) {
    int i = 0;
    for (; i + Simd::width <= n; i += Simd::width) Simd::store(out + i, Simd::load_halves(p + i));
    for (; i < stride; ++i) out[i] = i < n ? half_to_float(p[i]) : 0.0f;
}

// Centroids of level LEVEL of each word. The lookup ignores the upper bits, so an unaligned load replaces most shifts, which
// would compete with the multiply-adds for a port. That load reads up to 3 bytes past the last word: PAST says whether it may.
template <class Simd, int LEVEL, bool PAST>
inline typename Simd::F centroids_of(typename Simd::Table table, const void* words) {
    if constexpr (!PAST) return Simd::lookup(table, Simd::template shift<4 * LEVEL>(Simd::load_words(words)));
    return Simd::lookup(table,
                        Simd::template shift<LEVEL % 2 * 4>(Simd::load_words(static_cast<const char*>(words) + LEVEL / 2)));
}

// Keys `begin` ... `end` - 1 of a block, which a row sees; none where the end is not behind the beginning.
struct Seen {
    int begin, end;

    bool any() const { return begin < end; }
    bool all(int n) const { return begin <= 0 && end >= n; }
};

// What row r sees of n keys from `base` on.
inline Seen seen_by(const Tile& tile, int r, int base, int n) {
    return {larger(0, tile.starts[r] - base), smaller(n, tile.limits[r] - base)};
}

// Of keys i and so on, x where a row sees them.
template <class Simd>
inline __attribute__((always_inline)) typename Simd::F shown(Seen seen, int i, typename Simd::F x, typename Simd::F other) {
    return Simd::first(seen.begin - i, other, Simd::first(seen.end - i, x, other));
}

// Tokens in panels of up to `most`, as even as can be: the first `longer` ones have one token more.
struct TokenPanels {
    int64_t count, size, longer;

    TokenPanels(int64_t tokens, int64_t most)
        : count((tokens + most - 1) / most), size(count ? tokens / count : 0), longer(count ? tokens % count : 0) {}
    int64_t first_token(int64_t panel) const { return panel * size + (panel < longer ? panel : longer); }
    int tokens(int64_t panel) const { return static_cast<int>(size + (panel < longer)); }
    int64_t of_token(int64_t token) const {
        const int64_t in_longer = longer * (size + 1);
        return token < in_longer ? token / (size + 1) : longer + (token - in_longer) / size;
    }
};

// exp of a whole register, for every instruction set.
//
//   exp(x) = 2**n * exp(r),   n = round(x / ln 2),   |r| <= ln(2) / 2
//
// ln 2 is subtracted in two parts. exp(r) is 1 + r + r * r * p(r), with p of degree 4 fitted to the least relative error,
// 3e-9, so that FP32 rounding dominates: at most 7.8e-8 over 20 million numbers in [-87, 0]. Below that range the result is
// exp(-87.3), too small to change an FP32 sum near 1. A NaN stays a NaN.
template <class Simd> inline typename Simd::F exponential(typename Simd::F x) {
    x = Simd::max(Simd::set1(-87.3f), x);  // in this order a NaN in x survives
    const typename Simd::F n = Simd::round(Simd::mul(x, Simd::set1(1.44269504f)));
    typename Simd::F r = Simd::fma(n, Simd::set1(-0.693359375f), x);
    r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
    constexpr float kCoefficients[] = {8.3687175e-3f, 4.16683890e-2f, 0.166665211f, 0.49999994f, 1.0f, 1.0f};
    typename Simd::F y = Simd::set1(1.38145965e-3f);
    for (float c : kCoefficients) y = Simd::fma(y, r, Simd::set1(c));
    return Simd::times_power_of_two(y, n);
}
