// What attention of several tiles at once has in common: tiles of as many rows, and a walk over the blocks that they share.

// Of several tiles the last may have fewer rows: it repeats its first, which see nothing.
inline void fill_tiles(const Tile* tiles, int count, Tile* filled) {
    for (int t = 0; t < count; ++t) {
        filled[t] = tiles[t], filled[t].rows = kMaxRows;
        for (int r = tiles[t].rows; r < kMaxRows; ++r)
            filled[t].starts[r] = filled[t].limits[r] = 0, filled[t].q[r] = tiles[t].q[0], filled[t].own[r] = tiles[t].own[0];
    }
}

inline int longest_of(const Tile& tile) {
    int longest = 0;
    for (int r = 0; r < kMaxRows; ++r) longest = larger(tile.limits[r], longest);
    return longest;
}

// Block after block: pass.see(base, n), then pass.score(K, base, n, V's codes), then pass.mix(V, base, n, the next K's codes).
template <class Pass> void walk_blocks(const Cache& cache, const Tile* tiles, int count, Pass& pass) {
    int longest = 0;
    for (int t = 0; t < count; ++t) longest = larger(longest_of(tiles[t]), longest);
    for (int block = tiles->first_block; block < tiles->end_block; ++block) {
        const int base = block * cache.block_size, n = smaller(cache.block_size, longest - base);
        if (n <= 0) break;
        const int next = block + 1 < tiles->end_block ? block + 1 : block;
        const Place k = place(cache.k, cache, tiles->block_table[block], tiles->kv_head);
        const Place v = place(cache.v, cache, tiles->block_table[block], tiles->kv_head);
        const Place next_k = place(cache.k, cache, tiles->block_table[next], tiles->kv_head);
        pass.see(base, n);
        fetch_scales(v, n);
        pass.score(k, base, n, v.codes);
        fetch_scales(next_k, n);
        pass.mix(v, base, n, next_k.codes);
    }
}
