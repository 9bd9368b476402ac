// Projections on tiles: `tdpbf16ps` multiplies 16 rows of the weight, as they lie in memory, by 32 inputs of 16 tokens.
//
// In each number of the result it adds 16 products of even inputs, each with one rounding, and 16 of odd inputs likewise; the
// two sums are added, and then added to what was there before. It takes numbers below 2^-126 for zero and makes none. That is
// one order whatever tokens and rows share the tiles. Where a sum is set aside between two stretches of inputs it loses
// nothing.

constexpr int kSide = 16;                // rows or columns of a tile
constexpr int kInputs = 32;              // inputs that one instruction takes
constexpr int64_t kInputsAtOnce = 1024;  // inputs at a time where tokens are many, so that their x stays in the L2 cache
constexpr int64_t kAhead = 256;          // inputs that a row is fetched ahead where tokens are few

inline int64_t whole_tiles(int64_t in) { return (in + kInputs - 1) / kInputs * kInputs; }

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The first n of 16 lanes.
inline __mmask16 lanes(int64_t n) { return static_cast<__mmask16>(n < kSide ? (1u << n) - 1u : 0xffffu); }

// Sixteen vectors of sixteen 32-bit words, transposed.
inline void transpose(__m512i (&r)[kSide]) {
    __m512i t[kSide];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2)
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88), r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// x as tiles hold it: for each 16 tokens, or fewer at the end, and each 32 inputs [16 pairs of inputs, tokens] words.
inline uint32_t* tokens_at(const Projection& p, int64_t token) {
    return static_cast<uint32_t*>(p.prepared) + token * (whole_tiles(p.in) / 2);
}

