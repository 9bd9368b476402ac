// Rotations by tiles, for BF16 activations and matrices of BF16 numbers: queries are BF16 numbers too, so that products are
// exact; what goes back is the sum of two, upper and lower, off by at most 2^-17 of itself.
//
// Sums are FP32, in the order of `tdpbf16ps` (tile_projection.h), 32 inputs after the other; those of upper and of lower
// numbers are added last. The bits of a row depend on the row and the matrix alone.

// What a row's tiles begin with: COUNT tiles of 16 columns from tile `column` on, of rows in `parts`, [chunk][rows][32].
template <int COUNT>
inline void rotate_columns(const int8_t* parts, const uint16_t* pairs, int chunks, int columns, int column, float* sums) {
    zero_tile<0>();
    if constexpr (COUNT == 4) zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    const uint16_t* tile = pairs + column * 512;
    for (int c = 0; c < chunks; ++c, tile += columns * 512) {
        load_tile<4>(parts + c * kTileBytes);
        load_rows<6>(tile, kChunk), add_bf16_products<0, 4, 6>();
        if constexpr (COUNT == 4) {
            load_rows<7>(tile + 512, kChunk), add_bf16_products<1, 4, 7>();
            load_rows<6>(tile + 1024, kChunk), add_bf16_products<2, 4, 6>();
            load_rows<7>(tile + 1536, kChunk), add_bf16_products<3, 4, 7>();
        }
    }
    store_sums<0>(sums);
    if constexpr (COUNT == 4) store_sums<1>(sums + 256), store_sums<2>(sums + 512), store_sums<3>(sums + 768);
}

// As `Kernels::rotate_pairs`.
inline void rotate_tiles(const float* x, int rows, bool exact, const Matrix& matrix, int head, float* y) {
    alignas(64) int8_t parts[kMaxLevels / kPairs * kTileBytes];
    alignas(64) float sums[4 * 256];
    const int chunks = (matrix.inputs + kPairs - 1) / kPairs, columns = matrix.outputs / 16, inputs = matrix.inputs;
    const auto* pairs = static_cast<const uint16_t*>(matrix.pairs);
    if (matrix.head_stride) pairs += static_cast<int64_t>(head) * chunks * columns * 512;
    for (int r = 0; r < rows; ++r, x += inputs)
        for (int c = 0; c < chunks; ++c) {
            const __m512 second = c * kPairs + 16 < inputs ? Avx512::load(x + c * kPairs + 16) : Avx512::zero();
            int8_t* row = parts + c * kTileBytes + r * kChunk;
            if (exact)
                _mm512_store_si512(row, two_in_bf16(Avx512::load(x + c * kPairs), second));
            else
                split(Avx512::load(x + c * kPairs), second, row, row + rows * kChunk);
        }
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile > 5 ? 16 : exact ? rows : 2 * rows, kChunk);
    const Tiles current(shapes);
    auto put = [&](int column, int count) {
        for (int j = 0; j < count; ++j)
            for (int r = 0; r < rows; ++r) {
                const float* from = sums + j * 256 + r * 16;
                __m512 sum = Avx512::load(from);
                if (!exact) sum = Avx512::add(sum, Avx512::load(from + rows * 16));
                Avx512::store(y + r * matrix.outputs + (column + j) * 16, sum);
            }
    };
    int column = 0;
    for (; column + 4 <= columns; column += 4) rotate_columns<4>(parts, pairs, chunks, columns, column, sums), put(column, 4);
    for (; column < columns; ++column) rotate_columns<1>(parts, pairs, chunks, columns, column, sums), put(column, 1);
}
