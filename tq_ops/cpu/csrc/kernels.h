// What each instruction set provides, and the plain data that the driver hands to it.
//
// A packed vector of N levels is read as N / 8 words of 32 bits, each with eight 4-bit levels. This gives two orders:
//   word order   level k of word j at j * 8 + k          rotated queries
//   plane order  level k of word j at k * (N / 8) + j    accumulators
// The caller folds the format's own order of levels into its matrices, so nothing here knows a format. N is head_dim: 64, 128
// or 256. Levels of other widths than 4 bits are unpacked first: up to 4 bits into such words, wider ones into numbers, in
// their own order. Levels of several widths lie in columns (`Columns`), and queries for them are in their own order.
#pragma once

#include <cstdint>

namespace haarkv {

constexpr int kMaxRows = 8;                  // query rows of a tile
constexpr int kMaxTiles = 16;                // tiles that one pass over the codes serves
constexpr int kMaxDim = 256;                 // the largest head_dim
constexpr int kMaxWords = kMaxDim * 6 / 32;  // of a packed vector that is read as words: 6 bits a number
constexpr int kMaxKeysTile = 32;             // keys are padded to this in scratch

// The kind of cell in which a side stores each of its N levels. Nibbles are looked up as they lie; so are levels of columns
// and planes where an instruction set can. Other cells become FP32 numbers, a few vectors at a time.
enum Cell : int32_t {
    kNibble = 4,  // levels of up to 4 bits, eight a word; as they lie where they have one plane of 4 bits
    kByte = 8,    // levels of up to 8 bits
    kBf16 = 16,   // BF16 numbers, which are what is stored; no scales and no centroids
    kFp32 = 32,   // FP32 numbers, likewise
    kMixed = 1,   // levels of several widths, up to 6 bits, in columns
};

// Levels of an eighth of a vector in the units of a column: coordinate j of the eighth lies in unit j, `shift` bits up.
struct ColumnPart {
    int32_t eighth, bits, shift;
};

// Units of one byte or two, one after the other; each is full.
struct Column {
    int32_t bytes, count;
    ColumnPart parts[5];
};

// How the codes of a vector lie, one column after the other.
struct Columns {
    int32_t count;
    Column column[3];
};
constexpr int kEighths = 8, kWidest = 6;
// Where the table of each width begins among those of 1, 2, ... 6 bits, one after the other: centroids, and boundaries.
constexpr int centroids_begin(int bits) { return (1 << bits) - 2; }
constexpr int boundaries_begin(int bits) { return (1 << bits) - 1 - bits; }
// Of integers each width up to 5 bits has a table of 32, its own again and again, and 6 bits one of 64.
constexpr int integers_begin(int bits) { return 32 * (bits - 1); }
constexpr int kIntegers = integers_begin(kWidest) + 64;

// Vectors that stay in BF16 beside what is packed: token j at `sink + j % ring` of its sequence's row, and at j as well if it
// is one of the sinks. Or, where `block_size` is not 0, in the blocks of a table of their own.
struct ResidualWindow {
    uint16_t* vectors;     // [rows, Hkv, sink + ring, head_dim] or [blocks, Hkv, block_size, head_dim]; or null
    int64_t block_stride;  // numbers from a block to the next
    int32_t tail;          // tokens that a query sees in BF16, itself among them, beside the first `sink`
    int32_t sink, ring, block_size;
};

// K or V of one layer, for every block and KV head. A block is contiguous; blocks may lie apart.
struct Side {
    uint8_t* codes;                       // [num_blocks, Hkv, block_size, bytes]
    uint16_t* scales;                     // [num_blocks, Hkv, block_size] FP16; null where numbers are plain
    const float* centroids;               // [2**bits], at least 16; where widths differ, of each width
    int64_t codes_stride, scales_stride;  // from a block to the next, in bytes of codes and in scales
    int32_t levels;                       // N
    int32_t bytes;                        // of a vector's codes
    int32_t cell;
    // Bits of a level in each plane, low bits first; 0 after the last. A plane of w bits has its levels in 8 / w parts: byte j
    // holds level j of each part, the first part lowest.
    int32_t planes[2];
    float unit;               // centroids[i] is about integers[i] * unit
    const int16_t* integers;  // [16] of nibbles; where widths differ [kIntegers]
    const float* mean;        // [Hkv, head_dim], what keys come back with beside their levels, or null
    const Columns* columns;   // where widths differ, which `cell` says too; else null
    ResidualWindow residual;
};

// Codes and scales of one block and KV head, where they lie in the cache.
struct Place {
    const uint8_t* codes;
    const uint16_t* scales;
};

struct Cache {
    Side k, v;
    int32_t num_kv_heads, head_dim, block_size;
};

// Some query rows of one KV head of one sequence, and the stretch of the sequence's blocks that they attend to.
struct Tile {
    int32_t rows, kv_head, first_block, end_block;
    const int32_t* block_table;
    const int32_t* residual_table;  // of the sequence, where tokens in BF16 lie in blocks
    int64_t residual_row;           // of the sequence, where they lie in rows
    int32_t starts[kMaxRows];       // row r sees keys starts[r] ... limits[r] - 1 of its sequence
    int32_t limits[kMaxRows];
    const float* q[kMaxRows];   // [k.levels] rotated, word order
    const void* own[kMaxRows];  // [head_dim] the same as it was given, BF16 or FP32
    float less[kMaxRows];       // softmax_scale * q . K's mean, which the logits of packed keys lack
    float softmax_scale;
    int32_t bf16;            // BF16 activations: round probabilities to BF16, each block's against its own maximum
    float* sums;             // [rows, v.levels] out, plane order: sum of p * v over what is packed
    float* maxima;           // [rows] out, largest logit
    float* totals;           // [rows] out, sum of p
    float* residual_sums;    // [rows, head_dim] out, where V has tokens in BF16 and a row sees one: sum of p * v over those
    float* residual_totals;  // [rows] out, where V has such tokens: their sum of p, 0 where no row sees one
};

// A matrix [D, D] of BF16 numbers, row-major, by which rows are multiplied: one for all KV heads, or one a KV head.
struct Matrix {
    const uint16_t* numbers;
    // The same as tiles, [D / 32, D / 16, 16 pairs of inputs, 16 outputs, 2]; or null.
    const uint16_t* pairs;
    int64_t head_stride;  // numbers from a KV head's matrix to the next; 0 if they share one
    int32_t size;         // D
};

// How vectors become the levels of a side; without a matrix they are plain numbers, which `cell` says. By a rotation (`mean`
// is null):
//   y = bf16(x / ||x||) @ matrix;  level = #{b : y >= b};  scale = fp16(||x|| / ||c[level]||)
//   or, `along` x, scale = fp16(||x|| / sum c[level] * y)
// By learned coordinates of each KV head:
//   y = bf16((x - mean) / gamma) @ matrix;  t = y / sqrt(mean of y**2);  for each gain, of gain * t:
//   level = #{b : gain * t >= b}, of the boundaries of its eighth's width;  it restores c[level]
//   kept: the largest (sum weights * t * restored)**2 / sum weights * restored**2
//   scale = fp16(gamma * sqrt(sum weights * y**2) / sqrt(sum weights * restored**2))
struct Quantizer {
    Matrix matrix;            // [D, D] BF16
    const float* boundaries;  // [2**bits - 1] ascending; where widths differ, of each width
    const float* weights;     // [Hkv, D] or null, and so are the gains
    const float* gains;       // [tries]
    int32_t tries;
    int32_t along;  // whether a rotated vector's scale keeps its length along itself
};

constexpr int64_t kMostTokens = 512;  // that one projection takes
constexpr int64_t kTokensTogether = 32, kRowsTogether = 32;

// What the numbers of a weight lie in: numbers of their own, or the blocks of a GGUF file (block_types.h).
enum WeightKind : int32_t { kFp32Weight, kBf16Weight, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kMxfp4 };
inline bool in_blocks(int32_t stored) { return stored > kBf16Weight; }

// A weight [out, in]. Of blocks, rows may lie apart, and rows and columns may have scales, powers of two.
struct Weight {
    const void* data;
    const float *row_scales, *column_scales;  // [out], [in] or null
    int64_t row_bytes;                        // of blocks, from a row to the next
    int32_t stored, x_bits;                   // x_bits: of blocks, of the integers that x is rounded to: 16 or 8
};

// Of blocks: up to kFewTokens tokens meet rows as these are read, more meet strips of rows in panels, as they are prepared.
// Prepared, a token takes kBlockFloats floats for every 32 inputs, whole groups of eight times 32. Strips of rows take
// kStripFloats for every 32 inputs.
constexpr int kFewTokens = 12, kBlockPanelTokens = 8, kBlock = 32, kBlocksTogether = 8;
constexpr int64_t kBlockFloats = kBlock / 2 + 3, kStripFloats = 2 * 16 * (kBlock / 2 + 2);

// Tokens times rows of a weight: y = x @ weight.T. The bits of a number of y depend on its token and its row alone, not on how
// many tokens or rows there are beside them.
struct Projection {
    Weight weight;
    const void* x;   // [tokens, in] BF16 or FP32
    void* prepared;  // x as the kernels read it
    float* y;        // [tokens, out]
    int64_t in, out, tokens;
    int32_t x_bf16;

