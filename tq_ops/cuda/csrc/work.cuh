// How thread blocks share the work: tiles of all sequences in one list.
#pragma once

#include "shapes.cuh"

// Tokens of a sequence up to its new one, all that this one could see.
__device__ __forceinline__ int tokens_so_far(const Arguments& args, int sequence) {
    return min(args.seq_lens[sequence], (int)args.positions[sequence] + 1);
}

// Where the context of a sequence begins: the 32 tokens in which its window does.
__device__ __forceinline__ int origin_of(const Arguments& args, int sequence) {
    return WINDOW ? max(tokens_so_far(args, sequence) - WINDOW, 0) / SPAN * SPAN : 0;
}

// The first token that is seen packed.
__device__ __forceinline__ int first_seen(const Arguments& args, int sequence) {
    return WINDOW ? max(tokens_so_far(args, sequence) - WINDOW, SINK) : SINK;
}

// Tokens from the origin on, up to the last that is seen packed. 0 where there is none.
__device__ __forceinline__ int stored_tokens(const Arguments& args, int sequence) {
    int end = tokens_so_far(args, sequence) - TAIL;
    return (KEPT || WINDOW) && end <= first_seen(args, sequence) ? 0 : end - origin_of(args, sequence);
}

constexpr int EVERY = 0x7fffffff;

// A sequence, and its units of `each` tiles in the list of all sequences' units.
struct Found {
    int sequence, tokens, tiles, first, units;
};

// The sequence that unit `wanted` of the list belongs to; with none, `first` is the length of the list. Whole warps.
__device__ __forceinline__ Found find_sequence(const Arguments& args, int wanted, int each) {
    int lane = threadIdx.x % 32, before = 0;
    for (int base = 0; base < args.sequences; base += 32) {
        int tokens = base + lane < args.sequences ? stored_tokens(args, base + lane) : 0;
        int tiles = (tokens + TILE - 1) / TILE, units = (tiles + each - 1) / each, through = units;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(ALL, through, step);
            if (lane >= step) through += other;
        }
        unsigned reached = __ballot_sync(ALL, before + through > wanted);
        if (reached) {
            int at = __ffs(reached) - 1;
            units = __shfl_sync(ALL, units, at);
            return {base + at, __shfl_sync(ALL, tokens, at), __shfl_sync(ALL, tiles, at),
                    before + __shfl_sync(ALL, through, at) - units, units};
        }
        before += __shfl_sync(ALL, through, 31);
    }
    return {-1, 0, 0, before, 0};
}

// The thread block, of `blocks` that share `tiles` evenly, that takes a tile; `first_of` is the first tile it takes.
__device__ __forceinline__ int taker_of(int tile, int tiles, int blocks) {
    return (int)(((long long)(tile + 1) * blocks - 1) / tiles);
}

__device__ __forceinline__ int first_of(int block, int tiles, int blocks) { return (int)((long long)block * tiles / blocks); }

// How `blocks` thread blocks share `tiles`. Where `each` is not 0, a thread block takes of one sequence alone, at most so many
// tiles: then it merges once. Else all tiles are one line, cut evenly, and one that takes the end of a sequence and the begin
// of the next works on them in turn.
struct Division {
    int tiles, blocks, each;
};

// Tiles that a thread block may take beyond an even share so as not to take of two sequences: what that saves, in tiles' time.
constexpr int MOST_UNEVEN = 4;

__device__ __forceinline__ Division divide(const Arguments& args, int blocks) {
    int tiles = find_sequence(args, EVERY, 1).first, least = (tiles + blocks - 1) / blocks;
    if (!tiles || find_sequence(args, EVERY, least + MOST_UNEVEN).first > blocks) return {tiles, min(blocks, tiles), 0};
    for (int each = least;; each++) {  // the most there may be is enough
        int shares = find_sequence(args, EVERY, each).first;
        if (shares <= blocks) return {tiles, shares, each};
    }
}

// Tiles begin ... end - 1 of a sequence, and the thread blocks that share it.
struct Piece {
    int sequence, tokens, begin, end, first, last;
};

// The piece of a thread block that takes one, or the one at tile `at` of the line, of which it takes those before `stop`.
__device__ __forceinline__ Piece piece_at(const Arguments& args, const Division& work, int at, int stop) {
    Found found = find_sequence(args, at, work.each ? work.each : 1);
    int number = at - found.first, last = found.first + found.units - 1;
    if (work.each)
        return {found.sequence,
                found.tokens,
                first_of(number, found.tiles, found.units),
                first_of(number + 1, found.tiles, found.units),
                found.first,
                last};
    return {found.sequence,
            found.tokens,
            number,
            min(stop - found.first, found.tiles),
            taker_of(found.first, work.tiles, work.blocks),
            taker_of(last, work.tiles, work.blocks)};
}

// What a thread block does next: a piece, of its units `at` ... stop - 1, and how all share the work.
struct Step {
    Division work;
    Piece piece;
    int at, stop;
};
