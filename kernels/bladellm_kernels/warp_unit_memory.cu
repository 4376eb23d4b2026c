// What a CTA of `warp_units.cu` reads, and how each warp fills its ring.
//
// A CTA has up to TURNS · WIDTH tiles of 16 rows of the weight, each of its warps every WARPS-th step of 128 inputs of
// them. Codes lie in memory as products want them (weight_units.py): a lane copies the 16 bytes of two rows that it reads
// itself.
//
// Defined in front of this text, by warp_units.py: STEPS of the weight; KEPT, a warp's steps whose inputs stay in
// registers, or 0; TURNS; WIDTH, tiles of a stage; STAGES of a ring, AHEAD of which are asked for before the inputs are
// ready; WARPS; TOKENS, 1, 2, 4 or 8; REGISTERS of a thread at most; HALF, 1 for inputs and outputs in float16 and 0 for
// bfloat16; HALF_SCALES, likewise; ZEROS, whether groups have zero points, else they are 8; GROUP_PARTS, fourths of a step
// that share a scale, and GROUP_STEPS, steps that do, 0 for all; GATED, 1 where an output is silu(first half) · second
// half; FRONT, whether a norm is in front, BEHIND, behind; RESIDUAL and BIAS.

constexpr int ROW_TILE = 16, BLOCK_TILES = 4;
constexpr int PARTS = 4;
constexpr int STEP = 128;
constexpr int GROUPS = PARTS / GROUP_PARTS;
// Of a tile's codes in a step, and of the rows of which a lane has one.
constexpr unsigned TILE_BYTES = 1024, HALF_TILE_BYTES = 512;
constexpr unsigned SCALE_BYTES = 2 * ROW_TILE, ZERO_BYTES = ZEROS * ROW_TILE;
constexpr unsigned FACTOR_BYTES = GROUPS * (SCALE_BYTES + ZERO_BYTES);
constexpr int FACTOR_PIECES = FACTOR_BYTES / PIECE_BYTES;
constexpr unsigned FACTORS_AT = WIDTH * TILE_BYTES;
constexpr unsigned STAGE_BYTES = FACTORS_AT + WIDTH * FACTOR_BYTES;
constexpr unsigned RING_BYTES = STAGES * STAGE_BYTES;
static_assert(WIDTH * FACTOR_PIECES <= 32, "a lane copies one piece of scales and zero points");

constexpr int ROWS = TURNS * WIDTH * ROW_TILE;
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;
// Of a token in what warps leave: tokens beside each other lie in other banks.
constexpr int TOKEN_SUMS = ROWS + (TOKENS > 1 ? 4 : 0);
constexpr unsigned SUM_BYTES = 4 * TOKENS * TOKEN_SUMS;
static_assert(!GATED || WIDTH == 2, "the gate's rows and those that they multiply");

// Warps share the tokens' outputs: some of the same token, 32 outputs each.
constexpr int SLICES = WARPS / TOKENS;
constexpr int ROUND_OUTPUTS = 32 * SLICES;
constexpr int ROUNDS = (OUTPUTS + ROUND_OUTPUTS - 1) / ROUND_OUTPUTS;
constexpr int SQUARE_SLICES = (OUTPUTS + 31) / 32 < SLICES ? (OUTPUTS + 31) / 32 : SLICES;

// Codes lie in the low bits of 1024 in float16, of 128 in bfloat16. Sums of products of `1024 + code` would lose too much
// of what is left when those of 1024 are taken away.
constexpr bool SUBTRACTS = HALF;
constexpr unsigned ONE = HALF ? 0x64006400 : 0x43004300;
// In bfloat16, twice: -1, or -136.
constexpr unsigned LESS = ZEROS ? 0xBF80BF80 : 0xC308C308;

struct Problem {
    const unsigned short* x;
    const unsigned char* codes;
    const unsigned char* scales;
    const unsigned char* zeros;
    const unsigned short* bias;
    const unsigned short* residual;
    unsigned short* out;
    const float* front_squares;
    const unsigned short* norm_weight;
    unsigned short* weighted;
    float* squares;
    int x_stride, residual_stride, out_stride;
    // outputs: of all CTAs.
    int tokens, outputs, groups, front_parts;
    float inputs, eps;
};

