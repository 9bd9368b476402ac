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

    static F load(const float* p) {
        F x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static F load(const uint16_t* bf16) {
        F x;
        for (int i = 0; i < width; ++i) x[i] = bf16_to_float(bf16[i]);
        return x;
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
        F m;
        for (int i = 0; i < 8; ++i) m[i] = a[i] > b[i] ? a[i] : b[i];
        return m;
    }
    static F round(F x) {
        const F magic = set1(12582912.0f);  // 1.5 * 2**23: the sum has no bits for a fraction
        return (x + magic) - magic;
    }
    static F times_power_of_two(F x, F n) {
        F y;
        for (int i = 0; i < 8; ++i) {
            // For a NaN n is no integer; x is a NaN too, and so is the product.
            const int exponent = n[i] == n[i] ? static_cast<int>(n[i]) : 0;
            y[i] = x[i] * float_of(static_cast<uint32_t>(exponent + 127) << 23);
        }
        return y;
    }
    static F expf(F x) { return exponential<Portable>(x); }
    static F exp_bf16(F x, float most) { return round_bf16(expf(add(x, set1(-most)))); }
    static F round_bf16(F x) {
        I u;
        std::memcpy(&u, &x, sizeof u);
        u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        std::memcpy(&x, &u, sizeof x);
        return x;
    }
    static F first(int n, F a, F b) {
        for (int i = 0; i < 8; ++i)
            if (i >= n) a[i] = b[i];
        return a;
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

    static Table table(const float* centroids) {
        Table t;
        std::memcpy(&t, centroids, sizeof t);
        return t;
    }
    static I load_words(const void* p) {
        I x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    template <int N> static I shift(I x) { return x >> N; }
    static I shift_by(I x, int bits) { return x >> bits; }
    static I shift_up_by(I x, int bits) { return x << bits; }
    static I join_nibbles(I lower, I upper) { return (lower & 0x0f0f0f0fu) | (upper & 0xf0f0f0f0u); }
    static F lookup(const Table& t, I x) {
        F y;
        for (int i = 0; i < 8; ++i) y[i] = t.value[x[i] & 15u];
        return y;
    }
    // Numbers by levels of BITS bits, a byte each.
    template <int BITS> static const float* wide_table(const float* centroids) { return centroids; }
    template <int BITS> static F lookup_bytes(const float* table, const uint8_t* level) {
        F y;
        for (int i = 0; i < 8; ++i) y[i] = table[level[i]];
        return y;
    }
    // By the lowest BITS bits.
    template <int BITS> static F lookup_wide(const float* table, I x) {
        F y;
        for (int i = 0; i < 8; ++i) y[i] = table[x[i] & ((1u << BITS) - 1u)];
        return y;
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
    static F low_bf16(I x) {
        x <<= 16;
        F y;
        std::memcpy(&y, &x, sizeof y);
        return y;
    }
    static F high_bf16(I x) {
        x &= 0xffff0000u;
        F y;
        std::memcpy(&y, &x, sizeof y);
        return y;
    }
    static void widen_halves(const uint16_t* p, int n, int stride, float* out) {
        for (int i = 0; i < stride; ++i) out[i] = i < n ? half_to_float(p[i]) : 0.0f;
    }
    // Transposes words of up to `width` keys, [key][word] to [word][key]; the last key fills the lanes after it.
    static void transpose(const uint8_t* codes, int words, int keys, uint32_t* out, int stride) {
        for (int i = 0; i < width; ++i)
            for (int j = 0; j < words; ++j)
                std::memcpy(out + j * stride + i, codes + (smaller(i, keys - 1) * words + j) * 4, 4);
    }
};
