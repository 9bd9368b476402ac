// Every kernel over one register type. Of nibbles, the values of few words are looked up in registers of `Narrow`.
#include "float_keys.h"
#include "float_planes.h"
#include "float_columns.h"
#include "float_values.h"
#include "float_products.h"
#include "vectors.h"
#include "unpacked.h"
#include "stored_numbers.h"
#include "kept.h"
#include "attention.h"
#include "pass.h"
#include "pass_attention.h"
#include "projection.h"
#include "block_types.h"
#include "block_projection.h"
#include "elementwise.h"
#include "delta.h"

template <class Simd, class Narrow> struct InFloats {
    template <int R> using Products = FloatProducts<Simd, Narrow, R>;
};

// Of weights in blocks, `Words` are numbers of half a block and `Lanes` sums of rows.
template <class Simd, class Narrow, class Words, class Lanes> constexpr Kernels every_kernel() {
    return {
        scratch_of_passes<Simd, InFloats<Simd, Narrow>::template Products>,
        attend_pass<Simd, InFloats<Simd, Narrow>::template Products>,
        numbers_of<Simd>,
        rotate<Simd>,
        nullptr,
        quantize<Simd>,
        prepared_floats<Simd>,
        prepare<Simd>,
        project<Simd>,
        prepare_blocks<Narrow>,
        project_blocks<Simd, Words, Lanes>,
        rms_norm<Simd>,
        rope,
        gated_mul<Simd>,
        delta_inputs<Simd>,
        delta_columns<Simd>,
        widen,
        narrow,
        add_up,
    };
}
