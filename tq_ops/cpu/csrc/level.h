// The kernels over one instruction level `L`, which the including file defines in a namespace of its own: functions of the same
// name compiled for other instructions must not be merged by the linker. For that reason nothing of std:: is instantiated here.
//
// L provides: width, F (floats), I (as many 32-bit words), Table (16 floats); load/store/zero/set1, add, mul, fma, max, lookup
// (by the low 4 bits of each word), shift<N>, expf, round_bf16, first(n, a, b), reduce_add, reduce_max, widen_halves, transpose.

// A number known to the compiler, to be handed to a generic lambda.
template <int N> struct Int {
    static constexpr int value = N;
};

// Accumulators that leave room for operands in the register file.
template <class L> constexpr int kAccumulators = L::registers - 8;

constexpr int kLine = 64; // bytes of a cache line
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int padded(int n) { return (n + kMaxKeysTile - 1) / kMaxKeysTile * kMaxKeysTile; }

// The cache's own strides, at one block and KV head.
struct Place {
    const uint8_t* codes;
    const uint16_t* scales;
};

inline Place place(const Side& side, const Cache& cache, int block, int head) {
    const int64_t vector = static_cast<int64_t>(head) * cache.block_size;
    return {side.codes + block * side.codes_stride + vector * (cache.head_dim / 2),
            side.scales + block * side.scales_stride + vector * side.scales_per_vector};
}

inline void fetch_scales(Place at, int n) {
    for (int i = 0; i < n; i += kLine / 2) fetch(at.scales + i);
}

// Scales of n vectors to [scales_per_vector, padded] fp32, zeros behind them.
template <class L> void widen_scales(const uint16_t* scales, int per_vector, int n, int stride, float* out) {
    if (per_vector == 1) return L::widen_halves(scales, n, stride, out);
    for (int s = 0; s < per_vector; ++s)
        for (int i = 0; i < stride; ++i) out[s * stride + i] = i < n ? half_to_float(scales[i * per_vector + s]) : 0.0f;
}

// Centroids of level LEVEL of each word. A look-up reads 4 bits and minds no others, so that a load from the byte where they begin
// stands for most of the shift, which would take a port from the sums; it reads up to 3 bytes behind the last word.
template <class L, int LEVEL, bool BEHIND> inline typename L::F look_up(typename L::Table table, const void* words) {
    if constexpr (!BEHIND) return L::lookup(table, L::template shift<4 * LEVEL>(L::load_words(words)));
    return L::lookup(table, L::template shift<LEVEL % 2 * 4>(L::load_words(static_cast<const char*>(words) + LEVEL / 2)));
}

// Logits of TILES tiles of keys: the keys stand in the lanes, so nothing is summed across a register. The words were
// transposed, [word][tile][lane]; each look-up serves R rows.
template <class L, int R, int TILES>
inline void score(const uint32_t* words, int stride, int begin, int end, const float* q, typename L::Table table,
                  const float* scale, float softmax_scale, float* logits, bool add, const uint8_t* ahead) {
    typename L::F acc[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = L::zero();
    for (int j = begin; j < end; ++j) {
        const uint32_t* word = words + j * stride;
        for (int byte = 0; byte < TILES * L::width * 4; byte += kLine) fetch(ahead + j * TILES * L::width * 4 + byte);
        const float* column = q + j * 8 * R;
        auto level = [&](auto k) __attribute__((always_inline)) {
            typename L::F value[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) value[t] = look_up<L, decltype(k)::value, true>(table, word + t * L::width);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                typename L::F query = L::set1(column[decltype(k)::value * R + r]);
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) acc[t][r] = L::fma(value[t], query, acc[t][r]);
            }
        };
        level(Int<0>{}), level(Int<1>{}), level(Int<2>{}), level(Int<3>{});
        level(Int<4>{}), level(Int<5>{}), level(Int<6>{}), level(Int<7>{});
    }
    for (int t = 0; t < TILES; ++t) {
        typename L::F factor = L::mul(L::load(scale + t * L::width), L::set1(softmax_scale));
        for (int r = 0; r < R; ++r) {
            float* to = logits + r * stride + t * L::width;
            typename L::F value = L::mul(acc[t][r], factor);
            L::store(to, add ? L::add(L::load(to), value) : value);
        }
    }
}

