// What a warp of `warp_rings.cu` makes of its tokens of a block: scores, and values weighed by them.
//
// Scores are transposed, as in ring_decode_hopper.py: keys are the left operand, the query rows the right one. Codes are
// read in units of 16 bits, turned into subnormal float16, and mended, as kv_codes_triton.py says.

__device__ float lower_half(unsigned pair) { return widened_half(static_cast<unsigned short>(pair & 0xFFFF)); }

__device__ float upper_half(unsigned pair) { return widened_half(static_cast<unsigned short>(pair >> 16)); }

// Of queries.
__device__ float lower_number(unsigned pair) { return HALF ? lower_half(pair) : __uint_as_float(pair << 16); }

__device__ float upper_number(unsigned pair) { return HALF ? upper_half(pair) : __uint_as_float(pair & 0xFFFF0000); }

// Of outputs.
__device__ unsigned rounded(float low, float high) {
    return HALF ? rounded_halves(low, high) : rounded_bfloats(low, high);
}

// The parts of two units: low and high nibbles of their lower and of their upper bytes, high ones 16-fold.
template <bool KEYS>
__device__ void separate(unsigned (&parts)[4], unsigned units) {
    const unsigned upper = __byte_perm(units, 0, 0x4341);
    parts[0] = units & 0x000F000F;
    parts[1] = units & 0x00F000F0;
    parts[2] = upper & 0x000F000F;
    // Of values the whole byte.
    parts[3] = KEYS ? difference_of_halves(upper, parts[2]) : upper;
}

// The right operands of scores, by 16 units and part. For the two rows of a lane's scores: what they begin with, or
// what zeros are multiplied by; and the factor that makes them powers of two.
struct Queries {
    unsigned parts[2][4][2];
    float sums[2], factors[2];
};

__device__ void ask_queries(uint2 (&numbers)[2][2][2], const Problem& problem, const Lane& at, int sequence, int head) {
    const auto place = problem.q + static_cast<long long>(sequence) * problem.q_token_stride +
                       static_cast<long long>(head * GROUP + at.row) * problem.q_head_stride + 4 * at.pair;
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int more = 0; more < 2; ++more)
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                numbers[step][more][high] = make_uint2(0, 0);
                if (at.row < GROUP)
                    numbers[step][more][high] =
                        *reinterpret_cast<const uint2*>(place + 32 * step + 16 * more + HEAD_DIM / 2 * high);
            }
}

// float16, with the largest of a row between 1 and 2; those that meet low nibbles 16-fold, as high ones count.
__device__ void turn_queries(Queries& queries, const uint2 (&numbers)[2][2][2], const Lane& at, float scale) {
    float largest = 0.0f, sum = 0.0f;
#pragma unroll
    for (int each = 0; each < 8; ++each) {
        const uint2 four = numbers[each / 4][each / 2 % 2][each % 2];
        largest = fmaxf(largest, fmaxf(fabsf(lower_number(four.x)), fabsf(upper_number(four.x))));
        largest = fmaxf(largest, fmaxf(fabsf(lower_number(four.y)), fabsf(upper_number(four.y))));
    }
    largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, 2));
    // 2^e with 2^e <= largest < 2^(e + 1), and 2^-e, from the exponent's bits.
    const unsigned exponent = __float_as_uint(largest) & 0x7F800000;
    const float shrink = __uint_as_float(0x7F000000 - exponent);
    // Not 0, by which hidden scores would be no numbers.
    const float factor = fmaxf(scale * LOG2E / KEY_STEP * __uint_as_float(exponent), 1e-30f);
#pragma unroll
    for (int each = 0; each < 8; ++each) {
        const int step = each / 4, more = each / 2 % 2, high = each % 2;
        const uint2 four = numbers[step][more][high];
        // Of two units the first numbers, and the second ones.
        unsigned first = rounded_halves(lower_number(four.x) * shrink, lower_number(four.y) * shrink);
        unsigned second = rounded_halves(upper_number(four.x) * shrink, upper_number(four.y) * shrink);
        sum += lower_half(first) + upper_half(first) + lower_half(second) + upper_half(second);
        if (high == 0) {
            const unsigned SIXTEEN = 0x4C004C00;
            first = product_of_halves(first, SIXTEEN);
            second = product_of_halves(second, SIXTEEN);
        }
        queries.parts[step][high][more] = first;
        queries.parts[step][2 + high][more] = second;
    }
    sum += __shfl_xor_sync(WHOLE_WARP, sum, 1);
    sum += __shfl_xor_sync(WHOLE_WARP, sum, 2);
    sum *= AFFINE ? KEY_STEP : -OFFSET * KEY_STEP;
#pragma unroll
    for (int each = 0; each < 2; ++each) {
        // A lane's operand is of row `row`, its sums are of rows 2 pair and 2 pair + 1.
        const int from = 4 * (2 * at.pair + each);
        queries.sums[each] = __shfl_sync(WHOLE_WARP, sum, from);
        queries.factors[each] = __shfl_sync(WHOLE_WARP, factor, from);
    }
}

// Of a lane's two rows, after some blocks. Totals and shifts: of its tokens alone. outputs: by part and 16 units.
// excess: the sums of probabilities as they are rounded, what a part of ones would get.
struct State {
    float maxima[2], totals[2], shifts[2], outputs[4][2][4], excess[4];

    __device__ void clear() {
#pragma unroll
        for (int each = 0; each < 2; ++each) {
            maxima[each] = LOWEST;
            totals[each] = shifts[each] = 0.0f;
        }
#pragma unroll
        for (int each = 0; each < 32; ++each) outputs[each / 8][each / 4 % 2][each % 4] = 0.0f;
#pragma unroll
        for (int each = 0; each < 4; ++each) excess[each] = 0.0f;
    }
};

