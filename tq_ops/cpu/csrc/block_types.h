// How each type of a GGUF file stores the numbers of a weight. A row is a sequence of groups of eight blocks of 32 numbers:
//     number i of block b = D[b] * level[b][i] - M[b]
// `levels` makes 32 of block J, as 16-bit integers in their order, 2**`shift` too large where that is not 0: it is taken off
// the sums. `scales` gives D, and M where there is one (`minimum`), of the first n blocks of a group; those of
// the others are zero, whatever lies there. Types of 256 numbers are whole groups, others end with any number of blocks.
//
// Where a block of 16 numbers has a scale of its own (Q6_K), its integer part is in the levels, which stay below 2**12.
//
// `bytes` makes the same 32 levels as unsigned bytes, less nothing: 2**`byte_shift` too large where that is not 0. Where 16
// numbers have a scale of their own (`halves`), it is not in them.

// The first n of eight scales: zero behind them, even where a NaN lies.
template <class Words> inline __attribute__((always_inline)) typename Words::F first_scales(int n, typename Words::F x) {
    return n < 8 ? Words::Floats::first(n, x, Words::Floats::zero()) : x;
}

// FP16 scales that lie BYTES apart.
template <class Words, int BYTES>
inline __attribute__((always_inline)) typename Words::F scales_apart(const uint8_t* p, int n) {
    auto four = [](const uint8_t* q) {
        uint64_t x = 0;
        for (int i = 0; i < 4; ++i) x |= static_cast<uint64_t>(read_as<uint16_t>(q + i * BYTES)) << 16 * i;
        return x;
    };
    if (n == 8) return Words::halves(four(p), four(p + 4 * BYTES));
    uint64_t x[2] = {};
    for (int i = 0; i < n; ++i) x[i / 4] |= static_cast<uint64_t>(read_as<uint16_t>(p + i * BYTES)) << i % 4 * 16;
    return Words::halves(x[0], x[1]);
}

// Blocks of their own, BYTES each.
template <class Words, int BYTES> struct SingleBlocks {
    typedef typename Words::F F;
    static constexpr int block_bytes = BYTES, group_bytes = 8 * BYTES, shift = 0, byte_shift = 0;
    static constexpr bool minimum = false, whole_groups = false, halves = false;

    static void scales(const uint8_t* group, int n, F& d, F&) { d = scales_apart<Words, BYTES>(group, n); }
};

template <class Words> struct Q8_0 : SingleBlocks<Words, 34> {
    template <int J> static void levels(const uint8_t* group, typename Words::W& a, typename Words::W& b) {
        const uint8_t* p = group + J * 34 + 2;
        a = Words::signed_bytes(p), b = Words::signed_bytes(p + 16);
    }
    static constexpr int byte_shift = 7;
    template <int J> static typename Words::I bytes(const uint8_t* group) {
        return Words::flipped(Words::load(group + J * 34 + 2), 0x80);
    }
};

// Four bits of a byte each: number i and number 16 + i.
template <class Words> inline void nibbles(const uint8_t* p, typename Words::W& a, typename Words::W& b) {
    const typename Words::W both = Words::unsigned_bytes(p);
    a = Words::of(both, 0xf), b = Words::template up<-4>(both);
}

// A minimum beside each scale, which is added.
template <class Words, int BYTES> struct WithMinimum : SingleBlocks<Words, BYTES> {
    typedef typename Words::F F;
    static constexpr bool minimum = true;
    static void scales(const uint8_t* group, int n, F& d, F& m) {
        d = scales_apart<Words, BYTES>(group, n);
        m = Words::Floats::mul(scales_apart<Words, BYTES>(group + 2, n), Words::Floats::set1(-1.0f));
    }
};

// Sixteen bytes of them at the end of each block of `Base`.
template <class Words, class Base> struct NibbleBlocks : Base {
    static constexpr int begin = Base::block_bytes - 16;
    template <int J> static void levels(const uint8_t* group, typename Words::W& a, typename Words::W& b) {
        nibbles<Words>(group + J * Base::block_bytes + begin, a, b);
    }
    template <int J> static typename Words::I bytes(const uint8_t* group) {
        return Words::byte_nibbles(group + J * Base::block_bytes + begin);
    }
};

