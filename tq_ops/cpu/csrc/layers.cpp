// Dense layers, one after the other, for few tokens: the ops of the C interface in the order in which `decoder_layer` calls
// them, to the same bits, without going back to the caller between them.
#include <ctime>

#include "calls.h"
#include "driver.h"
#include "linear.h"

extern "C" {
int haarkv_store(const HaarkvStore*);
void haarkv_attention(const HaarkvAttention*);
void haarkv_rms_norm(const RmsNorm*);
void haarkv_rope(const Rope*);
void haarkv_silu_mul(const SiluMul*);
}

namespace {

// Adds up where the time goes; nothing where nobody asked. One thread's is its CPU time, that of several is by the wall.
class Watch {
  public:
    Watch(int64_t* spent, int threads) : spent_(spent), clock_(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC) {
        if (spent_) last_ = now();
    }
    void after(Part part) {
        if (!spent_) return;
        const int64_t time = now();
        spent_[part] += time - last_, last_ = time;
    }

  private:
    int64_t now() const {
        timespec time{};
        clock_gettime(clock_, &time);
        return static_cast<int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec;
    }

    int64_t* const spent_;
    const clockid_t clock_;
    int64_t last_ = 0;
};

// What lies between the ops of a layer, in one piece of memory: FP32, and of the model's dtype where it is said.
struct Between {
    float *q, *k, *v, *turned_q, *turned_k, *gate, *up, *update;
    float *normed, *attended, *product;  // of the model's dtype, and so is q before attention

    Between(const HaarkvLayers& l, int64_t q_size, int64_t kv_size) {
        const struct {
            float** part;
            int64_t size;
        } parts[] = {
            {&normed, l.hidden_size},
            {&q, q_size},
            {&k, kv_size},
            {&v, kv_size},
            {&turned_q, q_size},
            {&turned_k, kv_size},
            {&attended, q_size},
            {&update, l.hidden_size},
            {&gate, l.intermediate_size},
            {&up, l.intermediate_size},
            {&product, l.intermediate_size},
        };
        static thread_local Scratch scratch;
        int64_t floats = 0;
        for (const auto& of : parts) floats += round_up(l.tokens * of.size, 16);
        float* next = scratch.of(floats);
        for (const auto& of : parts) *of.part = next, next += round_up(l.tokens * of.size, 16);
    }
};

class Layers {
  public:
    Layers(const HaarkvLayers& l, const HaarkvDenseLayer& first)
        : l_(l),
          dim_(first.attention->cache.head_dim),
          kv_heads_(first.attention->cache.num_kv_heads),
          b_(l, l.num_heads * dim_, kv_heads_ * dim_),
          watch_(l.spent, l.threads) {}

    // False if its K and V were refused.
    bool run(const HaarkvDenseLayer& w) {
        norm(l_.hidden, l_.bf16, w.input_norm, l_.tokens, l_.hidden_size, b_.normed);
        const int64_t q_size = l_.num_heads * dim_, kv_size = kv_heads_ * dim_;
        const HaarkvLinear qkv[] = {linear(b_.normed, l_.hidden_size, w.q_proj, q_size, b_.q),
                                    linear(b_.normed, l_.hidden_size, w.k_proj, kv_size, b_.k),
                                    linear(b_.normed, l_.hidden_size, w.v_proj, kv_size, b_.v)};
        project(qkv, 3);
        heads(b_.q, w.q_bias, w.q_norm, l_.num_heads, b_.turned_q);
        heads(b_.k, w.k_bias, w.k_norm, kv_heads_, b_.turned_k);
        add_bias(b_.v, w.v_bias, kv_size);
        if (!store(w)) return false;
        attend(w);
        const HaarkvLinear o[] = {linear(b_.attended, q_size, w.o_proj, l_.hidden_size, b_.update)};
        project(o, 1);
        add_update();
        norm(l_.hidden, l_.bf16, w.post_norm, l_.tokens, l_.hidden_size, b_.normed);
        const HaarkvLinear gate_up[] = {linear(b_.normed, l_.hidden_size, w.gate_proj, l_.intermediate_size, b_.gate),
                                        linear(b_.normed, l_.hidden_size, w.up_proj, l_.intermediate_size, b_.up)};
        project(gate_up, 2);
        const SiluMul silu{b_.gate, b_.up, b_.product, l_.tokens * l_.intermediate_size, l_.bf16, l_.isa, l_.threads};
        haarkv_silu_mul(&silu);
        watch_.after(kSwiglu);
        const HaarkvLinear down[] = {linear(b_.product, l_.intermediate_size, w.down_proj, l_.hidden_size, b_.update)};
        project(down, 1);
        add_update();
        return true;
    }

