// Projections on tiles: `tdpbf16ps` multiplies 16 rows of the weight, as they lie in memory, by 32 inputs of 16 tokens.
//
// In each number of the result it adds 16 products of even inputs, each with one rounding, and 16 of odd inputs likewise; the
// two sums are added, and then added to what was there before. It takes numbers below 2^-126 for zero and makes none. That is
// one order whatever tokens and rows share the tiles. Where a sum is set aside between two stretches of inputs it loses
// nothing.

constexpr int64_t kSide = 16;            // rows or columns of a tile
constexpr int kInputs = 32;              // inputs that one instruction takes
constexpr int64_t kInputsAtOnce = 1024;  // inputs at a time where tokens are many, so that their x stays in the L2 cache
constexpr int64_t kAhead = 256;          // inputs that a row is fetched ahead where tokens are few

inline int64_t whole_tiles(int64_t in) { return (in + kInputs - 1) / kInputs * kInputs; }

// Sixteen vectors of sixteen 32-bit words, transposed.
inline void transpose(const void* from, uint32_t* to) {
    Avx512::transpose(static_cast<const uint8_t*>(from), kSide, kSide, to, kSide);
}

// x as tiles hold it: for each 16 tokens, or fewer at the end, and each 32 inputs [16 pairs of inputs, tokens] words.
inline uint32_t* tokens_at(const Projection& p, int64_t token) {
    return static_cast<uint32_t*>(p.prepared) + token * (whole_tiles(p.in) / 2);
}

inline void prepare_tiles(const Projection& p, int64_t begin, int64_t end) {
    const uint16_t* x = static_cast<const uint16_t*>(p.x);
    for (int64_t token = begin; token < end; token += kSide) {
        const int64_t n = smaller(kSide, end - token);
        uint32_t* to = tokens_at(p, token);
        for (int64_t i = 0; i < p.in; i += kInputs, to += kSide * n) {
            const __mmask32 there = p.in - i < kInputs ? (1u << (p.in - i)) - 1u : 0xffffffffu;
            auto inputs = [&](int64_t t) { return _mm512_maskz_loadu_epi16(there, x + (token + t) * p.in + i); };
            if (n == 1) {
                _mm512_storeu_si512(to, inputs(0));
                continue;
            }
            alignas(64) uint32_t words[kSide][kSide], turned[kSide][kSide];
            for (int t = 0; t < kSide; ++t) _mm512_store_si512(words[t], t < n ? inputs(t) : _mm512_setzero_si512());
            transpose(words, *turned);
            for (int pair = 0; pair < kSide; ++pair) std::memcpy(to + pair * n, turned[pair], n * sizeof(uint32_t));
        }
    }
}

// Up to 32 rows by up to 32 tokens in four tiles of sums: the second 16 rows are in the odd ones, the second 16 tokens in the
// last two. Tiles 4 and 5 hold rows, 6 and 7 tokens.
struct Block {
    const uint16_t* weight;     // the first row
    const uint32_t* tokens[2];  // of each 16 tokens
    int64_t in;
    int rows[2], columns[2];  // of the tiles; 0 where there is none

    // Calls body(Int<tile>, rows, columns) for the tiles of sums.
    template <class Body> void each_sum(Body body) const {
        each_below<4>([&](auto tile) {
            constexpr int kRows = decltype(tile)::value % 2, kColumns = decltype(tile)::value / 2;
            if (rows[kRows] && columns[kColumns]) body(tile, rows[kRows], columns[kColumns]);
        });
    }
};

// Rows or columns of a tile where n are left.
inline int tile_side(int64_t n) { return static_cast<int>(larger(int64_t{0}, smaller(kSide, n))); }

inline TileShapes shapes_of(const Block& b) {
    TileShapes shapes;
    for (int i = 0; i < 2; ++i) {
        shapes.set(4 + i, b.rows[i], b.rows[i] ? 4 * kSide : 0);
        shapes.set(6 + i, b.columns[i] ? kSide : 0, 4 * b.columns[i]);
    }
    b.each_sum([&](auto tile, int rows, int columns) { shapes.set(decltype(tile)::value, rows, 4 * columns); });
    return shapes;
}

// One step: 32 inputs of rows that lie `distance` bytes apart.
template <bool ROWS, bool TOKENS> inline void multiply(const Block& b, const uint16_t* rows, int64_t distance, int64_t i) {
    load_rows<6>(b.tokens[0] + i / 2 * b.columns[0], 4 * b.columns[0]);
    load_rows<4>(rows, distance);
    add_bf16_products<0, 4, 6>();
    if constexpr (ROWS) {
        load_rows<5>(reinterpret_cast<const char*>(rows) + kSide * distance, distance);
        add_bf16_products<1, 5, 6>();
    }
    if constexpr (TOKENS) {
        load_rows<7>(b.tokens[1] + i / 2 * b.columns[1], 4 * b.columns[1]);
        add_bf16_products<2, 4, 7>();
        if constexpr (ROWS) add_bf16_products<3, 5, 7>();
    }
}

