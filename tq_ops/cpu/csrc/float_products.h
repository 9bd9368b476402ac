// Q.K of nibbles, of levels of 5 and 6 bits and of several widths, and P.V of the first two, in FP32: the products of R rows,
// as `attend_rows` and passes call them.

template <class Simd, class Narrow, int R> struct FloatProducts {
    const Cache& cache;
    const int stride;       // keys of a row in scratch
    float* const q;         // [k.levels, R]
    float* const repeated;  // `repeat_centroids`
    uint8_t* const spaced;  // [stride, 4 * Narrow::width], vectors shorter than a narrow register, and a word past them
    const float* taken;     // by `weigh`

    // Whether these products take a side's keys as they are stored.
    static bool scores(const Side& k) { return k.cell == kNibble || k.cell == kMixed || has_planes(k); }

    // Likewise a side's values, whole registers of which are looked up.
    static bool mixes(const Side& v) { return v.cell == kNibble || in_planes(v); }

    static int64_t floats(const Cache& cache) {
        return R * cache.k.levels + 4 * kRepeated +
               (is_short(cache) ? padded(cache.block_size) * Narrow::width + kLine / 4 : 0);
    }

    FloatProducts(const Cache& cache, const Tile& tile, int stride, float* scratch)
        : cache(cache),
          stride(stride),
          q(scratch),
          repeated(q + R * cache.k.levels),
          spaced(reinterpret_cast<uint8_t*>(repeated + 4 * kRepeated)) {
        if (!scores(cache.k)) return;
        float* to = q;
        auto put = [&](int level) {
            for (int r = 0; r < R; ++r) *to++ = tile.q[r][level];
        };
        if (cache.k.columns) {
            repeat_centroids(cache.k, repeated);
            each_level_in_steps(cache.k, put);
        } else if (has_planes(cache.k)) {
            each_level_of_planes(cache.k, put);
        } else {
            for (int level = 0; level < cache.k.levels; ++level) put(level);
        }
    }

    void score(Place at, int n, float softmax_scale, uint32_t* words, float* scale, float* logits, const uint8_t* ahead,
               const uint8_t* later) const {
        score_block<Simd, R>(cache, at, n, q, repeated, softmax_scale, stride, words, scale, logits, ahead, later);
    }

    // Adds n vectors to the sums, and prefetches K's codes of as many at `ahead`. Each register prefetches its share.
    void mix(Place at, int n, const float* weights, const float* shrink, float* sums, const uint8_t* ahead) const {
        const int words = cache.v.levels / 8;
        const int64_t total = n * (cache.k.bytes - early_bytes(cache));
        int64_t bytes = nibble_bytes(cache.v);
        if (cache.v.cell == kNibble && is_short(cache)) bytes = put_apart(at.codes, n), at.codes = spaced;
        ahead += n * early_bytes(cache);
        units(words, [&](auto unit, int word) __attribute__((always_inline)) {
            typedef decltype(unit) U;
            const int64_t begin = total * (word + unit.first) / words, end = total * (word + unit.last) / words;
            const Ahead share(ahead + begin, end - begin, n);
            auto add = [&](const auto& values) __attribute__((always_inline)) {
                haarkv::mix<R>(unit, values, n, weights, stride, shrink, sums + word, words, share);
            };
            if (with_planes<U>(cache.v, at.codes, word, add)) return;
            add(CodesOfValues<U>{at.codes + word * 4, bytes, U::Simd::table(cache.v.centroids)});
        });
    }

    // Puts the sums of all values in the order of the format's levels.
    void order(float* sums) const {
        if (in_planes(cache.v)) order_levels<R>(cache.v.levels, sums);
    }

    // -- In a pass: what its tiles share is looked up to `found`.

    static constexpr int kKeysTogether = kSlabKeys, kValuesTogether = 64;

    static int64_t found_floats(const Cache& cache) {
        return larger(cache.k.levels * kKeysTogether, kValuesTogether * 8 * Simd::width);
    }

    // Centroids of up to kKeysTogether keys.
    static void look_up_keys(const Cache& cache, const uint8_t* codes, int n, uint32_t* words, float* found) {
        const int count = key_words(cache.k);
        for (int i = 0; i < n; i += Simd::width)
            Simd::transpose(codes + i * count * 4, count, smaller(n - i, Simd::width), words + i, kSlabKeys);
        constexpr int kTiles = kSlabKeys / Simd::width;
        auto put = [&](const typename Simd::F* value) {
            for (int t = 0; t < kTiles; ++t, found += Simd::width) Simd::store(found, value[t]);
        };
        if (cache.k.columns) {
            float tables[4 * kRepeated];
            repeat_centroids(cache.k, tables);
            return each_step<Simd, kTiles>(cache.k, tables, words, kSlabKeys, put);
        }
        if (!has_planes(cache.k)) return look_up_words<Simd>({words, kSlabKeys, Simd::table(cache.k.centroids)}, count, found);
        if (cache.k.planes[1] == 1) return each_plane_step<Simd, kTiles, 1>(cache.k, words, kSlabKeys, put);
        each_plane_step<Simd, kTiles, 2>(cache.k, words, kSlabKeys, put);
    }

    // Logits of those keys.
    void score_found(const float* found, int n, float softmax_scale, const float* scale, float* logits) const {
        constexpr int kTiles = R * 2 <= kAccumulators<Simd> ? 2 : 1;
        const int count = cache.k.levels / 8;
        auto tiles = [&](auto number, int key) __attribute__((always_inline)) {
            haarkv::score<Simd, R, decltype(number)::value>(FoundKeys<Simd>{found + key}, stride, count, q, scale + key,
                                                            softmax_scale, logits + key, Ahead(nullptr, 0, 1));
        };
        int key = 0;
        for (; key + (kTiles - 1) * Simd::width < n; key += kTiles * Simd::width) tiles(Int<kTiles>{}, key);
        for (; key < n; key += Simd::width) tiles(Int<1>{}, key);
    }

    // Calls body(unit, word) for what is looked up of so many words of values at a time.
    template <class Body> __attribute__((always_inline)) static void units(int words, Body body) {
        each_unit<R, Simd, Narrow>(words, body);
    }

    // A unit's centroids of up to kValuesTogether values.
    template <class U> static void look_up_values(U, const Cache& cache, const uint8_t* codes, int word, int n, float* found) {
        typedef typename U::Simd Register;
        const typename Register::Table table = Register::table(cache.v.centroids);
        const int64_t bytes = nibble_bytes(cache.v);
        auto store = [&](int key, const typename Register::F* value) __attribute__((always_inline)) {
            for (int k = 0; k < U::kPlanes; ++k) Register::store(found + (key * U::kPlanes + k) * Register::width, value[k]);
        };
        auto each = [&](const auto& values) __attribute__((always_inline)) {
            typename Register::F value[U::kPlanes];
            for (int key = 0; key < n; ++key) values.template at<true>(key, value), store(key, value);
        };
        if (with_planes<U>(cache.v, codes, word, each)) return;
        codes += word * 4;
        auto put = [&](int key, const CodesOfValues<U>& of, auto past) __attribute__((always_inline)) {
            typename Register::F value[U::kPlanes];
            of.template at<decltype(past)::value>(0, value);
            store(key, value);
        };
        for (int key = 0; key < n; ++key, codes += bytes) {
            if (is_short(cache)) {
                uint8_t vector[4 * Narrow::width + kLine] = {};
                std::memcpy(vector, codes, bytes);
                put(key, {vector, 0, table}, Int<true>{});
            } else if (key + 1 < n) {
                put(key, {codes, 0, table}, Int<true>{});
            } else {
                put(key, {codes, 0, table}, Int<false>{});
            }
        }
    }

    // Takes the weights of up to kValuesTogether values.
    void weigh(const float* weights, int) { taken = weights; }

    // Adds a unit's sums of the n values whose weights were taken.
    template <class U> void mix_shared(U unit, const float* found, int n, const float* shrink, float* sums) const {
        haarkv::mix<R>(unit, FoundValues<U>{found}, n, taken, stride, shrink, sums, cache.v.levels / 8, Ahead(nullptr, 0, 1));
    }

  private:
    static bool in_planes(const Side& v) { return Simd::looks_up_64 && has_planes(v) && v.levels / 8 % Simd::width == 0; }

    // Calls body(values) of a unit whose levels lie in planes; whether they do.
    template <class U, class Body>
    __attribute__((always_inline)) static bool with_planes(const Side& v, const uint8_t* codes, int word, Body body) {
        if constexpr (U::Simd::looks_up_64) {
            if (!in_planes(v)) return false;
            const Above above(v);
            if (v.planes[1] == 1)
                body(PlanesOfValues<U, 1>(v, above, codes, word));
            else
                body(PlanesOfValues<U, 2>(v, above, codes, word));
            return true;
        }
        return false;
    }

    static bool is_short(const Cache& cache) { return cache.v.levels / 8 < Narrow::width; }

    // Copies vectors to `spaced`; bytes from one to the next.
    int64_t put_apart(const uint8_t* codes, int n) const {
        constexpr int64_t kBytes = 4 * Narrow::width;
        const int64_t bytes = nibble_bytes(cache.v);
        for (int key = 0; key < n; ++key) std::memcpy(spaced + key * kBytes, codes + key * bytes, bytes);
        return kBytes;
    }
};