template <class Words> struct Q4_0 : NibbleBlocks<Words, SingleBlocks<Words, 18>> {
    static constexpr int shift = 3, byte_shift = 3;
};
template <class Words> struct Q4_1 : NibbleBlocks<Words, WithMinimum<Words, 20>> {};

// The same with a fifth bit of each number, in four bytes before.
template <class Words, class Base> struct FiveBitBlocks : Base {
    static constexpr int begin = Base::block_bytes - 20;
    template <int J> static void levels(const uint8_t* group, typename Words::W& a, typename Words::W& b) {
        const uint8_t* p = group + J * Base::block_bytes + begin;
        const uint32_t fifth = read_as<uint32_t>(p);
        nibbles<Words>(p + 4, a, b);
        a = Words::sixteen_more(a, fifth & 0xffff), b = Words::sixteen_more(b, fifth >> 16);
    }
    template <int J> static typename Words::I bytes(const uint8_t* group) {
        const uint8_t* p = group + J * Base::block_bytes + begin;
        return Words::bytes_sixteen_more(Words::byte_nibbles(p + 4), read_as<uint32_t>(p));
    }
};

template <class Words> struct Q5_0 : FiveBitBlocks<Words, SingleBlocks<Words, 22>> {
    static constexpr int shift = 4, byte_shift = 4;
};
template <class Words> struct Q5_1 : FiveBitBlocks<Words, WithMinimum<Words, 24>> {};

// Levels that are looked up by four bits.
alignas(16) constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kFp4Levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

template <class Words, int BYTES, const int8_t (&LEVELS)[16]> struct LookedUpBlocks : SingleBlocks<Words, BYTES> {
    static constexpr int byte_shift = 7;
    template <int J> static void levels(const uint8_t* group, typename Words::W& a, typename Words::W& b) {
        const uint8_t* p = group + J * BYTES + BYTES - 16;
        a = Words::template looked_up<false>(LEVELS, p), b = Words::template looked_up<true>(LEVELS, p);
    }
    template <int J> static typename Words::I bytes(const uint8_t* group) {
        return Words::flipped(Words::bytes_looked_up(LEVELS, group + J * BYTES + BYTES - 16), 0x80);
    }
};

template <class Words> struct Iq4Nl : LookedUpBlocks<Words, 18, kIq4Levels> {};

// Its levels are twice the numbers of four bits, and its scales half of the powers of two that their byte names.
template <class Words> struct Mxfp4 : LookedUpBlocks<Words, 17, kFp4Levels> {
    typedef typename Words::F F;
    static void scales(const uint8_t* group, int n, F& d, F&) {
        uint64_t exponents = 0;
        for (int i = 0; i < n; ++i) exponents |= static_cast<uint64_t>(group[i * 17]) << 8 * i;
        d = first_scales<Words>(n, Words::powers(exponents));
    }
};

// 256 numbers: two FP16 numbers, and of each block six bits that each is multiplied with.
template <class Words, int BYTES> struct SuperBlocks {
    typedef typename Words::F F;
    static constexpr int block_bytes = BYTES, group_bytes = BYTES, shift = 0, byte_shift = 0;
    static constexpr bool minimum = true, whole_groups = true, halves = false;

    static void scales(const uint8_t* group, int, F& d, F& m) {
        typedef typename Words::Floats Floats;
        Words::six_bits(group + 4, d, m);
        d = Floats::mul(d, Words::half(group)), m = Floats::mul(m, Words::half(group + 2));
    }
};

