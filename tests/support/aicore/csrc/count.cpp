// The counters of the one core that all kernel functions of a library count on. Compiled with count.h.
alignas(64) char core_memory[1 << 20];
bool counting_elements = false;
uint64_t counted_elements = 0;
static uint64_t calls[OTHER_CALL + 1], repeats;

void counted(Kind kind, uint64_t lines) {
    calls[kind]++;
    if (kind == VECTOR_CALL)
        repeats += lines;
}

extern "C" uint64_t count_calls(int kind) { return calls[kind]; }
extern "C" uint64_t count_repeats() { return repeats; }

// Nothing is computed: the buffers that a machine fills and looks at stay as they are, and its clean slate is zero counts.
extern "C" void machine_fill(int) {
    std::memset(calls, 0, sizeof calls);
    repeats = 0;
    counting_elements = false;
}
extern "C" int machine_overran(int) { return 0; }
