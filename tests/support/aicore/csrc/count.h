// Counts what pto-isa's headers of the device (A2, A3) issue: every intrinsic of the core is a function that adds to a counter.
// Nothing is computed, and no memory is touched. Precompiled once for each kind of core.
#pragma once

// Hundreds of tile operations stand in one kernel function: inlined, each would be compiled for each of its calls.
#define always_inline

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>

using half = _Float16;
using float16_t = _Float16;
using float32_t = float;
using bfloat16_t = __bf16;
using std::max;
using std::min;

#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __biasbuf__
#define __ssbuf__
#define __aicore__
#define __aicore_host__
#define __global__
#define __tf__
#define __in__
#define __out__
#define __cce_get_tile_ptr(x) (x)
#define TILEOP static inline

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_MTE4, PIPE_MTE5, PIPE_V2, PIPE_FIX };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
enum pad_t { PAD_NONE };
enum mem_dsb_t { DSB_ALL, DSB_DDR, DSB_UB };
enum cache_line_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum dcci_dst_t { CACHELINE_OUT };
enum atomic_op_t { ATOMIC_SUM };
enum atomic_type_t { ATOMIC_S32 };
enum { VA0, VA1, VA2, VA3, VA4, VA5, VA6, VA7 };
enum { ONLY_VALUE, ONLY_INDEX, VALUE_INDEX };
// How a product's result is rounded on its way out; the headers branch on these names.
enum QuantMode_t {
    NoQuant, F322F16, F322BF16, DEQF16, VDEQF16, REQ8, VREQ8, QF322B8_PRE, VQF322B8_PRE, QF322F16_PRE, VQF322F16_PRE,
    QF322BF16_PRE, VQF322BF16_PRE, QS322BF16_PRE, VQS322BF16_PRE, SHIFTS322S16, VSHIFTS322S16
};
namespace __cce_scalar {
enum addr_cal_mode_t { INCREASING, DECREASING };
}

// In count.cpp.
enum Kind { VECTOR_CALL, COPY_CALL, CUBE_CALL, BARRIER_CALL, OTHER_CALL };
void counted(Kind kind, uint64_t repeats);
extern bool counting_elements;
extern uint64_t counted_elements;

// A vector instruction works on 256 bytes at a time, as often as its `repeat` says: the first whole number behind the pointers
// and the scalar. In the mode that counts elements it is 0, and the mask holds how many there are.
constexpr uint64_t LINE = 256;
template <typename T> constexpr bool is_address = std::is_pointer_v<T>;

template <typename T> uint64_t whole(T value) {
    if constexpr (std::is_integral_v<T> || std::is_enum_v<T>)
        return static_cast<uint64_t>(value);
    else
        return 0;
}

// Operands before `repeat`: addresses, then a scalar for the instructions that have one.
template <bool Scalar, typename... Any> uint64_t vector_lines(Any... any) {
    if constexpr (sizeof...(Any) == 0) {
        return 0;
    } else {
        using First = std::tuple_element_t<0, std::tuple<Any...>>;
        if constexpr (!is_address<First>)
            return 1;
        else {
            if (counting_elements)
                return (counted_elements * sizeof(std::remove_pointer_t<First>) + LINE - 1) / LINE;
            const uint64_t words[] = {whole(any)...};
            constexpr std::size_t at = (std::size_t{is_address<Any>} + ...) + Scalar;
            return at < sizeof...(Any) ? words[at] : 1;
        }
    }
}

constexpr bool same(const char *a, const char *b) { return *a == *b && (*a == 0 || same(a + 1, b + 1)); }
constexpr bool has_scalar(const char *name) {
    for (const char *known : {"vadds", "vmuls", "vmaxs", "vmins", "vlrelu", "vaxpy", "vector_dup", "vshl", "vshr"})
        if (same(name, known))
            return true;
    return name[0] == 'v' && name[1] == 'c' && name[2] == 'm' && name[3] == 'p' && name[4] == 'v' && name[5] == 's';
}

#define CALL(NAME, KIND, LINES)                                                                                             \
    template <typename... Any> inline int64_t NAME(Any... any) {                                                            \
        counted(KIND, LINES);                                                                                               \
        return 0;                                                                                                           \
    }
#define VECTOR(NAME) CALL(NAME, VECTOR_CALL, vector_lines<has_scalar(#NAME)>(any...))
#define COPY(NAME) CALL(NAME, COPY_CALL, 1)
#define CUBE(NAME) CALL(NAME, CUBE_CALL, 1)
#define OTHER(NAME) CALL(NAME, OTHER_CALL, 1)