// Blocks 2 i and 2 i + 1 share 32 bytes.
template <class Words, int J> inline void nibbles_of_two(const uint8_t* p, typename Words::W& a, typename Words::W& b) {
    a = Words::unsigned_bytes(p + J / 2 * 32), b = Words::unsigned_bytes(p + J / 2 * 32 + 16);
    if constexpr (J % 2)
        a = Words::template up<-4>(a), b = Words::template up<-4>(b);
    else
        a = Words::of(a, 0xf), b = Words::of(b, 0xf);
}

template <class Words, int J> inline typename Words::I bytes_of_two(const uint8_t* p) {
    return Words::bytes_of(Words::template bytes_up<J % 2 ? -4 : 0>(Words::load(p + J / 2 * 32)), 0xf);
}

template <class Words> struct Q4_K : SuperBlocks<Words, 144> {
    template <int J> static void levels(const uint8_t* group, typename Words::W& a, typename Words::W& b) {
        nibbles_of_two<Words, J>(group + 16, a, b);
    }
    template <int J> static typename Words::I bytes(const uint8_t* group) { return bytes_of_two<Words, J>(group + 16); }
};

// Bit J of byte i is the fifth one of number i of block J.
template <class Words> struct Q5_K : SuperBlocks<Words, 176> {
    template <int J> static void levels(const uint8_t* group, typename Words::W& a, typename Words::W& b) {
        auto fifth = [&](int i) { return Words::of(Words::template up<4 - J>(Words::unsigned_bytes(group + 16 + i)), 16); };
        nibbles_of_two<Words, J>(group + 48, a, b);
        a = Words::both(a, fifth(0)), b = Words::both(b, fifth(16));
    }
    template <int J> static typename Words::I bytes(const uint8_t* group) {
        const typename Words::I fifth = Words::bytes_of(Words::template bytes_up<4 - J>(Words::load(group + 16)), 16);
        return Words::either(bytes_of_two<Words, J>(group + 48), fifth);
    }
};

// Of each half of 128 numbers 64 bytes with four bits and 32 with two more, then a signed byte for each 16 numbers, and D.
template <class Words> struct Q6_K {
    typedef typename Words::W W;
    typedef typename Words::F F;
    static constexpr int block_bytes = 210, group_bytes = 210, shift = 0, byte_shift = 5;
    static constexpr bool minimum = false, whole_groups = true, halves = true;

    template <int J> static void levels(const uint8_t* group, W& a, W& b) {
        constexpr int kHalf = J / 4, kQuarter = J % 4, kUp = 4 - 2 * kQuarter;
        const uint8_t *low = group + kHalf * 64 + kQuarter % 2 * 32, *high = group + 128 + kHalf * 32;
        auto part = [&](int i) {
            const W four = Words::unsigned_bytes(low + i), two = Words::unsigned_bytes(high + i);
            const W lower = kQuarter < 2 ? Words::of(four, 0xf) : Words::template up<-4>(four);
            const W level = Words::both(lower, Words::of(Words::template up<kUp>(two), 0x30));
            return Words::times(Words::minus(level, 32), static_cast<int8_t>(group[192 + 2 * J + i / 16]));
        };
        a = part(0), b = part(16);
    }
    template <int J> static typename Words::I bytes(const uint8_t* group) {
        constexpr int kHalf = J / 4, kQuarter = J % 4;
        const typename Words::I four = Words::load(group + kHalf * 64 + kQuarter % 2 * 32),
                                two = Words::load(group + 128 + kHalf * 32);
        return Words::either(Words::bytes_of(Words::template bytes_up < kQuarter<2 ? 0 : -4>(four), 0xf),
                             Words::bytes_of(Words::template bytes_up<4 - 2 * kQuarter>(two), 0x30));
    }
    // What the first and what the last 16 numbers of each block are multiplied with.
    static void half_scales(const uint8_t* group, typename Words::I& first, typename Words::I& last) {
        Words::signed_bytes_of_two(group + 192, first, last);
    }
    static int half_scale(const uint8_t* group, int i) { return static_cast<int8_t>(group[192 + i]); }
    static void scales(const uint8_t* group, int, F& d, F&) { d = Words::half(group + 208); }
};