// Logits [R, stride] of the block's first n keys; what stands behind them is not to be used. Meanwhile the codes at `ahead`, as
// many, come in from memory.
template <class L, int R>
void score_block(const Cache& cache, Place at, int n, const float* q, float softmax_scale, int stride, uint32_t* words,
                 float* scale, float* logits, const uint8_t* ahead) {
    constexpr int kTiles = R * 4 <= kAccumulators<L> ? 4 : R * 2 <= kAccumulators<L> ? 2 : 1;
    const int count = cache.head_dim / 8, segments = cache.k.scales_per_vector;
    const typename L::Table table = L::table(cache.k.centroids);
    for (int key = 0; key < n; key += L::width)
        L::transpose(at.codes + static_cast<int64_t>(key) * count * 4, count, smaller(n - key, L::width), words + key, stride);
    widen_scales<L>(at.scales, segments, n, stride, scale);
    for (int s = 0; s < segments; ++s) {
        const int begin = s * count / segments, end = (s + 1) * count / segments;
        int key = 0;
        for (; key + (kTiles - 1) * L::width < n; key += kTiles * L::width)
            score<L, R, kTiles>(words + key, stride, begin, end, q, table, scale + s * stride + key, softmax_scale, logits + key, s,
                                ahead + static_cast<int64_t>(key) * count * 4);
        for (; key < n; key += L::width)
            score<L, R, 1>(words + key, stride, begin, end, q, table, scale + s * stride + key, softmax_scale, logits + key, s,
                                ahead + static_cast<int64_t>(key) * count * 4);
    }
}

// shrink[r] = exp(before[r] - now[r]), factor[r] = exp(block[r] - now[r]), all in one register or two; 0 of a maximum of nothing.
template <class L> void exponentials(int rows, const float* before, const float* block, const float* now, float* shrink, float* factor) {
    float power[2 * kMaxRows] = {};
    for (int r = 0; r < rows; ++r) power[r] = before[r] - now[r], power[kMaxRows + r] = block[r] - now[r];
    for (int i = 0; i < 2 * kMaxRows; i += L::width) L::store(power + i, L::expf(L::load(power + i)));
    for (int r = 0; r < rows; ++r) {
        shrink[r] = before[r] == -INFINITY ? 0.0f : power[r];
        factor[r] = block[r] == -INFINITY ? 0.0f : power[kMaxRows + r];
    }
}

// Logits [R, stride] of a block of n keys, of which row r sees seen[r], to what V's vectors are weighted by, online:
// weights [segments, R, stride] = p * scale. Each row's probabilities are taken against its maximum in this block, then brought to the
// running one; shrink[r] is what earlier sums are to be multiplied by.
template <class L, int R>
void soften(const float* logits, int n, const int* seen, bool round, int stride, const float* scale, int segments,
            float* weights, float* maxima, float* totals, float* shrink) {
    using F = typename L::F;
    const F lowest = L::set1(-INFINITY);
    F most[R], sum[R];
    for (int r = 0; r < R; ++r) most[r] = lowest, sum[r] = L::zero();
    for (int i = 0; i < n; i += L::width)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) most[r] = L::max(L::first(seen[r] - i, L::load(logits + r * stride + i), lowest), most[r]);
    float block_max[R], new_max[R], factor[R];
    for (int r = 0; r < R; ++r) {
        block_max[r] = L::reduce_max(most[r]);
        new_max[r] = block_max[r] > maxima[r] ? block_max[r] : maxima[r];
    }
    exponentials<L>(R, maxima, block_max, new_max, shrink, factor);
    for (int i = 0; i < n; i += L::width)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            F value = L::expf(L::add(L::load(logits + r * stride + i), L::set1(-block_max[r])));
            if (round) value = L::round_bf16(value);
            value = L::first(seen[r] - i, value, L::zero());
            sum[r] = L::add(sum[r], value);
            value = L::mul(value, L::set1(factor[r]));
            for (int s = 0; s < segments; ++s)
                L::store(weights + (s * R + r) * stride + i, L::mul(value, L::load(scale + s * stride + i)));
        }
    for (int r = 0; r < R; ++r) {
        totals[r] = totals[r] * shrink[r] + L::reduce_add(sum[r]) * factor[r];
        maxima[r] = new_max[r];
    }
}