VECTOR(vabs) VECTOR(vadd) VECTOR(vadds) VECTOR(vand) VECTOR(vaxpy) VECTOR(vbrcb) VECTOR(vcadd) VECTOR(vcgadd) VECTOR(vcgmax)
VECTOR(vcgmin) VECTOR(vcmax) VECTOR(vcmin) VECTOR(vcmp_eq) VECTOR(vcmp_ge) VECTOR(vcmp_gt) VECTOR(vcmp_le) VECTOR(vcmp_lt)
VECTOR(vcmp_ne) VECTOR(vcmpv_eq) VECTOR(vcmpv_ge) VECTOR(vcmpv_gt) VECTOR(vcmpv_le) VECTOR(vcmpv_lt) VECTOR(vcmpv_ne)
VECTOR(vcmpvs_eq) VECTOR(vcmpvs_ge) VECTOR(vcmpvs_gt) VECTOR(vcmpvs_le) VECTOR(vcmpvs_lt) VECTOR(vcmpvs_ne) VECTOR(vcopy)
VECTOR(vcpadd) VECTOR(vdiv) VECTOR(vector_dup) VECTOR(vexp) VECTOR(vgather) VECTOR(vgatherb) VECTOR(vln) VECTOR(vlrelu)
VECTOR(vmax) VECTOR(vmaxs) VECTOR(vmin) VECTOR(vmins) VECTOR(vmla) VECTOR(vmul) VECTOR(vmuls) VECTOR(vnot) VECTOR(vor)
VECTOR(vrec) VECTOR(vreducev2) VECTOR(vrelu) VECTOR(vrsqrt) VECTOR(vsel) VECTOR(vshl) VECTOR(vshr) VECTOR(vsqrt) VECTOR(vsub)
VECTOR(vsubrelu) VECTOR(vmrgsort4) VECTOR(vbitsort) VECTOR(vtranspose) VECTOR(vnchwconv) VECTOR(scatter_vnchwconv_b8)
VECTOR(scatter_vnchwconv_b16) VECTOR(scatter_vnchwconv_b32)
VECTOR(vconv_f322f16) VECTOR(vconv_f322f16a) VECTOR(vconv_f322f16r) VECTOR(vconv_f322f16c) VECTOR(vconv_f322f16f)
VECTOR(vconv_f322f16z) VECTOR(vconv_f322f16o) VECTOR(vconv_f322bf16a) VECTOR(vconv_f322bf16r) VECTOR(vconv_f322bf16c)
VECTOR(vconv_f322bf16f) VECTOR(vconv_f322bf16z) VECTOR(vconv_f322s16a) VECTOR(vconv_f322s16r) VECTOR(vconv_f322s16c)
VECTOR(vconv_f322s16f) VECTOR(vconv_f322s16z) VECTOR(vconv_f322s32a) VECTOR(vconv_f322s32r) VECTOR(vconv_f322s32c)
VECTOR(vconv_f322s32f) VECTOR(vconv_f322s32z) VECTOR(vconv_f322s64a) VECTOR(vconv_f322s64r) VECTOR(vconv_f322s64c)
VECTOR(vconv_f322s64f) VECTOR(vconv_f322s64z) VECTOR(vconv_f322f32a) VECTOR(vconv_f322f32r) VECTOR(vconv_f322f32c)
VECTOR(vconv_f322f32f) VECTOR(vconv_f322f32z) VECTOR(vconv_f162f32) VECTOR(vconv_f162s8) VECTOR(vconv_f162s8a)
VECTOR(vconv_f162s8r) VECTOR(vconv_f162s8c) VECTOR(vconv_f162s8f) VECTOR(vconv_f162s8z) VECTOR(vconv_f162u8)
VECTOR(vconv_f162u8a) VECTOR(vconv_f162u8r) VECTOR(vconv_f162u8c) VECTOR(vconv_f162u8f) VECTOR(vconv_f162u8z)
VECTOR(vconv_f162s16a) VECTOR(vconv_f162s16r) VECTOR(vconv_f162s16c) VECTOR(vconv_f162s16f) VECTOR(vconv_f162s16z)
VECTOR(vconv_f162s32a) VECTOR(vconv_f162s32r) VECTOR(vconv_f162s32c) VECTOR(vconv_f162s32f) VECTOR(vconv_f162s32z)
VECTOR(vconv_f162s4) VECTOR(vconv_f162s4a) VECTOR(vconv_f162s4r) VECTOR(vconv_f162s4c) VECTOR(vconv_f162s4f)
VECTOR(vconv_f162s4z) VECTOR(vconv_bf162f32) VECTOR(vconv_bf162s32a) VECTOR(vconv_bf162s32r) VECTOR(vconv_bf162s32c)
VECTOR(vconv_bf162s32f) VECTOR(vconv_bf162s32z) VECTOR(vconv_s162f16) VECTOR(vconv_s162f16a) VECTOR(vconv_s162f16r)
VECTOR(vconv_s162f16c) VECTOR(vconv_s162f16f) VECTOR(vconv_s162f16z) VECTOR(vconv_s162f32) VECTOR(vconv_s322f32)
VECTOR(vconv_s322f32a) VECTOR(vconv_s322f32r) VECTOR(vconv_s322f32c) VECTOR(vconv_s322f32f) VECTOR(vconv_s322f32z)
VECTOR(vconv_s322s16) VECTOR(vconv_s322s64) VECTOR(vconv_s642f32a) VECTOR(vconv_s642f32r) VECTOR(vconv_s642f32c)
VECTOR(vconv_s642f32f) VECTOR(vconv_s642f32z) VECTOR(vconv_s642s32) VECTOR(vconv_s82f16) VECTOR(vconv_u82f16)
VECTOR(vconv_s42f16) VECTOR(vconv_deq)
COPY(copy_gm_to_ubuf_align_b8) COPY(copy_gm_to_ubuf_align_b16) COPY(copy_gm_to_ubuf_align_b32) COPY(copy_ubuf_to_gm_align_b8)
COPY(copy_ubuf_to_gm_align_b16) COPY(copy_ubuf_to_gm_align_b32) COPY(copy_ubuf_to_ubuf) COPY(copy_ubuf_to_cbuf)
COPY(copy_gm_to_cbuf) COPY(copy_gm_to_cbuf_multi_nd2nz_b8) COPY(copy_gm_to_cbuf_multi_nd2nz_b16)
COPY(copy_gm_to_cbuf_multi_nd2nz_b32s) COPY(copy_matrix_cc_to_gm) COPY(copy_matrix_cc_to_cbuf) COPY(copy_cbuf_to_gm)
COPY(copy_cbuf_to_bt) COPY(copy_cbuf_to_fbuf) COPY(copy_cbuf_to_ubuf) COPY(load_cbuf_to_ca) COPY(load_cbuf_to_cb)
COPY(load_cbuf_to_ca_transpose) COPY(load_cbuf_to_cb_transpose) COPY(img2colv2_cbuf_to_ca) COPY(img2colv2_cbuf_to_cb)
COPY(create_cbuf_matrix) COPY(create_ca_matrix) COPY(create_cb_matrix)
CUBE(mad) CUBE(mad_tf32) CUBE(mad_s8) CUBE(mad_mx)
OTHER(set_flag) OTHER(wait_flag) OTHER(wait_flag_dev) OTHER(ffts_cross_core_sync) OTHER(set_cross_core)
OTHER(dcci) OTHER(dsb) OTHER(set_intra_block) OTHER(wait_intra_block)
OTHER(set_cmpmask) OTHER(set_ctrl) OTHER(get_ctrl)
OTHER(set_deqscale) OTHER(set_ffts_base_addr) OTHER(set_fmatrix) OTHER(set_fmatrix_b) OTHER(set_fpc) OTHER(set_l3d_rpt)
OTHER(set_mov_pad_val) OTHER(set_nd_para) OTHER(set_padding) OTHER(set_quant_pre) OTHER(set_quant_post)
OTHER(set_st_atomic_cfg) OTHER(set_va_reg_sb) OTHER(set_atomic_none) OTHER(set_atomic_add) OTHER(set_atomic_f16)
OTHER(set_atomic_bf16) OTHER(set_atomic_f32) OTHER(set_atomic_s8) OTHER(set_atomic_s16) OTHER(set_atomic_s32)
OTHER(get_block_num) OTHER(get_block_idx) OTHER(get_subblockdim) OTHER(get_subblockid) OTHER(get_rsvd_cnt) OTHER(get_vms4_sr)
OTHER(ld_dev) OTHER(st_atomic) OTHER(sbitset0) OTHER(sbitset1)