    bool weight_bf16() const { return weight.stored == kBf16Weight; }
    bool all_bf16() const { return weight_bf16() && x_bf16; }
};

// y = x / sqrt(mean(x^2) + eps) * weight, row by row.
struct RmsNorm {
    const void *x, *weight;  // [rows, width], [width]
    void* y;                 // as x
    int64_t rows, width;
    float eps;
    int32_t bf16, weight_bf16, isa, threads;
};

// Half-split rotary embedding of rows [heads of a token], each [2 * half].
struct Rope {
    const float *x, *cos, *sin;  // [tokens * heads, 2 * half], [tokens, half] each
    float* y;                    // as x
    int64_t rows, heads, half;
    int32_t isa, threads;
};

// What a gate goes through: SiLU, GELU by its tanh, or a sigmoid.
enum GateFunction : int32_t { kSilu = 0, kGelu = 1, kSigmoid = 2 };

// y = function(gate) * up.
struct GatedMul {
    const float *gate, *up;
    void* y;  // BF16 or FP32
    int64_t count;
    int32_t function, bf16, isa, threads;
};

constexpr int kMostTaps = 64;  // of a short convolution

// The gated delta rule of new tokens, over states of which each sequence's row keeps some versions.
struct GatedDelta {
    const float *x, *a, *b;                   // [tokens, channels], [tokens, Hv] twice
    const float *conv, *a_log, *dt_bias;      // [channels, taps], [Hv] twice
    float* out;                               // [tokens, Hv, dv]
    float* mixed;                             // scratch, as x: q and k of some length and v, convolved
    float* gates;                             // scratch [tokens, Hv, 2]: what is left of the memory, and how much is written
    float *windows, *memories;                // [rows, versions, taps - 1, channels], [rows, versions, Hv, dk, dv]
    int64_t* seen;                            // [rows, versions], tokens that a version has seen; -1 where there is none
    const int64_t *positions, *slots, *rows;  // as a batch has them
    const int32_t* query_start;
    int64_t channels;  // 2 * Hk * dk + Hv * dv
    int32_t sequences, versions, key_heads, value_heads, key_dim, value_dim, taps, isa, threads;

