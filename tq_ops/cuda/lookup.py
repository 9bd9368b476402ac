"""Looking up the centroids of two 4-bit levels a byte: byte permutations on a GPU, loads in FP32 and in the interpreter."""

import triton
import triton.language as tl

# Four bytes of codes in $4, their low levels' centroids in $0 and $1, their high levels' in $2 and $3, two FP16 each.
# Level n >= 8 is +c[n & 7], level n < 8 is -c[~n & 7]: eight magnitudes fill two words of high bytes ($5, $9) and two of
# low bytes ($13, $17), and `prmt` picks four bytes by four nibbles at once. Of a nibble whose top bit is set `prmt` returns
# the sign of the byte, eight times: of 0x40 ($21) that is 0, which leaves the sign bits, halved, of negative levels.
# Each word is passed four times, once for each of the four codes; all four are the same register.
_PERMUTE = tl.constexpr("""
{
    .reg .b32 negative, index, more, codes, high, low, sign;
    not.b32 negative, $4;
    and.b32 negative, negative, 0x88888888;
    shr.u32 index, negative, 3;
    sub.u32 index, negative, index;
    xor.b32 index, index, $4;
    and.b32 index, index, 0x77777777;
    prmt.b32 high, $5, $9, index;
    prmt.b32 low, $13, $17, index;
    prmt.b32 sign, $21, $21, $4;
    mad.lo.u32 high, sign, 2, high;
    prmt.b32 $0, low, high, 0x6240;
    prmt.b32 $2, low, high, 0x7351;
    shr.u32 more, index, 16;
    shr.u32 codes, $4, 16;
    prmt.b32 high, $5, $9, more;
    prmt.b32 low, $13, $17, more;
    prmt.b32 sign, $21, $21, codes;
    mad.lo.u32 high, sign, 2, high;
    prmt.b32 $1, low, high, 0x6240;
    prmt.b32 $3, low, high, 0x7351;
}
""")
_OPERANDS = tl.constexpr("=r,=r,=r,=r,r" + ",r" * 20)


@triton.jit
def load_words(words):
    """The five words of `Layout.words` as scalars, to be kept in registers."""
    return tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3), tl.load(words + 4)


@triton.jit
def centroids_of(codes, table, words, TYPE: tl.constexpr, PERMUTE: tl.constexpr):
    """Centroids [..., n] of the low and of the high levels of codes [..., n] uint8.

    With PERMUTE they are FP16, from `words` of `load_words`; without, those of `table` [16] fp32 as TYPE.
    """
    if PERMUTE:
        high0, high1, low0, low1, sign = words
        return tl.inline_asm_elementwise(
            _PERMUTE, _OPERANDS, [codes, high0, high1, low0, low1, sign],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    level = codes.to(tl.int32)
    return tl.load(table + (level & 15)).to(TYPE), tl.load(table + (level >> 4)).to(TYPE)
