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

// Tiles of these shapes while it lives. Afterwards the thread has none, and switching threads costs no more than without.
class Tiles {
  public:
    explicit Tiles(const TileShapes& shapes) {
        asm volatile("" : : "m"(shapes));  // GCC takes the intrinsic to read eight bytes alone
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};
