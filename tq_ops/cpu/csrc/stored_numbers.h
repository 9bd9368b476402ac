// How stored vectors become FP32 numbers, scales included.

constexpr int kMostScales = kMaxDim / 32;  // of a vector

// Scales of vectors key ... key + n - 1, which do not share them; `room` for FP16 that is widened.
template <class Simd> inline const float* scales_of(const Side& side, Place at, int key, int n, float* room) {
    const int64_t first = static_cast<int64_t>(key) * side.scales_per_vector, count = n * side.scales_per_vector;
    if (side.scale_bytes == 4) return reinterpret_cast<const float*>(at.scales) + first;
    Simd::widen_halves(at.scales + first, static_cast<int>(count), static_cast<int>(count), room);
    return room;
}

// Numbers [n, levels] = value * scale + zero, where value(codes of a scale's part, j) is a register of values from j on.
template <class Simd, class Value>
inline void scaled(const Side& side, Place at, int key, int n, const uint8_t* codes, int64_t bytes, float* out, Value value) {
    float room[kTileKeys * kMostScales];
    const int count = side.scales_per_vector, part = side.levels / count;
    const float* scales = scales_of<Simd>(side, at, key, n, room);
    const float* zeros = at.zeros ? at.zeros + static_cast<int64_t>(key) * count : nullptr;
    for (int s = 0; s < n * count; ++s, codes += bytes / count, out += part) {
        const typename Simd::F scale = Simd::set1(scales[s]);
        if (zeros == nullptr) {
            for (int j = 0; j < part; j += Simd::width) Simd::store(out + j, Simd::mul(value(codes, j), scale));
            continue;
        }
        const typename Simd::F zero = Simd::set1(zeros[s]);
        for (int j = 0; j < part; j += Simd::width) Simd::store(out + j, Simd::fma(value(codes, j), scale, zero));
    }
}

// Levels of BITS bits, a byte each.
template <class Simd, int BITS>
inline void from_bytes(const Side& side, Place at, int key, int n, const uint8_t* level, float* out) {
    const auto table = Simd::template wide_table<BITS>(side.centroids);
    scaled<Simd>(side, at, key, n, level, side.levels, out, [&](const uint8_t* codes, int j) __attribute__((always_inline)) {
        return Simd::template lookup_bytes<BITS>(table, codes + j);
    });
}

template <class Simd>
inline void from_planes(const Side& side, Place at, int key, int n, const uint8_t* codes, uint8_t* bytes, float* out) {
    const uint8_t* level = codes;
    if (side.planes[0] != kByte) unpack(side, codes, n, bytes), level = bytes;
    const int bits = side.planes[0] + side.planes[1];
    if (bits == 5) return from_bytes<Simd, 5>(side, at, key, n, level, out);
    if (bits == 6) return from_bytes<Simd, 6>(side, at, key, n, level, out);
    from_bytes<Simd, 8>(side, at, key, n, level, out);
}

template <class Simd> inline void from_halves(const Side& side, Place at, int key, int n, const uint8_t* codes, float* out) {
    const typename Simd::Table table = Simd::table(side.centroids);
    const int half = side.levels / side.scales_per_vector / 2;
    auto value = [&](const uint8_t* part, int j) __attribute__((always_inline)) {
        if (j < half) return Simd::lookup(table, Simd::load_bytes(part + j));
        return Simd::lookup(table, Simd::template shift<4>(Simd::load_bytes(part + j - half)));
    };
    scaled<Simd>(side, at, key, n, codes, side.bytes, out, value);
}

template <class Simd, int BITS>
inline void from_stream(const Side& side, Place at, int key, int n, const uint8_t* codes, float* out) {
    const typename Simd::Table table = Simd::table(side.centroids);
    auto value = [&](const uint8_t* part, int j) __attribute__((always_inline)) {
        return Simd::lookup(table, Simd::template spread<BITS>(part + j * BITS / 8));
    };
    scaled<Simd>(side, at, key, n, codes, side.bytes, out, value);
}

