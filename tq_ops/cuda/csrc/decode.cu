// Decode attention over packed levels: one new token a sequence, in the domain of the codes, merged and rotated back.
//
// Compiled at run time for one shape. Defined by the caller: HEADS KV heads, GROUP query heads of each (up to 16), HEAD_DIM
// (64, 128 or 256; 64 for 4 bits alone), K_BITS and V_BITS of a level (2, 3 or 4), BLOCK tokens of a block (a multiple of 16),
// PROCESSOR_BLOCKS thread blocks a processor, TAIL newest and SINK first tokens that are seen in BF16, WINDOW
// tokens that a query sees, 0 for all. Of learned keys K_LEARNED is 1 and K_BITS is the mean, 2 to 5; K_COLUMNS, K_PARTS and
// K_CUBIC then say what learned.cuh needs.
//
// How it works. `mma.m16n8k16` multiplies 16 rows by 8 columns; the columns are the query heads of a group.
//   Q.K   A = K, 16 tokens x 16 coordinates.  A lane's two numbers of a register are the coordinates j and j + D/2 of one
//         token: exactly the two levels of byte j. So a lane loads a quarter of a token's bytes, and no byte moves again.
//   P.V   A = V transposed, 16 coordinates x 16 tokens. A lane's two numbers are two tokens' same coordinate: the low levels
//         of two bytes, or their high levels, which a shift and a bit select put into one byte.
// Either way one byte names a pair of centroids. A table in shared memory holds the 256 pairs, once for each lane: lane n
// reads bank n alone, and `prmt` puts the byte into the address. Lookups thus neither conflict nor compute.
//
// Levels of 2 bits: a byte holds four, and a shift by two brings the other two to where those of 4 bits lie; the table ignores
// the bits between. Levels of 3 bits have their third in a plane of its own, from where a shift and a bit select bring it.
//
// Each warp takes 32 tokens of every TILE and keeps maximum, sum and output in registers. The thread
// blocks of a KV head share the tiles of all sequences almost evenly (work.cuh). One that holds a whole sequence writes its
// output; of several that share one, each leaves a part, and the last to arrive merges them. Which one that is does not
// change a bit: parts are added in the order of the context.
//
// Tokens that are seen in BF16 are left out here. An earlier launch, of in_bf16.py, attended to them; the block that writes a
// sequence's output adds what it left.
//
// Learned keys: a lane loads a quarter of each column, and makes centroids by arithmetic, two in a register. Logits are
// multiplied by the gain of their query. Keys are stored by stretches of STRETCH positions, and an earlier launch, of
// prologue.py, left one query for each stretch: a warp loads the next one where a stretch begins. All logits of a stretch lack
// the same number, the query's product with K's mean. It is added once, to the maximum, at the stretch's end.

#include "merge.cuh"

static_assert(sizeof(Arguments) == ARGUMENT_BYTES && THREADS == BLOCK_THREADS && TILE == TILE_TOKENS,
              "decode.py says otherwise");

// Grid: [thread blocks that share the work of a KV head, HEADS].
extern "C" __global__ void __launch_bounds__(THREADS, PROCESSOR_BLOCKS) decode(const __grid_constant__ Arguments args) {
    if ((__cvta_generic_to_shared(shared) & 0xffffff) != SHARED_BASE) __trap();
    int head = blockIdx.y, block = blockIdx.x;
    if (block == 0) fetch_rotation(args);
    Division work = divide(args, gridDim.x);
    // A sequence without tokens pads the batch, or all of its tokens are seen in BF16.
    for (int b = block; b < args.sequences; b += gridDim.x)
        if (stored_tokens(args, b) <= 0) {
            if (KEPT) {
                add_in_bf16(args, b, head, false);
                __syncthreads();
                write_out(args, b, head);
                __syncthreads();
            } else {
                for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS)
                    args.out[(long long)(b * HEADS + head) * GROUP * HEAD_DIM + i] = 0;
            }
        }
    if (block >= work.blocks) return;
    int at = work.each ? block : first_of(block, work.tiles, work.blocks);
    int stop = work.each ? block + 1 : first_of(block + 1, work.tiles, work.blocks);
    while (at < stop) {
        State state;
        {
            Piece piece = piece_at(args, work, at, stop);
            if (threadIdx.x == 0) scratch().step = {work, piece, at, stop};
            int origin = origin_of(args, piece.sequence);
            attend(state, args, piece.sequence, head, origin + piece.begin * TILE,
                   origin + min(piece.end * TILE, piece.tokens), first_seen(args, piece.sequence));
        }
        gather_warps(state);
        const Step step = reread(scratch().step);
        const Piece& piece = step.piece;
        bool merges = piece.first == piece.last;
        if (merges) {
            normalize();
        } else {
            leave_part(args, slot_of(block, piece.first, head));
            merges = is_last(args, piece.sequence, head, piece.last - piece.first + 1);
            if (merges) merge_parts(args, head, piece.first, piece.last);
        }
        if (merges) {
            __syncthreads();
            if (KEPT) {
                add_in_bf16(args, piece.sequence, head, true);
                __syncthreads();
            }
            write_out(args, piece.sequence, head);
        }
        __syncthreads();
        work = step.work, stop = step.stop;
        at = step.at + (work.each ? 1 : piece.end - piece.begin);
    }
}