// sums[r] = sums[r] * shrink[r] + weights[r] @ values of n vectors, for PLANES of the eight levels a word, words [0, width) of a vector.
template <class L, int R, int FIRST, int PLANES>
inline void mix(const uint8_t* codes, int64_t bytes, int n, const float* weights, int stride, typename L::Table table,
                const float* shrink, float* sums, int words, int head_dim, const uint8_t* ahead) {
    typename L::F acc[PLANES][R];
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r)
            acc[k][r] = L::mul(L::load(sums + r * head_dim + (FIRST + k) * words), L::set1(shrink[r]));
    auto add = [&](int key, auto behind) __attribute__((always_inline)) {
        constexpr bool kBehind = decltype(behind)::value;
        if constexpr (FIRST == 0) fetch(ahead + key * bytes);
        typename L::F value[PLANES];
        auto expand = [&](auto k) __attribute__((always_inline)) {
            constexpr int kPlane = decltype(k)::value;
            if constexpr (kPlane < PLANES)
                value[kPlane] = look_up<L, FIRST + kPlane, kBehind>(table, codes + key * bytes);
        };
        expand(Int<0>{}), expand(Int<1>{}), expand(Int<2>{}), expand(Int<3>{});
        expand(Int<4>{}), expand(Int<5>{}), expand(Int<6>{}), expand(Int<7>{});
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename L::F weight = L::set1(weights[r * stride + key]);
#pragma GCC unroll 8
            for (int k = 0; k < PLANES; ++k) acc[k][r] = L::fma(value[k], weight, acc[k][r]);
        }
    };
    for (int key = 0; key + 1 < n; ++key) add(key, Int<true>{});
    add(n - 1, Int<false>{}); // behind the last vector the cache may end
    for (int k = 0; k < PLANES; ++k)
        for (int r = 0; r < R; ++r) L::store(sums + r * head_dim + (FIRST + k) * words, acc[k][r]);
}

template <class L, int R>
void mix_block(const Cache& cache, Place at, int n, const float* weights, int stride, const float* shrink, float* sums,
               const uint8_t* ahead) {
    constexpr int kPlanes = R * 8 <= kAccumulators<L> ? 8 : R * 4 <= kAccumulators<L> ? 4 : R * 2 <= kAccumulators<L> ? 2 : 1;
    const int words = cache.head_dim / 8, segments = cache.v.scales_per_vector;
    const typename L::Table table = L::table(cache.v.centroids);
    for (int word = 0; word < words; word += L::width) {
        const float* own = weights + word * segments / words * R * stride;
        auto pass = [&](auto first) __attribute__((always_inline)) {
            if constexpr (decltype(first)::value % kPlanes == 0)
                mix<L, R, decltype(first)::value, kPlanes>(at.codes + word * 4, words * 4, n, own, stride, table, shrink,
                                                           sums + word, words, cache.head_dim, ahead + word * 4);
        };
        pass(Int<0>{}), pass(Int<1>{}), pass(Int<2>{}), pass(Int<3>{});
        pass(Int<4>{}), pass(Int<5>{}), pass(Int<6>{}), pass(Int<7>{});
    }
}

// Q.K and P.V of R rows in FP32.
template <class L, class Narrow, int R> struct FloatProducts {
    const Cache& cache;
    const int stride; // of keys in scratch
    float* const q;   // [D, R]

    static int64_t floats(const Cache& cache) { return R * cache.head_dim; }

    FloatProducts(const Cache& cache, const Tile& tile, int stride, float* scratch) : cache(cache), stride(stride), q(scratch) {
        for (int r = 0; r < R; ++r)
            for (int d = 0; d < cache.head_dim; ++d) q[d * R + r] = tile.q[r][d];
    }

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits, const uint8_t* ahead) const {
        score_block<L, R>(cache, at, n, q, softmax_scale, stride, words, scale, logits, ahead);
    }

    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        if (cache.head_dim / 8 % L::width == 0)
            mix_block<L, R>(cache, at, n, weights, stride, shrink, sums, ahead);
        else
            mix_block<Narrow, R>(cache, at, n, weights, stride, shrink, sums, ahead);
    }
};