// By channel, [levels, kTileKeys]: all of these keys are of one group, which is there as a whole.
template <class Simd, int BITS> inline void from_channels(const Side& side, Place at, int key, float* out) {
    const typename Simd::Table table = Simd::table(side.centroids);
    const int64_t group = key / side.group, apart = side.group * BITS / 8;
    const uint8_t* codes = at.codes + group * side.levels * apart + key % side.group * BITS / 8;
    const float* scales = reinterpret_cast<const float*>(at.scales) + group * side.levels;
    const float* zeros = at.zeros + group * side.levels;
    for (int d = 0; d < side.levels; ++d, codes += apart, out += kTileKeys)
        for (int i = 0; i < kTileKeys; i += Simd::width) {
            const typename Simd::F value = Simd::lookup(table, Simd::template spread<BITS>(codes + i * BITS / 8));
            Simd::store(out + i, Simd::fma(value, Simd::set1(scales[d]), Simd::set1(zeros[d])));
        }
}

// Restored vector by vector, with its two roundings to BF16: the matrix takes some ten times as long as attention.
template <class Simd> inline void restored(const Side& side, Place at, int key, int n, const uint8_t* codes, float* out) {
    const typename Simd::Table table = Simd::table(side.centroids);
    const float* norms = reinterpret_cast<const float*>(at.scales) + key;
    const Matrix matrix = {side.restore, nullptr, 0, side.levels, side.levels, 1};
    alignas(64) float rotated[kMaxRows * kMaxDim];
    for (int first = 0; first < n; first += kMaxRows, out += kMaxRows * side.levels) {
        const int rows = smaller(n - first, kMaxRows);
        for (int r = 0; r < rows; ++r, codes += side.bytes) {
            typename Simd::F squares = Simd::zero();
            for (int j = 0; j < side.levels; j += Simd::width) {
                const typename Simd::F value = Simd::lookup(table, Simd::load_bytes(codes + j));
                squares = Simd::fma(value, value, squares);
            }
            const float scale = 1.0f / std::sqrt(Simd::reduce_add(squares) + side.least) * norms[first + r];
            for (int j = 0; j < side.levels; j += Simd::width) {
                const typename Simd::F value = Simd::lookup(table, Simd::load_bytes(codes + j));
                Simd::store(rotated + r * side.levels + j, Simd::round_bf16(Simd::mul(value, Simd::set1(scale))));
            }
        }
        rotate<Simd>(rotated, rows, matrix, 0, out);
        for (int i = 0; i < rows * side.levels; i += Simd::width) Simd::store(out + i, Simd::round_bf16(Simd::load(out + i)));
    }
}

template <class Simd> void numbers_of(const Side& side, Place at, int key, int n, uint8_t* bytes, float* out) {
    const uint8_t* codes = at.codes + static_cast<int64_t>(key) * side.bytes;
    const int levels = side.levels, bits = side.planes[0];
    switch (side.cell) {
        case kBf16:
            for (int i = 0; i < n * levels; i += Simd::width)
                Simd::store(out + i, Simd::load(reinterpret_cast<const uint16_t*>(codes) + i));
            return;
        case kFp32:
            std::memcpy(out, codes, static_cast<size_t>(n) * levels * sizeof(float));
            return;
        case kFp8:
            for (int i = 0; i < n * levels; i += Simd::width) Simd::store(out + i, Simd::fp8(codes + i));
            return;
        case kInt8:
            return scaled<Simd>(side, at, key, n, codes, side.bytes, out,
                                [](const uint8_t* part, int j)
                                    __attribute__((always_inline)) { return Simd::signed_bytes(part + j); });
        case kHalves:
            return from_halves<Simd>(side, at, key, n, codes, out);
        case kStream:
            if (bits == 2) return from_stream<Simd, 2>(side, at, key, n, codes, out);
            if (bits == 3) return from_stream<Simd, 3>(side, at, key, n, codes, out);
            return from_stream<Simd, 4>(side, at, key, n, codes, out);
        case kChannels:
            if (bits == 2) return from_channels<Simd, 2>(side, at, key, out);
            return from_channels<Simd, 4>(side, at, key, out);
        case kRestored:
            return restored<Simd>(side, at, key, n, codes, out);
        default:
            return from_planes<Simd>(side, at, key, n, codes, bytes, out);
    }
}