    int64_t memory_size() const { return static_cast<int64_t>(value_heads) * key_dim * value_dim; }
};

// The new tokens of one sequence. Of those from `first_kept` on the state is kept, each in its version.
struct DeltaTurn {
    int64_t begin, end, first_kept, row;
    const float *window, *memory;  // before the first; null for zeros
    const int32_t* versions;       // by token from first_kept on

    int64_t place(const GatedDelta& o, int64_t token) const { return row * o.versions + versions[token - first_kept]; }
    float* kept_window(const GatedDelta& o, int64_t token) const {
        return o.windows + place(o, token) * (o.taps - 1) * o.channels;
    }
    float* kept_memory(const GatedDelta& o, int64_t token) const { return o.memories + place(o, token) * o.memory_size(); }
};

// Attention of up to kMaxTiles tiles that share their KV head, sequence and blocks.
struct Attender {
    bool (*takes)(const Cache&, const Tile*, int count);
    int64_t (*scratch_floats)(const Cache&);  // that `attend` needs, for any tiles
    void (*attend)(const Cache&, const Tile*, int count, float* scratch);
};

// How x is multiplied with a weight.
struct Projector {
    int64_t (*prepared_floats)(const Projection&);  // of `prepared`
    // Prepares tokens begin ... end - 1; begin is a multiple of kTokensTogether.
    void (*prepare)(const Projection&, int64_t begin, int64_t end);
    // All tokens, which are prepared, by rows begin ... end - 1; begin is a multiple of kRowsTogether. Scratch of [rows,
    // tokens], both rounded up to these; with blocks of the size above.
    void (*project)(const Projection&, int64_t begin, int64_t end, float* scratch);
};

// Null where a set has nothing better than what stands before it. The driver chooses (driver.h).
struct Kernels {
    Attender by_floats, by_integers, by_tiles;
    Projector dense, bf16, blocks;  // `bf16`: of a BF16 weight with BF16 x
    // y [rows, D] = x [rows, D] @ the matrix of a KV head; rows <= kMaxRows.
    void (*rotate)(const float* x, int rows, const Matrix& matrix, int head, float* y);
    // The same by `pairs`, where there are any and activations are BF16, for up to kMaxTiles * kMaxRows rows. `exact` says
    // that x holds BF16 numbers.
    void (*rotate_pairs)(const float* x, int rows, bool exact, const Matrix& matrix, int head, float* y);
    // Vectors x [rows, D], finite, of a KV head where these differ; codes[r] [bytes]; scratch [2 * rows * D]; rows <=
    // kMaxRows.
    void (*quantize)(const Side&, const Quantizer&, int head, const float* x, int rows, float* scratch, uint8_t* const* codes,
                     uint16_t* const* scales);
    // Rows, or of the last numbers, begin ... end - 1.
    void (*rms_norm)(const RmsNorm&, int64_t begin, int64_t end);
    void (*rope)(const Rope&, int64_t begin, int64_t end);
    void (*gated_mul)(const GatedMul&, int64_t begin, int64_t end);
    // What tokens begin ... end - 1 of a turn read of one head of q, k or v, in this order; keeps its part of the windows.
    void (*delta_inputs)(const GatedDelta&, const DeltaTurn&, int64_t unit, int64_t begin, int64_t end);
    // Columns begin ... end - 1 of a head's memory over all tokens of a turn. Scratch of 32 columns.
    void (*delta_columns)(const GatedDelta&, const DeltaTurn&, int64_t head, int64_t begin, int64_t end, float* scratch);
    // n BF16 numbers as FP32, and n FP32 numbers rounded to BF16.
    void (*widen)(const uint16_t* x, int64_t n, float* y);
    void (*narrow)(const float* x, int64_t n, uint16_t* y);
    // sum [n] = `share` times the sum of rows x[i * apart], each times factors[i]. Of a factor of 0 none is read.
    void (*add_up)(const float* x, int64_t apart, const float* factors, int64_t rows, float share, int64_t n, float* sum);
};

// -- Instruction sets (isa.cpp). Each needs all of those before it.
enum Isa { kPortable = 0, kAvx2, kAvx512Vnni, kAmx };
constexpr int kBf16Products = 1 << 8;

// A bit for each set, and `kBf16Products` where `avx512vnni` multiplies BF16 numbers. Where `amx` is among them, the process
// may use tiles from now on.
int available_isas();

const Kernels& kernels_of(int isa);

// What an instruction set adds by units of its own; and what takes the place of some of avx512vnni's.
#define HAARKV_ADDS(set)          \
    namespace set {               \
    void add_attention(Kernels&); \
    void add_dense(Kernels&);     \
    void add_blocks(Kernels&);    \
    }
HAARKV_ADDS(portable)
HAARKV_ADDS(avx2)
HAARKV_ADDS(avx512vnni)
#undef HAARKV_ADDS
void add_integers(Kernels&);
void add_bf16(Kernels&);
void add_amx(Kernels&);

}  // namespace haarkv
