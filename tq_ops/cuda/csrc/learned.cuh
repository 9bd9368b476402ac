// Learned keys: where their levels lie, as tq_ops/formats/packing.py says, and centroids by arithmetic, as lookup.py says.
//
// A lane holds a quarter of each column's units. A word of it is four units of a byte or two of two bytes, and two units of a
// word are the two halves of a register: of bytes the first and the third, or the second and the fourth.
#pragma once

#include "shapes.cuh"

#if K_LEARNED
struct Column {
    int nbytes, begin, first, parts;  // of a unit; in HEAD_DIM / 8 bytes; of the eight parts; how many
};
struct Part {
    int shift, bits;
};
constexpr Column UNITS[] = {K_COLUMNS};
constexpr Part PARTS[] = {K_PARTS};
constexpr word CUBIC[][3] = {K_CUBIC};  // of 1 bit and more: a, rest and b
constexpr int UNIT_COLUMNS = sizeof(UNITS) / sizeof(Column);

// Two coordinates of a lane: units `unit` and `unit + step` of its quarter, at bit `shift` of the halves of a word.
struct Pair {
    int word, part, unit, step, shift, bits;
};

__device__ constexpr Pair pair_at(int index) {
    for (int c = 0; c < UNIT_COLUMNS; c++) {
        Column of = UNITS[c];
        int halves = 2 / of.nbytes, pairs = halves * of.parts, words = of.nbytes * HEAD_DIM / 128;
        if (index < words * pairs) {
            int number = index / pairs, part = of.first + index % pairs / halves, odd = index % halves;
            int word = of.begin * HEAD_DIM / 128 + number, unit = number * 4 / of.nbytes + odd;
            return {word, part, unit, halves, PARTS[part].shift + 8 * odd, PARTS[part].bits};
        }
        index -= words * pairs;
    }
    return {};
}

// Its first column in layout.kernel_order, where four parts are laced.
__device__ constexpr int column_of_pair(Pair pair, int share) {
    return pair.part / 4 * (HEAD_DIM / 2) + 4 * (share * (HEAD_DIM / 32) + pair.unit) + pair.part % 2 * 2 + pair.part % 4 / 2;
}

template <int C = 0>
__device__ __forceinline__ void load_units(word (&out)[K_STORED], const unsigned char* vector, int share) {
    constexpr Column of = UNITS[C];
    word units[of.nbytes * HEAD_DIM / 128];
    load_codes(units, vector + of.begin * (HEAD_DIM / 8) + share * (of.nbytes * HEAD_DIM / 32));
    for (int i = 0; i < of.nbytes * HEAD_DIM / 128; i++) out[of.begin * HEAD_DIM / 128 + i] = units[i];
    if constexpr (C + 1 < UNIT_COLUMNS) load_units<C + 1>(out, vector, share);
}

__device__ constexpr word twice(word half) { return half << 16 | half; }

// As lookup.unit_shift: how far to the right, so that the lowest bit becomes bit 1 of a half or above, and the highest
// below 10.
__device__ constexpr int moved(Pair pair) {
    if (pair.shift == 0) return -1;
    if (pair.shift + pair.bits <= 10) return 0;
    return pair.shift > 6 ? 6 : pair.shift - 1;
}

template <int INDEX> __device__ __forceinline__ word centroids_of_pair(const word (&codes)[K_STORED]) {
    constexpr Pair pair = pair_at(INDEX);
    constexpr int by = moved(pair), place = pair.shift - by, bits = pair.bits, levels = 1 << bits;
    // 2**(2 - place - bits), and what 1024 + (levels - 1) / 2 * 2**place is made zero by.
    constexpr word scale = twice((17 - place - bits) << 10);
    constexpr word offset = twice(0x8000 | (27 - place - bits) << 10 | (levels - 1) << (place - 1));
    word units = codes[pair.word], x = by < 0 ? units << 1 : units >> (by < 0 ? 0 : by);
    word n = times_plus((x & twice((levels - 1) << place)) | 0x64006400u, scale, offset);
    if constexpr (bits == 1) return times(n, twice(CUBIC[0][0]));
    word more = times_plus(times(n, n), twice(CUBIC[bits - 1][2]), twice(CUBIC[bits - 1][1]));
    return times_plus(n, twice(CUBIC[bits - 1][0]), times(more, n));
}
#endif