inline void prepare_tiles(const Projection& p, int64_t begin, int64_t end) {
    const uint16_t* x = static_cast<const uint16_t*>(p.x);
    for (int64_t token = begin; token < end; token += kSide) {
        const int64_t n = least(kSide, end - token);
        uint32_t* to = tokens_at(p, token);
        for (int64_t i = 0; i < p.in; i += kInputs, to += kSide * n) {
            const __mmask32 there = p.in - i < kInputs ? (1u << (p.in - i)) - 1u : 0xffffffffu;
            __m512i word[kSide];
            for (int t = 0; t < kSide; ++t)
                word[t] = t < n ? _mm512_maskz_loadu_epi16(there, x + (token + t) * p.in + i) : _mm512_setzero_si512();
            if (n == 1) {
                _mm512_storeu_si512(to, word[0]);
                continue;
            }
            transpose(word);
            for (int pair = 0; pair < kSide; ++pair) _mm512_mask_storeu_epi32(to + pair * n, lanes(n), word[pair]);
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

    bool second_rows() const { return rows[1] != 0; }
    bool second_tokens() const { return columns[1] != 0; }
};

inline TileShapes shapes_of(const Block& b) {
    TileShapes shapes;
    for (int i = 0; i < 2; ++i) {
        shapes.set(4 + i, b.rows[i], b.rows[i] ? 4 * kSide : 0);
        shapes.set(6 + i, b.columns[i] ? kSide : 0, 4 * b.columns[i]);
        for (int j = 0; j < 2; ++j)
            if (b.rows[i] && b.columns[j]) shapes.set(2 * j + i, b.rows[i], 4 * b.columns[j]);
    }
    return shapes;
}

// One step: 32 inputs of rows that lie `distance` bytes apart.
template <bool ROWS, bool TOKENS> inline void multiply(const Block& b, const uint16_t* rows, int64_t distance, int64_t i) {
    _tile_loadd(6, b.tokens[0] + i / 2 * b.columns[0], 4 * b.columns[0]);
    _tile_loadd(4, rows, distance);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (ROWS) {
        _tile_loadd(5, reinterpret_cast<const char*>(rows) + kSide * distance, distance);
        _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (TOKENS) {
        _tile_loadd(7, b.tokens[1] + i / 2 * b.columns[1], 4 * b.columns[1]);
        _tile_dpbf16ps(2, 4, 7);
        if constexpr (ROWS) _tile_dpbf16ps(3, 5, 7);
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
    __m512i row[kSide];
    for (int r = 0; r < kSide; ++r) row[r] = _mm512_loadu_si512(sums + r * kSide);
    transpose(row);
    for (int t = 0; t < columns; ++t) _mm512_mask_storeu_epi32(y + t * out, lanes(rows), row[t]);
}

// Sets the tiles of sums aside, or fetches them: [4][16][16] floats.
inline void set_aside(const Block& b, float* sums) {
    _tile_stored(0, sums, 4 * kSide);
    if (b.second_rows()) _tile_stored(1, sums + 256, 4 * kSide);
    if (b.second_tokens()) _tile_stored(2, sums + 512, 4 * kSide);
    if (b.second_rows() && b.second_tokens()) _tile_stored(3, sums + 768, 4 * kSide);
}

inline void fetch_sums(const Block& b, const float* sums) {
    _tile_loadd(0, sums, 4 * kSide);
    if (b.second_rows()) _tile_loadd(1, sums + 256, 4 * kSide);
    if (b.second_tokens()) _tile_loadd(2, sums + 512, 4 * kSide);
    if (b.second_rows() && b.second_tokens()) _tile_loadd(3, sums + 768, 4 * kSide);
}

inline void start_sums(const Block& b) {
    _tile_zero(0);
    if (b.second_rows()) _tile_zero(1);
    if (b.second_tokens()) _tile_zero(2);
    if (b.second_rows() && b.second_tokens()) _tile_zero(3);
}

template <Fetch AHEAD> void multiply_stretch(const Block& b, int64_t begin, int64_t end) {
    if (b.second_rows() && b.second_tokens()) return multiply_stretch<true, true, AHEAD>(b, begin, end);
    if (b.second_rows()) return multiply_stretch<true, false, AHEAD>(b, begin, end);
    if (b.second_tokens()) return multiply_stretch<false, true, AHEAD>(b, begin, end);
    multiply_stretch<false, false, AHEAD>(b, begin, end);
}

// Tiles of the shapes that the last block needed.
class CurrentTiles {
  public:
    ~CurrentTiles() {
        if (any_) _tile_release();
    }
    void shape(const Block& b) {
        const TileShapes wanted = shapes_of(b);
        if (any_ && std::memcmp(&wanted, &shapes_, sizeof wanted) == 0) return;
        shapes_ = wanted, any_ = true;
        _tile_loadconfig(&shapes_);
    }

  private:
    TileShapes shapes_;
    bool any_ = false;
};

// All tokens by rows begin ... end - 1. `aside` has room for [rows, tokens] sums, both rounded up to 32.
inline void project_tiles(const Projection& p, int64_t begin, int64_t end, float* aside) {
    const bool few = p.tokens <= kSide;
    const int64_t rows = few ? kSide : 2 * kSide, stretch = few ? whole_tiles(p.in) : kInputsAtOnce;
    alignas(64) float sums[4 * kSide * kSide];
    CurrentTiles tiles;
    for (int64_t first = 0; first < p.in; first += stretch) {
        const int64_t last = least(p.in, first + stretch);
        float* kept = aside;
        for (int64_t token = 0; token < p.tokens; token += 2 * kSide)
            for (int64_t row = begin; row < end; row += rows, kept += 4 * kSide * kSide) {
                Block b;
                b.weight = static_cast<const uint16_t*>(p.weight.data) + row * p.in, b.in = p.in;
                for (int i = 0; i < 2; ++i) {
                    b.rows[i] = static_cast<int>(least(kSide, least(end, row + rows) - row - i * kSide));
                    b.columns[i] = static_cast<int>(least(kSide, p.tokens - token - i * kSide));
                    if (b.rows[i] < 0) b.rows[i] = 0;
                    if (b.columns[i] < 0) b.columns[i] = 0;
                    b.tokens[i] = b.columns[i] ? tokens_at(p, token + i * kSide) : nullptr;
                }
                tiles.shape(b);
                first ? fetch_sums(b, kept) : start_sums(b);
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
                set_aside(b, last < p.in ? kept : sums);
                if (last < p.in) continue;
                for (int i = 0; i < 4; ++i)
                    if (b.rows[i % 2] && b.columns[i / 2])
                        put_sums(sums + i * kSide * kSide, b.rows[i % 2], b.columns[i / 2], p.out,
                                 p.y + (token + i / 2 * kSide) * p.out + row + i % 2 * kSide);
            }
    }
}
