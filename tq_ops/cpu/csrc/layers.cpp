// Dense layers, one after the other, for few tokens: the ops of the C interface in the order in which `decoder_layer` calls
// them, to the same bits, without going back to the caller between them.
#include <initializer_list>

#include "calls.h"
#include "driver.h"

extern "C" {
int haarkv_store(const HaarkvStore*);
void haarkv_attention(const HaarkvAttention*);
void haarkv_rms_norm(const RmsNorm*);
void haarkv_rope(const Rope*);
void haarkv_gated_mul(const GatedMul*);
}

namespace {

// What lies between the ops of a layer, in one piece of memory: FP32, and of the model's dtype where it is said.
struct Between {
    float *q, *k, *v, *turned_q, *turned_k, *gate, *up, *update;
    float *normed, *attended, *product;  // of the model's dtype, and so is q before attention

    Between(const HaarkvLayers& l, int64_t q_size, int64_t kv_size, int64_t inner) {
        const struct {
            float** part;
            int64_t size;
        } parts[] = {
            {&normed, l.hidden_size}, {&q, q_size},         {&k, kv_size},       {&v, kv_size},
            {&turned_q, q_size},      {&turned_k, kv_size}, {&attended, q_size}, {&update, l.hidden_size},
            {&gate, inner},           {&up, inner},         {&product, inner},
        };
        static thread_local Scratch scratch;
        int64_t floats = 0;
        for (const auto& of : parts) floats += round_up(l.tokens * of.size, 16);
        float* next = scratch.of(floats);
        for (const auto& of : parts) *of.part = next, next += round_up(l.tokens * of.size, 16);
    }
};

class Layer {
  public:
    Layer(const HaarkvLayers& l, const HaarkvDenseLayer& w)
        : l_(l),
          w_(w),
          dim_(w.attention->cache.head_dim),
          q_size_(w.num_heads * dim_),
          kv_size_(w.attention->cache.num_kv_heads * dim_),
          b_(l, q_size_, kv_size_, w.intermediate_size) {}

    // False if its K and V were refused.
    bool run() {
        norm(l_.hidden, l_.bf16, w_.input_norm, l_.tokens, l_.hidden_size, b_.normed);
        project({linear(b_.normed, l_.hidden_size, w_.q_proj, q_size_, b_.q),
                 linear(b_.normed, l_.hidden_size, w_.k_proj, kv_size_, b_.k),
                 linear(b_.normed, l_.hidden_size, w_.v_proj, kv_size_, b_.v)});
        turn(b_.q, w_.q_bias, w_.q_norm, q_size_, b_.turned_q);
        turn(b_.k, w_.k_bias, w_.k_norm, kv_size_, b_.turned_k);
        add_bias(b_.v, w_.v_bias, kv_size_);
        if (!store()) return false;
        attend();
        project({linear(b_.attended, q_size_, w_.o_proj, l_.hidden_size, b_.update)});
        add_update(w_.mixer_out_norm);
        const int64_t inner = w_.intermediate_size;
        norm(l_.hidden, l_.bf16, w_.post_norm, l_.tokens, l_.hidden_size, b_.normed);
        project({linear(b_.normed, l_.hidden_size, w_.gate_proj, inner, b_.gate),
                 linear(b_.normed, l_.hidden_size, w_.up_proj, inner, b_.up)});
        const GatedMul product{b_.gate, b_.up,  b_.product, l_.tokens * inner, w_.gelu ? kGelu : kSilu,
                               l_.bf16, l_.isa, l_.threads};
        haarkv_gated_mul(&product);
        project({linear(b_.product, inner, w_.down_proj, l_.hidden_size, b_.update)});
        add_update(w_.mlp_out_norm);
        return true;
    }

  private:
    const HaarkvLayers& l_;
    const HaarkvDenseLayer& w_;
    const int64_t dim_, q_size_, kv_size_;
    const Between b_;

