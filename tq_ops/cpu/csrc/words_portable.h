// The same as words_avx2.h, in loops that a compiler may turn into whatever there is. They are functions of their own: ten
// types of weights, each unrolled, would take minutes to compile.
#define HAARKV_APART __attribute__((noinline)) static
struct WordsPortable {
    static constexpr int tokens = 1;
    static constexpr bool has_bytes = false;
    struct W {
        int16_t x[16];
    };
    struct I {
        int32_t x[8];
    };
    typedef Portable Floats;
    typedef Portable::F F;

    template <class Function> static W each(Function number) {
        W w;
        for (int i = 0; i < 16; ++i) w.x[i] = static_cast<int16_t>(number(i));
        return w;
    }
    HAARKV_APART W unsigned_bytes(const uint8_t* p) {
        return each([=](int i) { return p[i]; });
    }
    HAARKV_APART W signed_bytes(const uint8_t* p) {
        return each([=](int i) { return static_cast<int8_t>(p[i]); });
    }
    template <bool UPPER> HAARKV_APART W looked_up(const int8_t* table, const uint8_t* p) {
        return each([=](int i) { return table[UPPER ? p[i] >> 4 : p[i] & 0xf]; });
    }
    HAARKV_APART W of(const W& w, int mask) {
        return each([&](int i) { return w.x[i] & mask; });
    }
    HAARKV_APART W both(const W& a, const W& b) {
        return each([&](int i) { return a.x[i] | b.x[i]; });
    }
    template <int N> HAARKV_APART W up(const W& w) {
        return each([&](int i) { return N < 0 ? w.x[i] >> (N < 0 ? -N : 0) : w.x[i] << (N < 0 ? 0 : N); });
    }
    HAARKV_APART W minus(const W& w, int n) {
        return each([&](int i) { return w.x[i] - n; });
    }
    HAARKV_APART W times(const W& w, int n) {
        return each([&](int i) { return w.x[i] * n; });
    }
    HAARKV_APART W sixteen_more(const W& w, uint32_t bits) {
        return each([&](int i) { return w.x[i] | static_cast<int>(bits >> i & 1) << 4; });
    }
    static void store(void* p, const W& w) { std::memcpy(p, &w, sizeof w); }

    static I none() { return I{}; }
    static I load(const void* p) { return read_as<I>(p); }
    static W numbers(const void* p) { return read_as<W>(p); }
    HAARKV_APART I dot(const W& w, const W& x, I sum) {
        for (int i = 0; i < 8; ++i) sum.x[i] += w.x[2 * i] * x.x[2 * i] + w.x[2 * i + 1] * x.x[2 * i + 1];
        return sum;
    }
    template <int N> static I less_shifted(I x, const I& y) {
        for (int i = 0; i < 8; ++i) x.x[i] -= y.x[i] * (1 << N);
        return x;
    }
    HAARKV_APART I totals(const I (&x)[8]) {
        I all{};
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < 8; ++j) all.x[i] += x[i].x[j];
        return all;
    }

    static F floats(const I& x) {
        return Floats::each([&](int i) { return static_cast<float>(x.x[i]); });
    }
    static F halves(uint64_t low, uint64_t high) {
        return Floats::each([=](int i) { return half_to_float(static_cast<uint16_t>((i < 4 ? low : high) >> i % 4 * 16)); });
    }
    static F half(const uint8_t* p) { return Floats::set1(half_to_float(read_as<uint16_t>(p))); }
    static void six_bits(const uint8_t* p, F& first, F& second) {
        for (int i = 0; i < 4; ++i) {
            first[i] = static_cast<float>(p[i] & 0x3f), second[i] = static_cast<float>(p[i + 4] & 0x3f);
            first[i + 4] = static_cast<float>((p[i + 8] & 0xf) | (p[i] >> 2 & 0x30));
            second[i + 4] = static_cast<float>(p[i + 8] >> 4 | (p[i + 4] >> 2 & 0x30));
        }
    }
    static F powers(uint64_t x) {
        return Floats::each([=](int i) {
            const uint32_t e = x >> 8 * i & 0xff;
            return float_of(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        });
    }
};

struct LanesPortable {
    static constexpr int width = 8;
    typedef WordsPortable::I I;

    static I set1(int32_t x) { return {{x, x, x, x, x, x, x, x}}; }
    static I load(const void* p) { return read_as<I>(p); }
    static I dot(const I& w, const int32_t* pair, I sum) {
        int16_t rows[16], x[2];
        std::memcpy(rows, &w, sizeof rows), std::memcpy(x, pair, sizeof x);
        for (int i = 0; i < 8; ++i) sum.x[i] += rows[2 * i] * x[0] + rows[2 * i + 1] * x[1];
        return sum;
    }
    static Portable::F floats(const I& x) { return WordsPortable::floats(x); }
};
#undef HAARKV_APART
