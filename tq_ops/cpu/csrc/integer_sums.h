// Exact sums of 16-bit integers, for BF16 activations: two levels a step, the two products of a lane by one instruction.

// `vpdpwssd`: sums of products of 16-bit integers, two per 32-bit lane. `vpermw` looks up 16-bit centroids by the low bits of
// each half word and ignores the rest.
struct Vnni512 {
    typedef __m512i I;

    static I zero() { return _mm512_setzero_si512(); }
    static I load(const void* p) { return _mm512_loadu_si512(p); }
    // 32 entries, each centroid twice, so that the fifth bit of an index has no effect.
    static I table(const int16_t* integers) {
        return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(integers)));
    }
    static I lookup(I table, I x) { return _mm512_permutexvar_epi16(x, table); }
    template <int N> static I shift(I x) { return N ? _mm512_srli_epi16(x, N) : x; }
    static I upper(I x) { return _mm512_srli_epi32(x, 16); }
    // Inline assembly: with the intrinsic, compilers keep two copies of every sum in a loop and spill half of the registers.
    static I add(I a, I b, I sum) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
    static I pair(const void* p) { return _mm512_set1_epi32(read_as<int32_t>(p)); }
    static __m512 floats(I x) { return _mm512_cvtepi32_ps(x); }
    // The lower (or upper) halves of two vectors' words side by side: those of `a` below, those at `b` above. Loading from two
    // bytes before `b` moves its lower halves into the upper places; the mask keeps the load from reading there.
    static I lower_halves(I a, const uint8_t* b) { return _mm512_mask_loadu_epi16(a, 0xaaaaaaaau, b - 2); }
    static I upper_halves(I a, const uint8_t* b) { return _mm512_mask_loadu_epi16(a, 0xaaaaaaaau, b); }
};

struct IntegerSums : Vnni512 {
    typedef Avx512 Simd;
    typedef __m512i Value, Sum, Table;
    typedef int32_t Query;  // a pair of 16-bit integers
    static constexpr int levels = 2;
    static constexpr bool reads_planes = false;
    static constexpr int table_floats = 0;

    static Table table(const Side& k) { return Vnni512::table(k.integers); }
    // Levels LEVEL and LEVEL + 4 of each word.
    template <int LEVEL> static Value look_up(Table table, const uint32_t* words) {
        return lookup(table, shift<LEVEL % 2 * 4>(Vnni512::load(reinterpret_cast<const char*>(words) + LEVEL / 2)));
    }
    static Value load(const float* values) { return _mm512_load_si512(values); }
    static void store(float* values, Value x) { _mm512_store_si512(values, x); }
    static Value query(const Query* q) { return pair(q); }

    // Queries [R, steps].
    template <int R> static constexpr int row = kMaxDim / 2;
    template <int R> static constexpr int step = 1;
    template <int R> static int64_t query_floats(const Side&) { return R * row<R>; }
    template <int R> static void put_queries(const Side& k, const Tile& tile, Query* q, float* factor) {
        const float most = most_total(k.integers, k.levels, k.columns ? kIntegers : 16);
        alignas(64) int16_t whole[R][kMaxDim];
        auto put = [](__m256i x, void* to) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); };
        for (int r = 0; r < R; ++r) {
            float step;
            __m512 inverse;
            steps_of_rows<1>(tile.q[r], 0, k.levels, most, &step, &inverse);
            factor[r] = step * k.unit * tile.softmax_scale;
            for (int i = 0; i < k.levels; i += 16) {
                const __m256i x = to_halves(_mm512_loadu_ps(tile.q[r] + i), inverse);
                if (k.columns)
                    put(x, whole[r] + i);
                else  // levels j and j + 4 of a word
                    put(_mm256_unpacklo_epi16(x, _mm256_srli_si256(x, 8)), q + r * row<R> + i / 2);
            }
        }
        if (!k.columns) return;
        each_step_of_keys<2>(k, [&](const int* level) {
            for (int r = 0; r < R; ++r) {
                const auto lower = static_cast<uint16_t>(whole[r][level[0]]),
                           upper = static_cast<uint16_t>(whole[r][level[1]]);
                q[r * row<R>] = static_cast<Query>(lower | static_cast<uint32_t>(upper) << 16);
            }
            ++q;
        });
    }

    // `vpermw` ignores what lies above the lowest five bits, and tables of narrower levels repeat themselves.
    static void put_tables(const Side&, float*) {}
    struct ColumnTables {
        __m512i low[ColumnSteps<2>::most], high[ColumnSteps<2>::most];
        __m128i shift[ColumnSteps<2>::most];
        bool wide[ColumnSteps<2>::most];

        __attribute__((always_inline)) ColumnTables(const Side& k, const float*, const ColumnSteps<2>& steps) {
            for (int s = 0; s < steps.count; ++s) {
                const int bits = steps.part(s).bits;
                low[s] = Vnni512::load(k.integers + integers_begin(bits));
                wide[s] = bits > 5;
                if (wide[s]) high[s] = Vnni512::load(k.integers + integers_begin(bits) + 32);
                shift[s] = _mm_cvtsi32_si128(steps.shift(s));
            }
        }
        template <int TILES> __attribute__((always_inline)) void look_up(int step, const uint32_t* words, Value* value) const {
            const __m512i table = low[step];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; ++t) value[t] = _mm512_srl_epi16(Vnni512::load(words + t * Simd::width), shift[step]);
            if (wide[step]) {
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) value[t] = _mm512_permutex2var_epi16(table, value[t], high[step]);
            } else {
#pragma GCC unroll 4
                for (int t = 0; t < TILES; ++t) value[t] = Vnni512::lookup(table, value[t]);
            }
        }
    };
};