// Scales or zeros of a lane's four tokens.
__device__ void load_factors(float (&factors)[4], unsigned address) {
    const uint2 words = load_words(address);
    factors[0] = lower_half(words.x);
    factors[1] = upper_half(words.x);
    factors[2] = lower_half(words.y);
    factors[3] = upper_half(words.y);
}

// Of two tiles of 16 tokens, of each a lane's tokens 2 tile and 2 tile + 1 in both rows. Not yet times the factor.
__device__ void score(float (&scores)[2][4], const Queries& queries, const Places& places, unsigned stage) {
    float scales[4], zeros[4];
    load_factors(scales, stage + places.factors);
    if (AFFINE) load_factors(zeros, stage + places.factors + PLANE_BYTES);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        // Two sums do not wait for one another.
        float sums[2][4];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int each = 0; each < 4; ++each)
                sums[step][each] = AFFINE || step == 1 ? 0.0f : queries.sums[each % 2];
            unsigned units[4], parts[4][4];
            load_matrices(units, ((stage + places.keys) ^ step * 2 * PIECE_BYTES) + tile * 2 * LINE_BYTES);
#pragma unroll
            for (int each = 0; each < 4; ++each) {
                unsigned separated[4];
                separate<true>(separated, units[each]);
#pragma unroll
                for (int part = 0; part < 4; ++part) parts[part][each] = separated[part];
            }
#pragma unroll
            for (int part = 0; part < 4; ++part) multiply_add(sums[step], parts[part], queries.parts[step][part]);
        }
#pragma unroll
        for (int each = 0; each < 4; ++each) {
            const int token = 2 * tile + each / 2;
            scores[tile][each] = (sums[0][each] + sums[1][each]) * scales[token];
            if (AFFINE) scores[tile][each] += zeros[token] * queries.sums[each % 2];
        }
    }
}

// Of `left` tokens the others: memory there may hold anything.
__device__ void hide(float (&scores)[2][4], float (&scales)[4], float (&zeros)[4], int left) {
    const int row = lane_of_warp() / 4;
#pragma unroll
    for (int token = 0; token < 4; ++token)
        if (4 * row + token >= left) {
            scores[token / 2][token % 2 * 2] = scores[token / 2][token % 2 * 2 + 1] = __uint_as_float(0xFF800000);
            scales[token] = zeros[token] = 0.0f;
        }
}

__device__ void add_values(
    State& state, const unsigned (&probabilities)[2][2], const float (&decays)[2], const Places& places,
    unsigned stage) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int part = 0; part < 4; ++part)
#pragma unroll
            for (int each = 0; each < 4; ++each) state.outputs[part][tile][each] *= decays[each % 2];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            unsigned units[4], parts[4][4];
            load_transposed(units, ((stage + places.values) ^ tile * 2 * PIECE_BYTES) + step * 2 * LINE_BYTES);
#pragma unroll
            for (int each = 0; each < 4; ++each) {
                unsigned separated[4];
                separate<false>(separated, units[each]);
#pragma unroll
                for (int part = 0; part < 4; ++part) parts[part][each] = separated[part];
            }
#pragma unroll
            for (int part = 0; part < 4; ++part)
                multiply_add(state.outputs[part][tile], parts[part], probabilities[step]);
        }
    }
    if (!AFFINE) {
        const unsigned ONES = 0x3C003C00;
        const unsigned ones[4] = {ONES, 0, ONES, 0};
        state.excess[0] *= decays[0];
        state.excess[1] *= decays[1];
        multiply_add(state.excess, ones, probabilities[0]);
        multiply_add(state.excess, ones, probabilities[1]);
    }
}

// A warp's tokens of a block, of which the sequence has `left`, more than 32 or less than 0 perhaps.
__device__ void add_block(State& state, const Queries& queries, const Places& places, unsigned stage, int left) {
    float scores[2][4], scales[4], zeros[4], decays[2];
    score(scores, queries, places, stage);
    load_factors(scales, stage + places.factors + PLANES / 2 * PLANE_BYTES);
    if (AFFINE) load_factors(zeros, stage + places.factors + (PLANES / 2 + 1) * PLANE_BYTES);
    if (left < TOKENS) hide(scores, scales, zeros, left);
#pragma unroll
    for (int each = 0; each < 2; ++each) {
        float best = fmaxf(fmaxf(scores[0][each], scores[0][2 + each]), fmaxf(scores[1][each], scores[1][2 + each]));
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) best = fmaxf(best, __shfl_xor_sync(WHOLE_WARP, best, apart));
        const float highest = fmaxf(state.maxima[each], best * queries.factors[each] - RAISED);
        decays[each] = power_of_two(state.maxima[each] - highest);
        state.maxima[each] = highest;
        state.totals[each] *= decays[each];
        if (AFFINE) state.shifts[each] *= decays[each];
#pragma unroll
        for (int token = 0; token < 4; ++token) {
            float& score = scores[token / 2][token % 2 * 2 + each];
            score = power_of_two(score * queries.factors[each] - highest);
            state.totals[each] += score;
            if (AFFINE) state.shifts[each] += score * zeros[token];
            score *= scales[token];
        }
    }
    unsigned probabilities[2][2];
#pragma unroll
    for (int token = 0; token < 4; ++token) {
        const float(&two)[4] = scores[token / 2];
        const int first = token % 2 * 2;
        probabilities[token / 2][token % 2] = transposed(rounded_halves(two[first], two[first + 1]));
    }
    add_values(state, probabilities, decays, places, stage);
}