inline void pipe_barrier(pipe_t) { counted(BARRIER_CALL, 1); }
inline void set_mask_count() {
    counting_elements = true;
    counted(OTHER_CALL, 1);
}
inline void set_mask_norm() {
    counting_elements = false;
    counted(OTHER_CALL, 1);
}
inline void set_vector_mask(uint64_t, uint64_t low) {
    counted_elements = low;
    counted(OTHER_CALL, 1);
}
// An address within a buffer of the core. Some headers read a scalar there, which is then any.
extern char core_memory[];
inline uint64_t get_imm(uint64_t address) { return reinterpret_cast<uint64_t>(core_memory) + address; }

// The types as on the device, but without its attribute for functions, and with the BF16 of above.
#define __COSTMODEL
#define __CCE_AICORE__ 220
#define bfloat16_t bfloat16_of_the_cost_model
#include <pto/common/type.hpp>
#undef bfloat16_t
#undef __CCE_AICORE__
#undef __COSTMODEL
#define PTO_COMM_NOT_SUPPORTED
#include <pto/common/kernel_meta.hpp>
#include <pto/common/memory.hpp>
#include <pto/common/arch_macro.hpp>
#include <pto/common/arch_capability.hpp>
#include <pto/common/pto_tile.hpp>
#include <pto/common/pto_instr.hpp>

#include "TileOpImpl.h"
