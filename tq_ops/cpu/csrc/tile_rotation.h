// Rotations by tiles, for BF16 activations and matrices of BF16 numbers: queries are BF16 numbers too, so that products are
// exact; what goes back is the sum of two, upper and lower, off by at most 2^-17 of itself.
//
// Sums are FP32, in the order of `tdpbf16ps` (tile_projection.h), 32 inputs after the other; those of upper and of lower
// numbers are added last. The bits of a row depend on the row and the matrix alone.

// Two tiles of rows, which lie `apart`, by two tiles of columns; or one of either.
template <bool ROWS, bool COLUMNS>
inline void rotate_four(const int8_t* parts, int64_t apart, const uint16_t* tile, int chunks, int64_t distance, float* sums) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int c = 0; c < chunks; ++c, parts += kTileBytes, tile += distance) {
        load_tile<4>(parts), load_rows<6>(tile, kChunk), add_bf16_products<0, 4, 6>();
        if constexpr (COLUMNS) load_rows<7>(tile + 512, kChunk), add_bf16_products<1, 4, 7>();
        if constexpr (ROWS) load_tile<5>(parts + apart), add_bf16_products<2, 5, 6>();
        if constexpr (ROWS && COLUMNS) add_bf16_products<3, 5, 7>();
    }
    store_sums<0>(sums);
    if constexpr (COLUMNS) store_sums<1>(sums + 256);
    if constexpr (ROWS) store_sums<2>(sums + 512);
    if constexpr (ROWS && COLUMNS) store_sums<3>(sums + 768);
}

// As `Kernels::rotate_pairs`. 16 rows become a tile a chunk of 32 inputs, of rows that are split two: upper, then lower ones.
inline void rotate_tiles(const float* x, int rows, bool exact, const Matrix& matrix, int head, float* y) {
    alignas(64) int8_t parts[2 * kMaxDim / kPairs * kTileBytes];
    alignas(64) float sums[4 * 256];
    const int size = matrix.size, chunks = size / kPairs, columns = size / 16;
    const int64_t apart = chunks * kTileBytes, distance = columns * 512;
    const uint16_t* pairs = matrix.pairs;
    if (matrix.head_stride) pairs += head * chunks * distance;
    const int together = exact ? 32 : 16;  // rows
    const Tiles current(whole_shapes());
    for (int first = 0; first < rows; first += together, x += together * size, y += together * size) {
        const int here = smaller(rows - first, together);
        for (int r = 0; r < 16 * ((here + 15) / 16); ++r)
            for (int c = 0; c < chunks; ++c) {
                const float* from = x + r * size + c * kPairs;
                const __m512 left = r < here ? Avx512::load(from) : Avx512::zero();
                const __m512 right = r < here ? Avx512::load(from + 16) : Avx512::zero();
                int8_t* row = parts + r / 16 * apart + c * kTileBytes + r % 16 * kChunk;
                exact ? _mm512_store_si512(row, two_in_bf16(left, right)) : split(left, right, row, row + apart);
            }
        const bool two = !exact || here > 16;
        for (int column = 0; column < columns; column += 2) {
            const bool both = column + 1 < columns;
            auto multiply = two    ? both ? rotate_four<true, true> : rotate_four<true, false>
                            : both ? rotate_four<false, true>
                                   : rotate_four<false, false>;
            multiply(parts, apart, pairs + column * 512, chunks, distance, sums);
            for (int r = 0; r < here; ++r)
                for (int j = 0; j <= both; ++j) {
                    const float* from = sums + (exact && r >= 16) * 512 + j * 256 + r % 16 * 16;
                    __m512 sum = Avx512::load(from);
                    if (!exact) sum = Avx512::add(sum, Avx512::load(from + 512));
                    Avx512::store(y + r * size + (column + j) * 16, sum);
                }
        }
    }
}
