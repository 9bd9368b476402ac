// The C interface to the gated delta rule: where states are read and kept, and the loops over heads.
#include <algorithm>
#include <vector>

#include "driver.h"

using namespace haarkv;

namespace {

// The version of a row that has seen this number of tokens, or -1.
int64_t version_of(const GatedDelta& o, int64_t sequence) {
    const int64_t begin = o.positions[o.query_start[sequence]];
    const int64_t* seen = o.seen + o.rows[sequence] * o.versions;
    for (int64_t v = 0; begin > 0 && v < o.versions; ++v)
        if (seen[v] == begin) return v;
    return -1;
}

// Pads a batch: nothing is read or kept.
bool is_padding(const GatedDelta& o, int64_t sequence) { return o.slots[o.query_start[sequence]] < 0; }

// Which versions the last tokens of a sequence go to: those that no other continuation needs, the oldest first, and never the
// one that is read. What has seen more tokens than the sequence has is forgotten.
DeltaTurn turn_of(const GatedDelta& o, int64_t sequence, int32_t* targets) {
    const int64_t begin = o.query_start[sequence], end = o.query_start[sequence + 1], row = o.rows[sequence];
    DeltaTurn turn{begin, end, end, row, nullptr, nullptr, targets};
    if (is_padding(o, sequence)) return turn;
    const int64_t before = version_of(o, sequence), known = o.positions[begin];
    if (before >= 0) {
        turn.window = o.windows + (row * o.versions + before) * (o.taps - 1) * o.channels;
        turn.memory = o.memories + (row * o.versions + before) * o.memory_size();
    }
    int64_t* seen = o.seen + row * o.versions;
    for (int64_t v = 0; v < o.versions; ++v)
        if (known == 0 || seen[v] > known) seen[v] = -1;
    turn.first_kept = std::max(begin, end - (o.versions - 1));
    for (int64_t token = end - 1; token >= turn.first_kept; --token) {
        int64_t oldest = -1;
        for (int64_t v = 0; v < o.versions; ++v)
            if (v != before && seen[v] <= known && (oldest < 0 || seen[v] < seen[oldest])) oldest = v;
        seen[oldest] = o.positions[token] + 1;
        targets[token - turn.first_kept] = static_cast<int32_t>(oldest);
    }
    return turn;
}

}  // namespace

extern "C" {

// Returns 0, or 1 without a change where no version has seen the tokens before some sequence's.
__attribute__((visibility("default"))) int haarkv_gated_delta(const GatedDelta* call) {
    const GatedDelta& o = *call;
    for (int64_t s = 0; s < o.sequences; ++s)
        if (!is_padding(o, s) && o.positions[o.query_start[s]] > 0 && version_of(o, s) < 0) return 1;
    std::vector<int32_t> targets(o.sequences * o.versions);
    std::vector<DeltaTurn> turns;
    int64_t longest = 1;
    for (int64_t s = 0; s < o.sequences; ++s) {
        turns.push_back(turn_of(o, s, targets.data() + s * o.versions));
        longest = std::max(longest, turns.back().end - turns.back().begin);
    }
    const Kernels& kernels = kernels_of(o.isa);
    // Tokens and heads whose inputs are one item: enough work to be worth handing out.
    constexpr int64_t kTokens = 64, kTokenHeads = 32;
    const int64_t units = 2 * o.key_heads + o.value_heads, tiles = divide_up(longest, kTokens);
    const int64_t together = std::max<int64_t>(1, kTokenHeads / std::min(longest, kTokens)),
                  groups = divide_up(units, together);
    auto read = [&](int64_t item, int) {
        const DeltaTurn& turn = turns[item / (tiles * groups)];
        const int64_t begin = turn.begin + item / groups % tiles * kTokens, end = std::min(turn.end, begin + kTokens);
        const int64_t first = item % groups * together;
        for (int64_t unit = first; begin < end && unit < std::min(units, first + together); ++unit)
            kernels.delta_inputs(o, turn, unit, begin, end);
    };
    parallel_for(o.threads, o.sequences * tiles * groups, read);
    // Heads are cut where there are few of them for the threads; a column's bits do not depend on that.
    constexpr int64_t kColumns = 32, kItemsPerThread = 4;
    const int64_t heads = o.sequences * o.value_heads;
    const int64_t width = heads < kItemsPerThread * o.threads ? kColumns : o.value_dim, parts = divide_up(o.value_dim, width);
    static thread_local Scratch scratch;
    const int64_t room = round_up(o.key_dim * 32, 16);
    float* const memory = scratch.of(o.threads * room);
    auto change = [&](int64_t item, int thread) {
        const int64_t begin = item % parts * width, of_head = item / parts;
        kernels.delta_columns(o, turns[of_head / o.value_heads], of_head % o.value_heads, begin,
                              std::min<int64_t>(o.value_dim, begin + width), memory + thread * room);
    };
    parallel_for(o.threads, heads * parts, change);
    return 0;
}

}  // extern "C"
