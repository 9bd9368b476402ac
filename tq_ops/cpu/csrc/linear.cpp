// The C interface to projections: several of the same tokens are one loop over the threads.

#include <algorithm>

#include "driver.h"

using namespace haarkv;

namespace {

int64_t row_bytes(const HaarkvLinear& l) {
    if (in_blocks(l.weight.stored)) return l.weight.row_bytes;
    return l.inputs * (l.weight.stored == kBf16Weight ? 2 : 4);
}

// Rows of the weight that a thread takes at a time: few enough that all threads have work to the end. Of a weight that each
// token needs once it is what memory yields in 10 microseconds; for many tokens, what stays in the L2 cache beside them.
int64_t rows_per_item(const HaarkvLinear& l) {
    constexpr int64_t kBytesOfFew = 128 * 1024, kRowsOfMany = 256, kItemsPerThread = 4;
    const int64_t fair = divide_up(l.outputs, l.threads * kItemsPerThread);
    const int64_t most = l.tokens > kTokensTogether ? kRowsOfMany : kBytesOfFew / std::max<int64_t>(1, row_bytes(l));
    return round_up(std::max<int64_t>(1, std::min(fair, most)), kRowsTogether);
}

// One weight of several, in items.
struct Piece {
    Projection p;
    int64_t rows, items;
};

// Whether both weights meet x as it is prepared for one of them.
bool alike(const Weight& a, const Weight& b) {
    if (!in_blocks(a.stored) || !in_blocks(b.stored)) return a.stored == b.stored;
    return a.column_scales == b.column_scales;
}

void project_alike(const HaarkvLinear* linears, int count) {
    const HaarkvLinear& l = linears[0];
    const bool blocks = in_blocks(l.weight.stored);
    Piece pieces[kMostTogether];
    int64_t items = 0, aside = 0;
    for (int i = 0; i < count; ++i) {
        const HaarkvLinear& of = linears[i];
        Piece& piece = pieces[i];
        const int64_t tokens = std::min(l.tokens, kMostTokens);
        piece.p = {of.weight, of.x, nullptr, of.y, of.inputs, of.outputs, tokens, of.bf16};
        piece.rows = rows_per_item(of), piece.items = divide_up(of.outputs, piece.rows);
        items += piece.items;
        const int64_t of_sums = round_up(piece.rows, kRowsTogether) * round_up(tokens, kTokensTogether);
        aside = std::max(aside, blocks ? of.inputs / kBlock * kStripFloats : of_sums);
    }
    const int threads = static_cast<int>(std::min<int64_t>(l.threads, items));
    static thread_local Scratch prepared, sums;
    float* const scratch = sums.of(threads * aside);
    const Projection& whole = pieces[0].p;
    const Projector& by = projector(kernels_of(l.isa), whole);
    float* const x = prepared.of(by.prepared_floats(whole));
    for (int64_t first = 0; first < l.tokens; first += kMostTokens) {
        for (int i = 0; i < count; ++i) {
            Projection& p = pieces[i].p;
            p.prepared = x, p.tokens = std::min(l.tokens - first, kMostTokens);
            p.x = at(l.x, l.bf16, first * l.inputs), p.y = linears[i].y + first * p.out;
        }
        const Projection& p = pieces[0].p;
        auto prepare = [&](int64_t item, int) {
            by.prepare(p, item * kTokensTogether, std::min(p.tokens, (item + 1) * kTokensTogether));
        };
        auto project = [&](int64_t item, int thread) {
            const Piece* piece = pieces;
            for (; item >= piece->items; ++piece) item -= piece->items;
            const int64_t begin = item * piece->rows;
            by.project(piece->p, begin, std::min(piece->p.out, begin + piece->rows), scratch + thread * aside);
        };
        parallel_for(threads, divide_up(p.tokens, kTokensTogether), prepare);
        parallel_for(threads, items, project);
    }
}

}  // namespace

namespace haarkv {

void project_together(const HaarkvLinear* linears, int count) {
    for (int first = 0, last; first < count; first = last) {
        for (last = first + 1; last < count && alike(linears[first].weight, linears[last].weight);) ++last;
        project_alike(linears + first, last - first);
    }
}

}  // namespace haarkv

extern "C" {

__attribute__((visibility("default"))) void haarkv_linear(const HaarkvLinear* l) { project_together(l, 1); }

}  // extern "C"
