// y = x · weightᵀ for a few tokens and codes of 4 bits: every warp has a ring of its own in shared memory, fills it
// itself, and meets the others once, when all its sums are there.
//
// In front of this text are warp_instructions.cu, warp_lane.cu and warp_unit_memory.cu.

__device__ void multiply(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
    if (HALF)
        multiply_add(sums, left, right);
    else
        multiply_add_bfloats(sums, left, right);
}

// Tokens' inputs of a step as right operands: by part of the step, two products each.
struct Inputs {
    unsigned of[PARTS][2][2];
    // By what sums of products of `128 + code` are too high, negated, by group: of two tokens, for a zero point of 8, or,
    // where groups have their own, of those of 1.
    float offsets[GROUPS][2];

    __device__ void load(const Problem& problem, const Lane& at, int step) {
        const unsigned short* place = problem.x + static_cast<long long>(at.row) * problem.x_stride +
                                      static_cast<long long>(step) * STEP + at.pair * 8;
        const bool there = at.row < problem.tokens && step < STEPS;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const uint4 eight = there ? load_inputs(place + part * (STEP / PARTS)) : make_uint4(0, 0, 0, 0);
            of[part][0][0] = eight.x;
            of[part][0][1] = eight.y;
            of[part][1][0] = eight.z;
            of[part][1][1] = eight.w;
        }
    }

    __device__ void add_up() {
        if (SUBTRACTS) return;
        const unsigned left[4] = {LESS, LESS, LESS, LESS};
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float sums[2][4] = {};
#pragma unroll
            for (int part = group * GROUP_PARTS; part < (group + 1) * GROUP_PARTS; ++part)
#pragma unroll
                for (int half = 0; half < 2; ++half) multiply(sums[half], left, of[part][half]);
            offsets[group][0] = sums[0][0] + sums[1][0];
            offsets[group][1] = sums[0][1] + sums[1][1];
        }
    }
};

// Two codes as numbers: less zero points that lie in the low bits of ONE likewise, or `128 + code`.
__device__ unsigned numbers_of(unsigned units, int part, unsigned zero) {
    const unsigned numbers = masked_with(units >> 4 * part, 0x000F000Fu, ONE);
    return SUBTRACTS ? difference_of_halves(numbers, zero) : numbers;
}

__device__ float scale_at(unsigned address) {
    const unsigned bits = load_short(address);
    return HALF_SCALES ? widened_half(static_cast<unsigned short>(bits)) : __uint_as_float(bits << 16);
}

// By what sums of two tokens in a row are too high, negated.
__device__ float2 excess_of(const float (&offsets)[2], unsigned zero) {
    const float factor = ZEROS ? 128.0f + static_cast<float>(zero) : 1.0f;
    return SUBTRACTS ? make_float2(0.0f, 0.0f) : make_float2(offsets[0] * factor, offsets[1] * factor);
}

// Adds the products of a tile's step to its sums.
__device__ void add_tile(float (&total)[4], const Inputs& inputs, const Lane& at, unsigned codes, unsigned factors) {
    const uint4 low = load_piece(codes + at.lane * PIECE_BYTES);
    const uint4 high = load_piece(codes + at.lane * PIECE_BYTES + HALF_TILE_BYTES);
    const unsigned first[4] = {low.x, low.y, low.z, low.w}, second[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const unsigned zeros = factors + GROUPS * SCALE_BYTES + group * ZERO_BYTES + at.row;
        const unsigned zero = ZEROS ? load_byte(zeros) : 8, other_zero = ZEROS ? load_byte(zeros + 8) : 8;
        const unsigned less = ONE | zero * 0x00010001u, other_less = ONE | other_zero * 0x00010001u;
        float sums[2][4] = {};
#pragma unroll
        for (int part = group * GROUP_PARTS; part < (group + 1) * GROUP_PARTS; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned left[4] = {
                    numbers_of(first[2 * half], part, less), numbers_of(second[2 * half], part, other_less),
                    numbers_of(first[2 * half + 1], part, less), numbers_of(second[2 * half + 1], part, other_less)};
                multiply(sums[half], left, inputs.of[part][half]);
            }
        // Added at last: products need not wait for them.
        const float2 excess = excess_of(inputs.offsets[group], zero);
        const float2 other_excess = excess_of(inputs.offsets[group], other_zero);
        const unsigned scales = factors + group * SCALE_BYTES + 2 * at.row;
        const float scale = scale_at(scales), other_scale = scale_at(scales + 16);
        total[0] += (sums[0][0] + sums[1][0] + excess.x) * scale;
        total[1] += (sums[0][1] + sums[1][1] + excess.y) * scale;
        total[2] += (sums[0][2] + sums[1][2] + other_excess.x) * other_scale;
        total[3] += (sums[0][3] + sums[1][3] + other_excess.y) * other_scale;
    }
}

