// How stored vectors become FP32 numbers, scales included.

// Levels of BITS bits, a byte each.
template <class Simd, int BITS>
inline void from_bytes(const Side& side, Place at, int key, int n, const uint8_t* level, float* out) {
    float scales[kTileKeys];
    Simd::widen_halves(at.scales + key, n, n, scales);
    const auto table = Simd::template wide_table<BITS>(side.centroids);
    for (int i = 0; i < n; ++i, level += side.levels, out += side.levels) {
        const typename Simd::F scale = Simd::set1(scales[i]);
        for (int j = 0; j < side.levels; j += Simd::width)
            Simd::store(out + j, Simd::mul(Simd::template lookup_bytes<BITS>(table, level + j), scale));
    }
}

template <class Simd> void numbers_of(const Side& side, Place at, int key, int n, uint8_t* bytes, float* out) {
    const uint8_t* codes = at.codes + static_cast<int64_t>(key) * side.bytes;
    if (side.cell == kFp32) {
        std::memcpy(out, codes, static_cast<size_t>(n) * side.levels * sizeof(float));
        return;
    }
    if (side.cell == kBf16) {
        for (int i = 0; i < n * side.levels; i += Simd::width)
            Simd::store(out + i, Simd::load(reinterpret_cast<const uint16_t*>(codes) + i));
        return;
    }
    const uint8_t* level = codes;
    if (side.planes[0] != kByte) unpack(side, codes, n, bytes), level = bytes;
    const int bits = side.planes[0] + side.planes[1];
    if (bits == 5) return from_bytes<Simd, 5>(side, at, key, n, level, out);
    if (bits == 6) return from_bytes<Simd, 6>(side, at, key, n, level, out);
    from_bytes<Simd, 8>(side, at, key, n, level, out);
}