    // It may write where it reads.
    void norm(const void* x, int32_t bf16, const void* weight, int64_t rows, int64_t width, void* y) {
        const RmsNorm op{x, weight, y, rows, width, w_.eps, bf16, w_.norms_bf16, l_.isa, l_.threads};
        haarkv_rms_norm(&op);
    }

    HaarkvLinear linear(const void* x, int64_t in, const Weight& weight, int64_t out, float* y) const {
        return {weight, x, y, l_.tokens, in, out, l_.bf16, l_.isa, l_.threads};
    }

    void project(std::initializer_list<HaarkvLinear> linears) {
        project_together(linears.begin(), static_cast<int>(linears.size()));
    }

    void add_bias(float* x, const void* bias, int64_t width) {
        if (!bias) return;
        for (int64_t i = 0; i < width; ++i) {
            const float more =
                l_.bf16 ? bf16_to_float(static_cast<const uint16_t*>(bias)[i]) : static_cast<const float*>(bias)[i];
            for (int64_t t = 0; t < l_.tokens; ++t) x[t * width + i] += more;
        }
    }

    // Queries or keys [T, heads, D] as projected, to what RoPE makes of them.
    void turn(float* x, const void* bias, const void* weight, int64_t size, float* turned) {
        const int64_t heads = size / dim_;
        add_bias(x, bias, size);
        if (weight) norm(x, false, weight, l_.tokens * heads, dim_, x);
        const HaarkvTurns& by = l_.ropes[w_.rope];
        const Rope rope{x, by.cos, by.sin, turned, l_.tokens * heads, heads, dim_ / 2, l_.isa, l_.threads};
        haarkv_rope(&rope);
    }

    bool store() {
        HaarkvStore call = *w_.store;
        call.k.x = b_.turned_k, call.v.x = b_.v, call.k.bf16 = call.v.bf16 = 0;
        call.slots = l_.places[w_.place].slots, call.positions = l_.positions, call.query_start = l_.query_start;
        call.rows = l_.rows, call.tokens = l_.tokens, call.sequences = l_.sequences, call.threads = l_.threads;
        return !haarkv_store(&call);
    }

    void attend() {
        HaarkvAttention call = *w_.attention;
        call.q = b_.turned_q, call.out = b_.attended, call.bf16 = l_.bf16;
        if (l_.bf16) {
            kernels_of(l_.isa).narrow(b_.turned_q, l_.tokens * q_size_, reinterpret_cast<uint16_t*>(b_.q));
            call.q = b_.q;
        }
        call.block_table = l_.places[w_.place].block_table, call.query_start = l_.query_start, call.positions = l_.positions;
        call.rows = l_.rows, call.sequences = l_.sequences, call.max_blocks = l_.max_blocks;
        call.num_heads = w_.num_heads, call.softmax_scale = w_.softmax_scale, call.threads = l_.threads;
        haarkv_attention(&call);
    }

    // The residual: one sum in FP32, rounded once, of the update as it is or as the norm behind it makes it.
    void add_update(const void* norm_behind) {
        if (norm_behind) norm(b_.update, false, norm_behind, l_.tokens, l_.hidden_size, b_.update);
        const int64_t n = l_.tokens * l_.hidden_size;
        if (l_.bf16) {
            uint16_t* hidden = static_cast<uint16_t*>(l_.hidden);
            for (int64_t i = 0; i < n; ++i) hidden[i] = float_to_bf16(bf16_to_float(hidden[i]) + b_.update[i]);
        } else {
            float* hidden = static_cast<float*>(l_.hidden);
            for (int64_t i = 0; i < n; ++i) hidden[i] += b_.update[i];
        }
    }
};

}  // namespace

extern "C" {

// Returns 0; or 1 where a layer's K and V are such as `haarkv_store` refuses. The layers before it have stored theirs then.
__attribute__((visibility("default"))) int haarkv_layers(const HaarkvLayers* l) {
    for (int64_t i = 0; i < l->count; ++i)
        if (!Layer(*l, l->layers[i]).run()) return 1;
    return 0;
}

}  // extern "C"
