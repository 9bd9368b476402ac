// Attention of one tile of query rows over one stretch of blocks, with an online softmax.

// shrink[r] = exp(before[r] - now[r]), factor[r] = exp(block[r] - now[r]), all in one register or two; 0 where a maximum is
// that of no key.
template <class Simd>
void exponentials(int rows, const float* before, const float* block, const float* now, float* shrink, float* factor) {
    float power[2 * kMaxRows] = {};
    for (int r = 0; r < rows; ++r) power[r] = before[r] - now[r], power[kMaxRows + r] = block[r] - now[r];
    for (int i = 0; i < 2 * kMaxRows; i += Simd::width) Simd::store(power + i, Simd::expf(Simd::load(power + i)));
    for (int r = 0; r < rows; ++r) {
        shrink[r] = before[r] == -INFINITY ? 0.0f : power[r];
        factor[r] = block[r] == -INFINITY ? 0.0f : power[kMaxRows + r];
    }
}

// One step of the online softmax. Turns logits [R, stride] of a block of n keys, of which row r sees seen[r], into the weights
// of V's vectors: weights [segments, R, stride] = p * scale. Each row's probabilities are taken against its maximum in this
// block, then rescaled to the running maximum; shrink[r] is the factor for earlier sums.
template <class Simd, int R>
void soften(const float* logits, int n, const int* seen, bool round, int stride, const float* scale, int segments,
            float* weights, float* maxima, float* totals, float* shrink) {
    using F = typename Simd::F;
    const F lowest = Simd::set1(-INFINITY);
    F most[R], sum[R];
    for (int r = 0; r < R; ++r) most[r] = lowest, sum[r] = Simd::zero();
    for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            most[r] = Simd::max(Simd::first(seen[r] - i, Simd::load(logits + r * stride + i), lowest), most[r]);
    float block_max[R], new_max[R], factor[R];
    for (int r = 0; r < R; ++r) {
        block_max[r] = Simd::reduce_max(most[r]);
        new_max[r] = block_max[r] > maxima[r] ? block_max[r] : maxima[r];
    }
    exponentials<Simd>(R, maxima, block_max, new_max, shrink, factor);
    for (int i = 0; i < n; i += Simd::width)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            F value = Simd::expf(Simd::add(Simd::load(logits + r * stride + i), Simd::set1(-block_max[r])));
            if (round) value = Simd::round_bf16(value);
            value = Simd::first(seen[r] - i, value, Simd::zero());
            sum[r] = Simd::add(sum[r], value);
            value = Simd::mul(value, Simd::set1(factor[r]));
            for (int s = 0; s < segments; ++s)
                Simd::store(weights + (s * R + r) * stride + i, Simd::mul(value, Simd::load(scale + s * stride + i)));
        }
    for (int r = 0; r < R; ++r) {
        totals[r] = totals[r] * shrink[r] + Simd::reduce_add(sum[r]) * factor[r];
        maxima[r] = new_max[r];
    }
}

// Floats of scratch that `attend` needs with the products `P`, FloatProducts or IntegerProducts.
template <template <int> class P> int64_t scratch_floats(const Cache& cache) {
    const int64_t stride = padded(cache.block_size);
    // Transposed words, logits, K's scales, V's scales, weights; then the products' own.
    return stride * (cache.k.levels / 8) + kMaxRows * stride +
           stride * (cache.k.scales_per_vector + cache.v.scales_per_vector * (1 + kMaxRows)) + P<kMaxRows>::floats(cache) + 16;
}

template <class Simd, class P, int R> void attend_rows(const Cache& cache, const Tile& tile, float* scratch) {
    const int stride = padded(cache.block_size), levels = cache.v.levels, segments = cache.v.scales_per_vector;
    uint32_t* words = reinterpret_cast<uint32_t*>(scratch);
    float* p = scratch + stride * (cache.k.levels / 8);
    float* k_scale = p + R * stride;
    float* v_scale = k_scale + stride * cache.k.scales_per_vector;
    float* weights = v_scale + stride * segments;
    const P products(cache, tile, stride, weights + R * stride * segments);
    for (int r = 0; r < R; ++r) {
        for (int i = 0; i < levels; ++i) tile.sums[r * levels + i] = 0.0f;
        tile.maxima[r] = -INFINITY, tile.totals[r] = 0.0f;
    }
    int longest = 0;
    for (int r = 0; r < R; ++r) longest = tile.limits[r] > longest ? tile.limits[r] : longest;
    for (int block = tile.first_block; block < tile.end_block; ++block) {
        const int base = block * cache.block_size, n = smaller(cache.block_size, longest - base);
        if (n <= 0) break;
        const Place k = place(cache.k, cache, tile.block_table[block], tile.kv_head);
        const Place v = place(cache.v, cache, tile.block_table[block], tile.kv_head);
        // Prefetch this block's values while its keys are scored, and the next keys while the values are mixed: blocks lie
        // apart in memory, so the hardware prefetcher cannot predict the next one.
        const int next = block + 1 < tile.end_block ? block + 1 : block;
        const Place next_k = place(cache.k, cache, tile.block_table[next], tile.kv_head);
        fetch_scales(v, segments * n);
        products.score(k, n, tile.softmax_scale, words, k_scale, p, v.codes, next_k.codes);
        widen_scales<Simd>(v.scales, segments, n, stride, v_scale);
        int seen[R];
        float shrink[R];
        for (int r = 0; r < R; ++r) seen[r] = smaller(n, tile.limits[r] - base);
        soften<Simd, R>(p, n, seen, tile.bf16, stride, v_scale, segments, weights, tile.maxima, tile.totals, shrink);
        fetch_scales(next_k, cache.k.scales_per_vector * n);
        products.mix(v, n, weights, shrink, tile.sums, next_k.codes);
    }
}

template <class Simd, template <int> class P> void attend(const Cache& cache, const Tile& tile, float* scratch) {
    switch (tile.rows) {
        case 1:
            return attend_rows<Simd, P<1>, 1>(cache, tile, scratch);
        case 2:
            return attend_rows<Simd, P<2>, 2>(cache, tile, scratch);
        case 3:
            return attend_rows<Simd, P<3>, 3>(cache, tile, scratch);
        case 4:
            return attend_rows<Simd, P<4>, 4>(cache, tile, scratch);
        case 5:
            return attend_rows<Simd, P<5>, 5>(cache, tile, scratch);
        case 6:
            return attend_rows<Simd, P<6>, 6>(cache, tile, scratch);
        case 7:
            return attend_rows<Simd, P<7>, 7>(cache, tile, scratch);
        default:
            return attend_rows<Simd, P<8>, 8>(cache, tile, scratch);
    }
}