  private:
    const HaarkvLayers& l_;
    const int64_t dim_, kv_heads_;
    const Between b_;
    Watch watch_;

    void norm(const void* x, int32_t bf16, const void* weight, int64_t rows, int64_t width, void* y) {
        const RmsNorm op{x, weight, y, rows, width, l_.eps, bf16, l_.bf16, l_.isa, l_.threads};
        haarkv_rms_norm(&op);
        watch_.after(kNorms);
    }

    HaarkvLinear linear(const void* x, int64_t in, const void* weight, int64_t out, float* y) const {
        return {weight, x, y, l_.tokens, in, out, l_.bf16, l_.bf16, l_.isa, l_.threads};
    }

    void project(const HaarkvLinear* linears, int count) {
        project_together(linears, count);
        watch_.after(kProjections);
    }

    void add_bias(float* x, const void* bias, int64_t width) {
        if (!bias) return;
        for (int64_t i = 0; i < width; ++i) {
            const float more =
                l_.bf16 ? bf16_to_float(static_cast<const uint16_t*>(bias)[i]) : static_cast<const float*>(bias)[i];
            for (int64_t t = 0; t < l_.tokens; ++t) x[t * width + i] += more;
        }
        watch_.after(kProjections);
    }

    // Queries or keys [T, heads, D] as projected, to what RoPE makes of them. A norm may write where it reads.
    void heads(float* x, const void* bias, const void* weight, int64_t heads, float* turned) {
        add_bias(x, bias, heads * dim_);
        if (weight) norm(x, false, weight, l_.tokens * heads, dim_, x);
        const Rope rope{x, l_.cos, l_.sin, turned, l_.tokens * heads, heads, dim_ / 2, l_.isa, l_.threads};
        haarkv_rope(&rope);
        watch_.after(kRope);
    }

    bool store(const HaarkvDenseLayer& w) {
        HaarkvStore call = *w.store;
        call.k.x = b_.turned_k, call.v.x = b_.v, call.k.bf16 = call.v.bf16 = 0;
        call.slots = l_.slots, call.positions = l_.positions, call.query_start = l_.query_start, call.rows = l_.rows;
        call.tokens = l_.tokens, call.sequences = l_.sequences, call.threads = l_.threads;
        const int refused = haarkv_store(&call);
        watch_.after(kStore);
        return !refused;
    }

    void attend(const HaarkvDenseLayer& w) {
        HaarkvAttention call = *w.attention;
        call.q = b_.turned_q, call.out = b_.attended, call.bf16 = l_.bf16;
        if (l_.bf16) {
            kernels_of(l_.isa).narrow(b_.turned_q, l_.tokens * l_.num_heads * dim_, reinterpret_cast<uint16_t*>(b_.q));
            call.q = b_.q;
        }
        call.block_table = l_.block_table, call.query_start = l_.query_start, call.positions = l_.positions;
        call.rows = l_.rows, call.sequences = l_.sequences, call.max_blocks = l_.max_blocks;
        call.num_heads = l_.num_heads, call.softmax_scale = l_.softmax_scale, call.threads = l_.threads;
        haarkv_attention(&call);
        watch_.after(kAttention);
    }

    // The residual: one sum in FP32, rounded once.
    void add_update() {
        const int64_t n = l_.tokens * l_.hidden_size;
        if (l_.bf16) {
            uint16_t* hidden = static_cast<uint16_t*>(l_.hidden);
            for (int64_t i = 0; i < n; ++i) hidden[i] = float_to_bf16(bf16_to_float(hidden[i]) + b_.update[i]);
        } else {
            float* hidden = static_cast<float*>(l_.hidden);
            for (int64_t i = 0; i < n; ++i) hidden[i] += b_.update[i];
        }
        watch_.after(kResiduals);
    }
};

}  // namespace

extern "C" {

// Returns 0; or 1 where a layer's K and V are such as `haarkv_store` refuses. The layers before it have stored theirs then.
__attribute__((visibility("default"))) int haarkv_layers(const HaarkvLayers* l) {
    if (l->count == 0) return 0;
    Layers layers(*l, l->layers[0]);
    for (int64_t i = 0; i < l->count; ++i)
        if (!layers.run(l->layers[i])) return 1;
    return 0;
}

}  // extern "C"
