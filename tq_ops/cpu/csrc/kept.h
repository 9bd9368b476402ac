// Tokens that stay in BF16, which a row sees in place of the same tokens packed: its sinks and its tail.

// What the rows of a tile see in BF16 of K, or of V.
template <int R> struct KeptRows {
    const uint16_t* vectors = nullptr;  // [sink + ring, dim] of the sequence and KV head
    int dim, sink = 0, ring = 1;
    int from[R];  // row r sees keys before `sink` and from from[r] on

    KeptRows(const Side& side, const Cache& cache, const Tile& tile) : dim(cache.head_dim) {
        const Kept& kept = side.kept;
        for (int r = 0; r < R; ++r) from[r] = tile.limits[r];
        if (kept.vectors == nullptr) return;
        sink = kept.sink, ring = kept.ring > 0 ? kept.ring : 1;
        vectors = kept.vectors + (tile.kept_row * cache.num_kv_heads + tile.kv_head) * (kept.sink + kept.ring) * dim;
        for (int r = 0; r < R; ++r) {
            const int behind = tile.limits[r] - 1 - kept.tail;  // the newest token that is no longer in the tail
            from[r] = behind < 0 ? 0 : kept.group * (behind / kept.group + 1);
        }
    }
};

// The same in one block. Row r sees keys begin[r] ... end[r] - 1 packed, the others of its seen[r] in BF16. `first` ... n - 1
// and 0 ... `sinks` - 1 are all keys that any row sees in BF16.
template <int R> struct KeptKeys {
    int begin[R], end[R], seen[R], sinks = 0, first, base;
    bool any = false, packed = false;  // whether some row sees a key in BF16, or packed

    KeptKeys(const KeptRows<R>& rows, int base, int n, const int* seen) : first(n), base(base) {
        for (int r = 0; r < R; ++r) {
            const int most = seen[r] > 0 ? seen[r] : 0;
            const int sink = rows.sink - base, from = rows.from[r] - base;
            this->seen[r] = most;
            begin[r] = smaller(sink > 0 ? sink : 0, most);
            end[r] = smaller(from > begin[r] ? from : begin[r], most);
            sinks = begin[r] > sinks ? begin[r] : sinks;
            first = end[r] < most ? smaller(first, end[r]) : first;
            any = any || begin[r] > 0 || end[r] < most;
            packed = packed || begin[r] < end[r];
        }
        first = first > sinks ? first : sinks;
    }

    // Calls body(key, keys, x) for up to kTileKeys keys at a time, x [keys, dim] their vectors as numbers.
    template <class Simd, class Body> void each(const KeptRows<R>& rows, int n, float* x, Body body) const {
        for (int key = 0; key < n;) {
            if (key >= sinks && key < first) key = first;
            const int stop = key < sinks ? sinks : n, keys = smaller(stop - key, kTileKeys);
            if (keys <= 0) return;
            for (int i = 0; i < keys; ++i) {
                const int token = base + key + i;
                const int64_t at = token < rows.sink ? token : rows.sink + token % rows.ring;
                for (int d = 0; d < rows.dim; d += Simd::width)
                    Simd::store(x + i * rows.dim + d, Simd::load(rows.vectors + at * rows.dim + d));
            }
            body(key, keys, x);
            key += keys;
        }
    }
};

// Replaces the logits of keys that a row sees in BF16. `less[r]` is what all packed keys of row r lack.
template <class Simd, int R>
void score_kept(const KeptRows<R>& rows, const KeptKeys<R>& keys, int n, const float* const* q, const float* less,
                float softmax_scale, int stride, float* numbers, float* logits) {
    keys.template each<Simd>(rows, n, numbers, [&](int key, int count, const float* x) {
        float found[R * kTileKeys];
        score_numbers<Simd, R>(x, count, rows.dim, q, 1.0f, kTileKeys, found);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < count; ++i)
                if (key + i < keys.begin[r] || key + i >= keys.end[r])
                    logits[r * stride + key + i] = found[r * kTileKeys + i] * softmax_scale - less[r];
    });
}

// Cuts the weights of a block's keys in two: those of packed vectors [segments, R, stride] lose what a row sees in BF16, and p
// [R, stride] keeps nothing else. Adds up the latter.
template <int R>
void split_weights(const KeptKeys<R>& keys, int n, int segments, int stride, float* weights, float* p, float* totals) {
    for (int r = 0; r < R; ++r) {
        const int begin = keys.begin[r], end = keys.end[r], seen = keys.seen[r];
        float* of_row = p + r * stride;
        for (int s = 0; s < segments; ++s) {
            float* packed = weights + (s * R + r) * stride;
            for (int i = 0; i < begin; ++i) packed[i] = 0.0f;
            for (int i = end; i < n; ++i) packed[i] = 0.0f;
        }
        for (int i = begin; i < end; ++i) of_row[i] = 0.0f;
        for (int i = 0; i < begin; ++i) totals[r] += of_row[i];
        for (int i = end; i < seen; ++i) totals[r] += of_row[i];
    }
}

// Adds the block's vectors in BF16 to sums [R, dim], which have shrunk already.
template <class Simd, int R>
void mix_kept(const KeptRows<R>& rows, const KeptKeys<R>& keys, int n, const float* p, int stride, float* numbers,
              float* sums) {
    float one[R];
    for (int r = 0; r < R; ++r) one[r] = 1.0f;
    keys.template each<Simd>(rows, n, numbers, [&](int key, int count, const float* x) {
        mix_numbers<Simd, R>(x, count, rows.dim, p + key, stride, one, sums);
    });
}
