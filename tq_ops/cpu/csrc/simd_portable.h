// Eight lanes in the compiler's own vector types, for any machine.
struct Portable {
    static constexpr int width = 8, registers = 16;
    static constexpr bool moves_each = false;
    static constexpr bool looks_up_64 = false;  // in registers
    typedef float F __attribute__((vector_size(32)));
    typedef uint32_t I __attribute__((vector_size(32)));
    struct Table {
        float value[16];
    };

    // number(i) in each lane i.
    template <class Number> static F each(Number number) {
        F x;
        for (int i = 0; i < width; ++i) x[i] = number(i);
        return x;
    }
    static F load(const float* p) { return read_as<F>(p); }
    static F load(const uint16_t* bf16) {
        return each([=](int i) { return bf16_to_float(bf16[i]); });
    }
    static F load_halves(const uint16_t* p) {
        return each([=](int i) { return half_to_float(p[i]); });
    }
    static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
    static void stream(float* p, F x) { store(p, x); }
    static void fence() {}
    static F set1(float x) { return F{x, x, x, x, x, x, x, x}; }
    static F zero() { return set1(0.0f); }
    static F add(F a, F b) { return a + b; }
    static F mul(F a, F b) { return a * b; }
    static F fma(F a, F b, F c) { return a * b + c; }
    // As x86 does: b if either is a NaN.
    static F max(F a, F b) {
        return each([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
    }
    static F round(F x) {
        const F magic = set1(12582912.0f);  // 1.5 * 2**23: the sum has no bits for a fraction
        return (x + magic) - magic;
    }
    static F times_power_of_two(F x, F n) {
        return each([&](int i) {
            // For a NaN n is no integer; x is a NaN too, and so is the product.
            const int exponent = n[i] == n[i] ? static_cast<int>(n[i]) : 0;
            return x[i] * float_of(static_cast<uint32_t>(exponent + 127) << 23);
        });
    }
    static F expf(F x) { return exponential<Portable>(x); }
    static F exp_bf16(F x, float most) { return round_bf16(expf(add(x, set1(-most)))); }
    static F round_bf16(F x) {
        const I u = reinterpret_cast<I>(x);
        return reinterpret_cast<F>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
    }
    static F first(int n, F a, F b) {
        return each([&](int i) { return i < n ? a[i] : b[i]; });
    }
    static float reduce_add(F x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
    static void reduce_each(F a, F b, F c, F d, float* out) {
        out[0] = reduce_add(a), out[1] = reduce_add(b), out[2] = reduce_add(c), out[3] = reduce_add(d);
    }
    static float reduce_max(F x) {
        float m = x[0];
        for (int i = 1; i < 8; ++i) m = m > x[i] ? m : x[i];
        return m;
    }

    static Table table(const float* centroids) { return read_as<Table>(centroids); }
    static I load_words(const void* p) { return read_as<I>(p); }
    template <int N> static I shift(I x) { return x >> N; }
    static I shift_by(I x, int bits) { return x >> bits; }
    static I shift_up_by(I x, int bits) { return x << bits; }
    static I join_nibbles(I lower, I upper) { return (lower & 0x0f0f0f0fu) | (upper & 0xf0f0f0f0u); }
    static F lookup(const Table& t, I x) {
        return each([&](int i) { return t.value[x[i] & 15u]; });
    }
    // Numbers by levels of BITS bits, a byte each.
    template <int BITS> static const float* wide_table(const float* centroids) { return centroids; }
    template <int BITS> static F lookup_bytes(const float* table, const uint8_t* level) {
        return each([=](int i) { return table[level[i]]; });
    }
    // By the lowest BITS bits.
    template <int BITS> static F lookup_wide(const float* table, I x) {
        return each([&](int i) { return table[x[i] & ((1u << BITS) - 1u)]; });
    }
    static void store_words(int32_t* p, I x) { std::memcpy(p, &x, sizeof x); }
    static I no_words() { return I{}; }
    static I add_reached(I n, F y, F boundary) {
        for (int i = 0; i < 8; ++i) n[i] += y[i] >= boundary[i];
        return n;
    }
    static void interleave(F even, F odd, F* first, F* second) {
        for (int i = 0; i < 4; ++i) {
            (*first)[2 * i] = even[i], (*first)[2 * i + 1] = odd[i];
            (*second)[2 * i] = even[4 + i], (*second)[2 * i + 1] = odd[4 + i];
        }
    }
    static F low_bf16(I x) { return reinterpret_cast<F>(x << 16); }
    static F high_bf16(I x) { return reinterpret_cast<F>(x & 0xffff0000u); }
    // Transposes words of up to `width` keys, [key][word] to [word][key]; the last key fills the lanes after it.
    static void transpose(const uint8_t* codes, int words, int keys, uint32_t* out, int stride) {
        for (int i = 0; i < width; ++i)
            for (int j = 0; j < words; ++j)
                std::memcpy(out + j * stride + i, codes + (smaller(i, keys - 1) * words + j) * 4, 4);
    }
};