__device__ void add_stage(float (&totals)[WIDTH][4], const Inputs& inputs, const Lane& at, unsigned stage) {
#pragma unroll
    for (int place = 0; place < WIDTH; ++place)
        add_tile(totals[place], inputs, at, stage + place * TILE_BYTES, stage + FACTORS_AT + place * FACTOR_BYTES);
}

// Until the stage that is read next is full, and asks for one more.
__device__ void await_stage(Fetcher& fetcher, unsigned free) {
    wait_copies<STAGES - 2>();
    // All lanes' factors are here, and all have read those of the stage that is filled next.
    __syncwarp();
    fetcher.ask(free);
}

__device__ void go_on(unsigned ring, unsigned& stage, unsigned& free) {
    free = stage;
    stage = stage + STAGE_BYTES == ring + RING_BYTES ? ring : stage + STAGE_BYTES;
}

// A warp's sums of a turn's rows, token by token.
__device__ void leave_sums(const float (&totals)[WIDTH][4], const Lane& at, unsigned scratch, int turn) {
#pragma unroll
    for (int place = 0; place < WIDTH; ++place)
#pragma unroll
        for (int each = 0; each < 4; ++each) {
            const int token = 2 * at.pair + each % 2;
            const int row = (turn * WIDTH + place) * ROW_TILE + at.row + each / 2 * 8;
            if (token < TOKENS) store_number(scratch + 4 * (token * TOKEN_SUMS + row), totals[place][each]);
        }
}

__device__ float summed_over_lanes(float sum) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, apart);
    return sum;
}

// What the norm in front has left to do for a token.
__device__ float factor_of(const Problem& problem, const Lane& at, int token) {
    float sum = 0.0f;
    if (token < problem.tokens)
        for (int part = at.lane; part < problem.front_parts; part += 32)
            sum += problem.front_squares[token * problem.front_parts + part];
    return inverse_root(summed_over_lanes(sum) / problem.inputs + problem.eps);
}

__device__ float widened(unsigned short bits) {
    return HALF ? widened_half(bits) : __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ unsigned short rounded(float number) {
    return static_cast<unsigned short>(HALF ? rounded_halves(number, 0.0f) : rounded_bfloats(number, 0.0f));
}

// Of a token one of an output's rows, of all warps: by the norm's factor, and with its bias.
__device__ float summed(const Problem& problem, unsigned scratch, int row, int output, float factor) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += load_number(scratch + warp * SUM_BYTES + 4 * row);
    if (FRONT) sum *= factor;
    if (BIAS) sum += widened(problem.bias[output]);
    return sum;
}

// Writes one of a token's outputs, which its CTA has at `place`. Returns its square.
__device__ float finish(
    const Problem& problem, unsigned scratch, int token, int number, int place, float factor, float residual) {
    const unsigned sums = scratch + 4 * token * TOKEN_SUMS;
    float value;
    if (GATED) {
        const int row = place / ROW_TILE * (2 * ROW_TILE) + place % ROW_TILE;
        const float gate = summed(problem, sums, row, number, factor);
        const float up = summed(problem, sums, row + ROW_TILE, number + problem.outputs, factor);
        value = gate / (1.0f + power_of_two(-LOG2E * gate)) * up;
    } else {
        value = summed(problem, sums, place, number, factor);
    }
    const unsigned short bits = rounded(value + residual);
    problem.out[static_cast<long long>(token) * problem.out_stride + number] = bits;
    const float stream = widened(bits);
    if (BEHIND)
        problem.weighted[static_cast<long long>(token) * problem.outputs + number] =
            rounded(stream * widened(problem.norm_weight[number]));
    return stream * stream;
}

