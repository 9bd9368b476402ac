// AMX: eight tiles, each of up to 16 rows of up to 64 bytes. What they hold is set by thread.

// The shapes of the tiles, as the CPU reads them. A tile of no rows is not used.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row of each tile
    uint8_t rows[16] = {};

    void set(int tile, int tile_rows, int row_bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows), bytes[tile] = static_cast<uint16_t>(row_bytes);
    }
};

// The thread's tiles while it lives. Afterwards the thread has none, and switching threads costs no more than without.
class Tiles {
  public:
    Tiles() = default;
    explicit Tiles(const TileShapes& shapes) { shape(shapes); }
    ~Tiles() {
        if (shaped_) _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // Changes nothing where these are the shapes already.
    void shape(const TileShapes& shapes) {
        if (shaped_ && std::memcmp(&shapes, &shapes_, sizeof shapes) == 0) return;
        shapes_ = shapes, shaped_ = true;
        asm volatile("" : : "m"(shapes_));  // GCC takes the intrinsic to read eight bytes alone
        _tile_loadconfig(&shapes_);
    }

  private:
    TileShapes shapes_;
    bool shaped_ = false;
};

constexpr int kTileBytes = 1024;  // 16 rows of 64 bytes
constexpr int kChunk = 64;        // bytes in a row: levels of a query, or weights

// The memory of a whole tile.
template <class T> struct Whole {
    T bytes[kTileBytes / sizeof(T)];
    static Whole& at(T* p) { return *reinterpret_cast<Whole*>(p); }
    static const Whole& at(const T* p) { return *reinterpret_cast<const Whole*>(p); }
};

// The instructions, of tiles that templates name: GCC's intrinsics take literals alone, and do not say what memory they use.
template <int T> inline void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> inline void load_tile(const int8_t* p) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0"
                 :
                 : "i"(T), "r"(p), "r"(static_cast<int64_t>(kChunk)), "m"(Whole<int8_t>::at(p)));
}
template <int T> inline void load_rows(const void* p, int64_t apart) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(p), "r"(apart) : "memory");
}
template <int T> inline void store_tile(int32_t* p) {
    asm volatile("tilestored %%tmm%c1, (%2,%3,1)"
                 : "=m"(Whole<int32_t>::at(p))
                 : "i"(T), "r"(p), "r"(static_cast<int64_t>(kChunk)));
}
template <int SUM, int A, int B> inline void add_products() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
template <int SUM, int A, int B> inline void add_bf16_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
