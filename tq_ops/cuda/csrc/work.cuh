// How thread blocks share the work: tiles of all sequences in one list.
#pragma once

#include "shapes.cuh"

// Tokens of a sequence up to its new one, all that this one could see.
__device__ __forceinline__ int tokens_so_far(const Arguments& given, int sequence) {
    return min(given.seq_lens[sequence], (int)given.positions[sequence] + 1);
}

// Where the context of a sequence begins: the 32 tokens in which its window does.
__device__ __forceinline__ int origin_of(const Arguments& given, int sequence) {
    return WINDOW ? max(tokens_so_far(given, sequence) - WINDOW, 0) / SPAN * SPAN : 0;
}

// The first token that is seen packed.
__device__ __forceinline__ int first_seen(const Arguments& given, int sequence) {
    return WINDOW ? max(tokens_so_far(given, sequence) - WINDOW, SINK) : SINK;
}

// Tokens from the origin on, up to the last that is seen packed. 0 where there is none.
__device__ __forceinline__ int stored_tokens(const Arguments& given, int sequence) {
    int end = tokens_so_far(given, sequence) - TAIL;
    return (KEPT || WINDOW) && end <= first_seen(given, sequence) ? 0 : end - origin_of(given, sequence);
}

struct Found {
    int sequence, tokens, first_tile, tiles;
};

// The sequence that tile `wanted` of the list belongs to; with none, `first_tile` is the length of the list. Whole warps.
__device__ __forceinline__ Found find_sequence(const Arguments& given, int wanted) {
    int lane = threadIdx.x % 32, before = 0;
    for (int base = 0; base < given.sequences; base += 32) {
        int tokens = base + lane < given.sequences ? stored_tokens(given, base + lane) : 0;
        int tiles = (tokens + TILE - 1) / TILE, through = tiles;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(ALL, through, step);
            if (lane >= step) through += other;
        }
        unsigned reached = __ballot_sync(ALL, before + through > wanted);
        if (reached) {
            int at = __ffs(reached) - 1;
            tiles = __shfl_sync(ALL, tiles, at);
            return {base + at, __shfl_sync(ALL, tokens, at), before + __shfl_sync(ALL, through, at) - tiles, tiles};
        }
        before += __shfl_sync(ALL, through, 31);
    }
    return {-1, 0, before, 0};
}

// The thread block, of `blocks` that share `tiles` evenly, that takes a tile; `first_of` is the first tile it takes.
__device__ __forceinline__ int taker_of(int tile, int tiles, int blocks) {
    return (int)(((long long)(tile + 1) * blocks - 1) / tiles);
}

__device__ __forceinline__ int first_of(int block, int tiles, int blocks) { return (int)((long long)block * tiles / blocks); }