extern "C" __global__ void __maxnreg__(REGISTERS) warp_units(const __grid_constant__ Problem problem) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Lane at;
    let_next_start();
    const unsigned rings = shared_address(shared), ring = rings + at.warp * RING_BYTES;
    const unsigned all_sums = rings + WARPS * RING_BYTES, scratch = all_sums + at.warp * SUM_BYTES;
    const Share share(problem);
    Fetcher fetcher(problem, share, at);
#pragma unroll 1
    for (int stage = 0; stage < AHEAD; ++stage) fetcher.ask(ring + stage * STAGE_BYTES);
    wait_for_inputs();
    Inputs inputs[KEPT ? KEPT : 1];
#pragma unroll
    for (int each = 0; each < (KEPT ? KEPT : 1); ++each) inputs[each].load(problem, at, at.warp + each * WARPS);
#pragma unroll 1
    for (int stage = AHEAD; stage < STAGES - 1; ++stage) fetcher.ask(ring + stage * STAGE_BYTES);
    // Of the outputs that the warp writes.
    const int token = at.warp % TOKENS, slice = at.warp / TOKENS;
    const float factor = FRONT ? factor_of(problem, at, token) : 1.0f;
    // The stage that is read next, and the one that may be filled again.
    unsigned stage = ring, free = ring + (STAGES - 1) * STAGE_BYTES;
#pragma unroll
    for (int each = 0; each < KEPT; ++each) inputs[each].add_up();
#pragma unroll 1
    for (int turn = 0; turn < share.turns(); ++turn) {
        float totals[WIDTH][4] = {};
        if (KEPT) {
#pragma unroll
            for (int each = 0; each < KEPT; ++each)
                if (at.warp + each * WARPS < STEPS) {
                    await_stage(fetcher, free);
                    add_stage(totals, inputs[each], at, stage);
                    go_on(ring, stage, free);
                }
        } else {
#pragma unroll 1
            for (int step = at.warp; step < STEPS; step += WARPS) {
                await_stage(fetcher, free);
                inputs[0].add_up();
                add_stage(totals, inputs[0], at, stage);
                // Of another turn where there is no next step.
                inputs[0].load(problem, at, step + WARPS < STEPS ? step + WARPS : at.warp);
                go_on(ring, stage, free);
            }
        }
        leave_sums(totals, at, scratch, turn);
    }
    // The warp's outputs are those from `first` on, round by round.
    const int first = slice * 32 + at.lane, outputs = token < problem.tokens ? share.count * ROW_TILE : 0;
    float residuals[ROUNDS] = {};
    if (RESIDUAL) {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round)
            if (first + round * ROUND_OUTPUTS < outputs)
                residuals[round] = widened(
                    problem.residual[static_cast<long long>(token) * problem.residual_stride + share.first * ROW_TILE +
                                     first + round * ROUND_OUTPUTS]);
    }
    __syncthreads();
    float squares = 0.0f;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int place = first + round * ROUND_OUTPUTS;
        if (place < outputs)
            squares += finish(
                problem, all_sums, token, share.first * ROW_TILE + place, place, factor, residuals[round]);
    }
    if (BEHIND && slice < SQUARE_SLICES) {
        squares = summed_over_lanes(squares);
        const int part = static_cast<int>(blockIdx.x) * SQUARE_SLICES + slice;
        if (at.lane == 0 && token < problem.tokens)
            problem.squares[token * (static_cast<int>(gridDim.x) * SQUARE_SLICES) + part] = squares;
    }
}