// Which lines of the weight are fetched from memory beside each step.
enum class Fetch {
    kNone,
    kAlong,  // the same rows' kAhead inputs later; where they end, those of the next block
    kBelow,  // the next block's, of the same inputs
};

// Inputs begin ... end - 1.
template <bool ROWS, bool TOKENS, Fetch AHEAD> void multiply_stretch(const Block& b, int64_t begin, int64_t end) {
    constexpr int kRows = ROWS ? 2 * kSide : kSide;
    const int64_t whole = end / kInputs * kInputs;
    for (int64_t i = begin; i < whole; i += kInputs) {
        if constexpr (AHEAD != Fetch::kNone) {
            const int64_t along = i + kAhead, below = AHEAD == Fetch::kBelow ? i : along - b.in;
            const int64_t next = AHEAD == Fetch::kAlong && along < b.in ? along : below + kRows * b.in;
            for (int r = 0; r < kRows; ++r) fetch(b.weight + r * b.in + next);
        }
        multiply<ROWS, TOKENS>(b, b.weight + i, 2 * b.in, i);
    }
    if (whole == end) return;
    alignas(64) uint16_t last[2 * kSide * kInputs] = {};
    for (int r = 0; r < b.rows[0] + b.rows[1]; ++r)
        std::memcpy(last + r * kInputs, b.weight + r * b.in + whole, (end - whole) * sizeof(uint16_t));
    multiply<ROWS, TOKENS>(b, last, 2 * kInputs, whole);
}

// Sums [rows, columns] of a tile to y [tokens, out].
inline void put_sums(const float* sums, int rows, int columns, int64_t out, float* y) {
    alignas(64) uint32_t turned[kSide][kSide];
    transpose(sums, *turned);
    for (int t = 0; t < columns; ++t) std::memcpy(y + t * out, turned[t], rows * sizeof(float));
}

template <Fetch AHEAD> void multiply_stretch(const Block& b, int64_t begin, int64_t end) {
    if (b.rows[1] && b.columns[1]) return multiply_stretch<true, true, AHEAD>(b, begin, end);
    if (b.rows[1]) return multiply_stretch<true, false, AHEAD>(b, begin, end);
    if (b.columns[1]) return multiply_stretch<false, true, AHEAD>(b, begin, end);
    multiply_stretch<false, false, AHEAD>(b, begin, end);
}

// All tokens by rows begin ... end - 1. `aside` has room for [rows, tokens] sums, both rounded up to 32.
inline void project_tiles(const Projection& p, int64_t begin, int64_t end, float* aside) {
    const bool few = p.tokens <= kSide;
    const int64_t rows = few ? kSide : 2 * kSide, stretch = few ? whole_tiles(p.in) : kInputsAtOnce;
    alignas(64) float sums[4 * kSide * kSide];
    Tiles tiles;
    for (int64_t first = 0; first < p.in; first += stretch) {
        const int64_t last = smaller(p.in, first + stretch);
        float* kept = aside;
        for (int64_t token = 0; token < p.tokens; token += 2 * kSide)
            for (int64_t row = begin; row < end; row += rows, kept += 4 * kSide * kSide) {
                Block b;
                b.weight = static_cast<const uint16_t*>(p.weight.data) + row * p.in, b.in = p.in;
                for (int i = 0; i < 2; ++i) {
                    b.rows[i] = tile_side(smaller(end, row + rows) - row - i * kSide);
                    b.columns[i] = tile_side(p.tokens - token - i * kSide);
                    b.tokens[i] = b.columns[i] ? tokens_at(p, token + i * kSide) : nullptr;
                }
                tiles.shape(shapes_of(b));
                b.each_sum([&](auto tile, int, int) {
                    constexpr int T = decltype(tile)::value;
                    first ? load_rows<T>(kept + T * kSide * kSide, kChunk) : zero_tile<T>();
                });
                if (few)
                    multiply_stretch<Fetch::kAlong>(b, first, last);
                else if (token == 0)
                    multiply_stretch<Fetch::kBelow>(b, first, last);
                else
                    multiply_stretch<Fetch::kNone>(b, first, last);
                if (p.tokens == 1) {  // its sums lie in y as they do in the tile
                    _tile_stored(0, p.y + row, sizeof(float));
                    continue;
                }
                b.each_sum([&](auto tile, int here, int columns) {
                    constexpr int T = decltype(tile)::value;
                    store_sums<T>((last < p.in ? kept : sums) + T * kSide * kSide);
                    if (last == p.in)
                        put_sums(sums + T * kSide * kSide, here, columns, p.out,
                                 p.y + (token + T / 2 * kSide) * p.out + row + T % 2 * kSide);
                });
            }
    }
}