// Of all tiles of outputs, of 16 rows, those of this CTA: as many as others have, or one less.
struct Share {
    int first, count;

    __device__ explicit Share(const Problem& problem) {
        const int tiles = problem.outputs / ROW_TILE, ctas = static_cast<int>(gridDim.x);
        first = static_cast<int>(blockIdx.x) * tiles / ctas;
        count = (static_cast<int>(blockIdx.x) + 1) * tiles / ctas - first;
    }

    __device__ int turns() const { return GATED ? count : (count + WIDTH - 1) / WIDTH; }

    // The weight's tile that comes at a turn and place; beyond the last one that one again.
    __device__ int tile(const Problem& problem, int turn, int place) const {
        if (GATED) return first + turn + place * (problem.outputs / ROW_TILE);
        return first + min(turn * WIDTH + place, count - 1);
    }
};

// Asks for one stage after the other: a warp's steps of one turn after another.
struct Fetcher {
    const Problem& problem;
    Share share;
    int lane, warp, turns, turn, step;
    // The lane's pieces of a turn's tiles in the warp's next step.
    const unsigned char* codes[WIDTH];
    // What the lane copies of the scales and zero points of a step: of which tile, and where that is in a group's.
    int factor_place, factor_group, factor_bytes, factor_piece;
    const unsigned char* factors;

    __device__ Fetcher(const Problem& given, const Share& its, const Lane& at)
        : problem(given), share(its), lane(at.lane), warp(at.warp), turns(at.warp < STEPS ? its.turns() : 0), turn(0),
          step(at.warp) {
        factor_place = lane / FACTOR_PIECES;
        const int piece = lane % FACTOR_PIECES;
        const bool scale = piece < 2 * GROUPS;
        factor_group = scale ? piece / 2 : piece - 2 * GROUPS;
        factor_bytes = scale ? 2 : 1;
        factor_piece = scale ? piece % 2 * static_cast<int>(PIECE_BYTES) : 0;
        open();
    }

    // A turn.
    __device__ void open() {
#pragma unroll
        for (int place = 0; place < WIDTH; ++place) {
            const int tile = share.tile(problem, turn, place);
            const long long block = static_cast<long long>(tile / BLOCK_TILES) * STEPS + warp;
            codes[place] = problem.codes + (block * BLOCK_TILES + tile % BLOCK_TILES) * TILE_BYTES + lane * PIECE_BYTES;
        }
        const int tile = share.tile(problem, turn, factor_place);
        const long long row = static_cast<long long>(tile / BLOCK_TILES) * problem.groups * BLOCK_TILES + tile % BLOCK_TILES;
        factors = (factor_bytes == 2 ? problem.scales : problem.zeros) + row * (ROW_TILE * factor_bytes) + factor_piece;
    }

    __device__ void ask(unsigned stage) {
        if (turn < turns) {
            const unsigned to = stage + lane * PIECE_BYTES;
#pragma unroll
            for (int place = 0; place < WIDTH; ++place) {
                copy_piece(to + place * TILE_BYTES, codes[place]);
                copy_piece(to + place * TILE_BYTES + HALF_TILE_BYTES, codes[place] + HALF_TILE_BYTES);
                codes[place] += WARPS * BLOCK_TILES * TILE_BYTES;
            }
            if (lane < WIDTH * FACTOR_PIECES) {
                const int of_step = GROUP_STEPS == 0 ? 0 : step / (GROUP_STEPS ? GROUP_STEPS : 1);
                const int group = GROUPS > 1 ? step * GROUPS + factor_group : of_step;
                copy_piece(to + FACTORS_AT, factors + group * (BLOCK_TILES * ROW_TILE) * factor_bytes);
            }
            step += WARPS;
            if (step >= STEPS) {
                step = warp;
                if (++turn < turns) open();
            }
        }
        close_copies();
    }
};