// Floats of scratch that `attend` needs with the products `P`.
template <template <int> class P> int64_t scratch_floats(const Cache& cache) {
    const int64_t stride = padded(cache.block_size);
    // Transposed words, logits, K's scales, V's scales, weights; what the products keep.
    return stride * (cache.head_dim / 8) + kMaxRows * stride +
           stride * (cache.k.scales_per_vector + cache.v.scales_per_vector * (1 + kMaxRows)) + P<kMaxRows>::floats(cache) + 16;
}

template <class L, class P, int R> void attend_rows(const Cache& cache, const Tile& tile, float* scratch) {
    const int stride = padded(cache.block_size), dim = cache.head_dim, segments = cache.v.scales_per_vector;
    uint32_t* words = reinterpret_cast<uint32_t*>(scratch);
    float* p = scratch + stride * (dim / 8);
    float* k_scale = p + R * stride;
    float* v_scale = k_scale + stride * cache.k.scales_per_vector;
    float* weights = v_scale + stride * segments;
    const P products(cache, tile, stride, weights + R * stride * segments);
    for (int r = 0; r < R; ++r) {
        for (int d = 0; d < dim; ++d) tile.sums[r * dim + d] = 0.0f;
        tile.maxima[r] = -INFINITY, tile.totals[r] = 0.0f;
    }
    int longest = 0;
    for (int r = 0; r < R; ++r) longest = tile.limits[r] > longest ? tile.limits[r] : longest;
    for (int block = tile.first_block; block < tile.end_block; ++block) {
        const int base = block * cache.block_size, n = smaller(cache.block_size, longest - base);
        if (n <= 0) break;
        const Place k = place(cache.k, cache, tile.block_table[block], tile.kv_head);
        const Place v = place(cache.v, cache, tile.block_table[block], tile.kv_head);
        // The next keys are fetched while these values are mixed, the values while the keys are scored: a block's codes lie
        // apart from the next one's, where the processor does not see them coming.
        const int next = block + 1 < tile.end_block ? block + 1 : block;
        const Place next_k = place(cache.k, cache, tile.block_table[next], tile.kv_head);
        fetch_scales(v, segments * n);
        products.score(k, n, tile.softmax_scale, words, k_scale, p, v.codes);
        widen_scales<L>(v.scales, segments, n, stride, v_scale);
        int seen[R];
        float shrink[R];
        for (int r = 0; r < R; ++r) seen[r] = smaller(n, tile.limits[r] - base);
        soften<L, R>(p, n, seen, tile.bf16, stride, v_scale, segments, weights, tile.maxima, tile.totals, shrink);
        fetch_scales(next_k, cache.k.scales_per_vector * n);
        products.mix(v, n, weights, shrink, tile.sums, next_k.codes);
    }
}

template <class L, template <int> class P> void attend(const Cache& cache, const Tile& tile, float* scratch) {
    switch (tile.rows) {
        case 1: return attend_rows<L, P<1>, 1>(cache, tile, scratch);
        case 2: return attend_rows<L, P<2>, 2>(cache, tile, scratch);
        case 3: return attend_rows<L, P<3>, 3>(cache, tile, scratch);
        case 4: return attend_rows<L, P<4>, 4>(cache, tile, scratch);
        case 5: return attend_rows<L, P<5>, 5>(cache, tile, scratch);
        case 6: return attend_rows<L, P<6>, 6>(cache, tile, scratch);
        case 7: return attend_rows<L, P<7>, 7>(cache, tile, scratch);
        default: return attend_rows<L, P<8>, 8>(cache, tile, scratch);
    }
}
