// The buffers of the one core that all kernel functions of a library run on. Compiled with the prelude.
static constexpr std::size_t KIB = 1024;
static constexpr std::size_t UB = 192 * KIB, L1 = 512 * KIB, L0AB = 64 * KIB, L0C = 128 * KIB;
// The CPU backend's unified buffer is larger than the device's.
static constexpr std::size_t UB_HERE = 512 * KIB;

// Fill every buffer, so that a kernel function that reads before it writes does not find what the one before it left.
extern "C" void machine_fill(int byte) {
    auto &memory = pto::NPUMemoryModel::Instance();
    memory.EnsureInitialized();
    std::memset(memory.GetUBBase(), byte, UB_HERE);
    std::memset(memory.GetL1Base(), byte, L1);
    std::memset(memory.GetL0ABase(), byte, L0AB);
    std::memset(memory.GetL0BBase(), byte, L0AB);
    std::memset(memory.GetL0CBase(), byte, L0C);
}

// Whether bytes behind the device's unified buffer were written since it was filled.
extern "C" int machine_overran(int byte) {
    const char *base = pto::NPUMemoryModel::Instance().GetUBBase();
    return base[UB] != static_cast<char>(byte) || std::memcmp(base + UB, base + UB + 1, UB_HERE - UB - 1) != 0;
}

// Rounding to BF16, to nearest and ties to even: compilers call these, and older runtime libraries lack them.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value) {
    uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if (value == value)
        bits += 0x7FFF + (bits >> 16 & 1);
    else
        bits |= 0x400000;
    return __builtin_bit_cast(__bf16, static_cast<uint16_t>(bits >> 16));
}

extern "C" __attribute__((weak)) __bf16 __truncdfbf2(double value) {
    // To the nearest float first would round twice: an inexact one gets its last bit set, which keeps it off every tie.
    float near = static_cast<float>(value);
    if (value == value && std::isfinite(near) && near != value) {
        if (std::fabs(static_cast<double>(near)) > std::fabs(value))
            near = std::nextafter(near, 0.0f);
        near = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, near) | 1);
    }
    return __truncsfbf2(near);
}
