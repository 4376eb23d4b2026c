// Decode attention of one query token a sequence over 4-bit keys and values: every warp has a ring of its own in shared
// memory, fills it itself, and meets the others at the end of a segment only.
//
// A CTA takes a range of blocks of 128 tokens of a KV head, a warp 32 tokens of every block. Scores are transposed, as
// in ring_decode_hopper.py: keys are the left operand, the query rows the right one. Codes are read in units of 16
// bits, turned into subnormal float16, and mended, as kv_codes_triton.py says.
//
// In a ring, a token's key and value are a line of 128 bytes of eight pieces; piece c lies at c ^ (token / 4 % 8). The
// 16 rows of tile a of a warp's 32 tokens are 4 r + 2 a + h for r of 8 and h of 2, row 8 h + r: what a lane has of two
// tiles are four tokens side by side, and the eight rows of a matrix lie in different banks.
//
// Defined in front of this text, by warp_rings.py: STAGES of a ring; REGISTERS of a thread at most; AFFINE, 1 where
// there are zeros, else codes are 8 too high; HALF, 1 for queries and outputs in float16 and 0 for bfloat16; KV_HEADS;
// GROUP, query heads of one; GRANULE_TOKENS; and ROW_BYTES of the payload, from one token's to the next one's.

constexpr int WARPS = 4;
constexpr int TOKENS = 32;
constexpr int BLOCK = WARPS * TOKENS;
constexpr int HEAD_DIM = 128;
constexpr int ROWS = 8;
constexpr int PLANES = AFFINE ? 4 : 2;
constexpr int SEQUENCE_FIELDS = 5;
constexpr int PROGRAM_FIELDS = 3;

constexpr unsigned LINE_BYTES = 128;
constexpr unsigned PIECE_BYTES = 16;
// A copy of a whole warp.
constexpr int COPY_TOKENS = 4;
constexpr int COPIES = TOKENS / COPY_TOKENS;
constexpr unsigned PLANE_BYTES = 2 * TOKENS;
constexpr int PLANE_PIECES = 4;
constexpr unsigned SCALES_AT = TOKENS * LINE_BYTES;
constexpr unsigned STAGE_BYTES = SCALES_AT + PLANES * PLANE_BYTES;
constexpr unsigned RING_BYTES = STAGES * STAGE_BYTES;

// A warp's state, in a stage that it has read: outputs [rows][numbers], then maxima and totals.
constexpr unsigned STATE_ROW = 4 * HEAD_DIM;
constexpr unsigned MAXIMA_AT = ROWS * STATE_ROW;
constexpr unsigned TOTALS_AT = MAXIMA_AT + 4 * ROWS;
static_assert(TOTALS_AT + 4 * ROWS <= STAGE_BYTES, "a state fits a stage");
static_assert(GROUP <= ROWS && GRANULE_TOKENS % BLOCK == 0, "rows of a tile, and blocks of a granule");

constexpr float LOWEST = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
// What a code of 1 counts among values, and 16 times that, among keys.
constexpr float CODE_STEP = 1.0f / (1 << 24);
constexpr float KEY_STEP = 16.0f * CODE_STEP;
constexpr float OFFSET = 8.0f;
// The exponent by which probabilities are raised before they are multiplied by scales and rounded.
constexpr float RAISED = 2.0f;
constexpr unsigned WHOLE_WARP = 0xFFFFFFFF;

// Strides of queries and outputs in numbers, of memory in bytes.
struct Problem {
    const unsigned short* q;
    const unsigned char* payload;
    const unsigned char* scales;
    const int* table;
    const long long* base_rows;
    const long long* slots;
    const long long* kv_lens;
    const int* programs;
    const int* sequences;
    unsigned short* out;
    float* partial;
    float* lse;
    int q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    int head_bytes, value_bytes, granule_bytes, scale_head_bytes, scale_value_bytes, scale_plane_bytes;
    int table_stride;
    // Whether a kernel in front has waited for the plan: it can be read at once.
    int settled;
    float scale;
};

// --- Instructions ---

__device__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ int lane_of_warp() {
    int lane;
    // Volatile: what is seldom made of it is not kept in registers.
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ void copy_piece(unsigned to, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Zeros, with nothing read, where it is not there.
__device__ void copy_piece(unsigned to, const unsigned char* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int UNDER_WAY>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
}

__device__ void load_matrices(unsigned (&units)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(units[0]), "=r"(units[1]), "=r"(units[2]), "=r"(units[3])
                 : "r"(address)
                 : "memory");
}

__device__ void load_transposed(unsigned (&units)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(units[0]), "=r"(units[1]), "=r"(units[2]), "=r"(units[3])
                 : "r"(address)
                 : "memory");
}

__device__ unsigned transposed(unsigned pair) {
    unsigned turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ void multiply_add(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

__device__ uint2 load_words(unsigned address) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
    return words;
}

__device__ float load_number(unsigned address) {
    float number;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(number) : "r"(address) : "memory");
    return number;
}

__device__ float4 load_numbers(unsigned address) {
    float4 numbers;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(numbers.x), "=f"(numbers.y), "=f"(numbers.z), "=f"(numbers.w)
                 : "r"(address)
                 : "memory");
    return numbers;
}

__device__ void store_number(unsigned address, float number) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(number) : "memory");
}

__device__ void store_pair(unsigned address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

__device__ float binary_log(float number) {
    float log;
    asm("lg2.approx.f32 %0, %1;" : "=f"(log) : "f"(number));
    return log;
}

__device__ unsigned rounded_halves(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ unsigned rounded_bfloats(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ float widened_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ unsigned difference_of_halves(unsigned pair, unsigned less) {
    unsigned difference;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(pair), "r"(less));
    return difference;
}

__device__ unsigned product_of_halves(unsigned pair, unsigned factors) {
    unsigned product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}

// --- Pairs of 16 bits ---

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

// --- Segments ---

struct Lane {
    int lane, warp, row, pair;

    __device__ Lane() {
        lane = static_cast<int>(threadIdx.x) % 32;
        warp = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x) / 32, 0);
        // Of a product's operands and sums.
        row = lane / 4;
        pair = lane % 4;
    }
};

// Where a lane reads matrices and scales in a stage, and where it writes.
struct Places {
    unsigned keys, values, factors, copies;

    __device__ Places(const Lane& at) {
        const unsigned row = at.lane % 8, second = at.lane / 8 % 2, third = at.lane / 16;
        keys = row * 4 * LINE_BYTES + second * LINE_BYTES + (third ^ row) * PIECE_BYTES;
        values = row * 4 * LINE_BYTES + third * LINE_BYTES + ((4 + second) ^ row) * PIECE_BYTES;
        factors = SCALES_AT + at.row * 8;
        copies = at.lane * PIECE_BYTES;
    }
};

// Blocks from one of a program's on, up to `stop`, of a sequence whose blocks are [first, last).
struct Segment {
    int sequence, first, last, stop;
};

// Of the first sequence from `sequence` on that has blocks behind `block`, which is before the program's `end`.
__device__ Segment find_segment(const Problem& problem, int sequence, int block, int end) {
    const int* fields = problem.sequences + sequence * SEQUENCE_FIELDS;
    while (fields[1] <= block) {
        fields += SEQUENCE_FIELDS;
        ++sequence;
    }
    const int last = fields[1];
    return {sequence, fields[0], last, min(last, end)};
}

// Asks for a warp's tokens of one block after the other, through all sequences of a program.
struct Fetcher {
    const Problem& problem;
    // The lane's first piece of a block.
    const unsigned char* codes;
    // Of the sequence in the table of granules, and of the lane in a granule's scales.
    int entries, lane_scales;
    int head, warp, end, stop, sequence, position, left, granule;

    __device__ Fetcher(const Problem& given, const Lane& at, int kv_head, int first, int behind, int first_sequence)
        : problem(given), codes(given.payload), entries(0), head(kv_head), warp(at.warp), end(behind), stop(first),
          sequence(first_sequence), position(0), left(0), granule(0) {
        const int plane = at.lane / PLANE_PIECES;
        lane_scales = head * problem.scale_head_bytes + plane / (PLANES / 2) * problem.scale_value_bytes +
                      plane % (PLANES / 2) * problem.scale_plane_bytes + at.lane % PLANE_PIECES * PIECE_BYTES;
    }

    __device__ void open(int block) {
        const Segment segment = find_segment(problem, sequence, block, end);
        const int lane = lane_of_warp(), piece = lane % 8;
        position = (block - segment.first) * BLOCK + warp * TOKENS;
        left = static_cast<int>(problem.kv_lens[segment.sequence]) - position;
        codes = problem.payload + (problem.base_rows[segment.sequence] + position + lane / 8) * ROW_BYTES +
                static_cast<long long>(head) * problem.head_bytes + piece / 4 * problem.value_bytes +
                piece % 4 * static_cast<int>(PIECE_BYTES);
        entries = static_cast<int>(problem.slots[segment.sequence]) * problem.table_stride;
        granule = problem.table[entries + position / GRANULE_TOKENS];
        stop = segment.stop;
        sequence = segment.sequence + 1;
    }

    // The next block, if the program has it. The newest token of a sequence is what the kernel in front may write.
    template <bool MAY_WAIT>
    __device__ void ask(int block, const Places& places, unsigned stage) {
        if (block < end) {
            if (block == stop) open(block);
            if (MAY_WAIT && left <= TOKENS) wait_for_inputs();
            copy(places, stage);
            position += BLOCK;
            left -= BLOCK;
            codes += BLOCK * static_cast<long long>(ROW_BYTES);
            // Asked for a block before it is needed.
            if (block + 1 < stop) granule = problem.table[entries + position / GRANULE_TOKENS];
        }
        close_copies();
    }

    __device__ void copy(const Places& places, unsigned stage) const {
        const unsigned to = stage + places.copies;
        if (left >= TOKENS) {
#pragma unroll
            for (int each = 0; each < COPIES; ++each)
                copy_piece(place_of(to, each), codes + each * COPY_TOKENS * static_cast<long long>(ROW_BYTES));
        } else {
            const int token = lane_of_warp() / 8;
#pragma unroll 1
            for (int each = 0; each < COPIES; ++each)
                copy_piece(
                    place_of(to, each), codes + each * COPY_TOKENS * static_cast<long long>(ROW_BYTES),
                    token + each * COPY_TOKENS < left);
        }
        if (places.copies < PLANES * PLANE_BYTES)
            copy_piece(
                to + SCALES_AT, problem.scales + static_cast<long long>(granule) * problem.granule_bytes +
                                    (lane_scales + position % GRANULE_TOKENS * 2));
    }

    // Of the tokens of a copy, in their lines.
    __device__ static unsigned place_of(unsigned to, int copy) {
        return (to ^ copy * PIECE_BYTES) + copy * COPY_TOKENS * LINE_BYTES;
    }
};

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

__device__ float summed_over_tokens(float sum) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, apart);
    return sum;
}

// Of a row of a state, where two numbers lie: rows apart in other banks.
__device__ unsigned pair_place(unsigned row, unsigned pair) { return row * STATE_ROW + (pair ^ row / 2 * 4) * 8; }

__device__ void leave_state(const State& state, const Lane& at, unsigned scratch) {
    const float LOW = 1.0f / CODE_STEP, HIGH = 1.0f / KEY_STEP;
#pragma unroll
    for (int each = 0; each < 2; ++each) {
        const unsigned row = 2 * at.pair + each;
        const float total = summed_over_tokens(state.totals[each]);
        const float shift = AFFINE ? summed_over_tokens(state.shifts[each]) : -OFFSET * state.excess[each];
        if (at.row == 0) {
            store_number(scratch + MAXIMA_AT + 4 * row, state.maxima[each]);
            store_number(scratch + TOTALS_AT + 4 * row, total);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned unit = 16 * tile + 8 * half + at.row;
                const int place = 2 * half + each;
                const float first = state.outputs[0][tile][place], second = state.outputs[2][tile][place];
                const float high = state.outputs[1][tile][place], both = state.outputs[3][tile][place];
                store_pair(scratch + pair_place(row, unit), first * LOW + shift, second * LOW + shift);
                store_pair(
                    scratch + pair_place(row, HEAD_DIM / 4 + unit), high * HIGH + shift,
                    (both - second) * HIGH + shift);
            }
    }
}

// What a segment's states come to: where the output is, if the sequence is this segment, and else its own state.
struct Target {
    int segment, sequence, head;
    bool whole;
};

// scratch: of the first warp; one of a warp's lanes has four numbers of a row.
__device__ void add_up(const Problem& problem, const Lane& at, const Target& target, unsigned scratch) {
#pragma unroll 1
    for (int row = at.warp; row < GROUP; row += WARPS) {
        float weights[WARPS], highest = LOWEST, whole = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            weights[warp] = load_number(scratch + warp * RING_BYTES + MAXIMA_AT + 4 * row);
            highest = fmaxf(highest, weights[warp]);
        }
        float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const unsigned state = scratch + warp * RING_BYTES;
            const float weight = power_of_two(weights[warp] - highest);
            const float4 numbers = load_numbers(state + pair_place(row, 2 * at.lane));
            whole += load_number(state + TOTALS_AT + 4 * row) * weight;
            sums.x += numbers.x * weight;
            sums.y += numbers.y * weight;
            sums.z += numbers.z * weight;
            sums.w += numbers.w * weight;
        }
        const float share = 1.0f / (whole == 0.0f ? 1.0f : whole);
        sums = make_float4(sums.x * share, sums.y * share, sums.z * share, sums.w * share);
        const int head = target.head * GROUP + row;
        if (target.whole) {
            const auto place = problem.out + static_cast<long long>(target.sequence) * problem.out_token_stride +
                               static_cast<long long>(head) * problem.out_head_stride + 4 * at.lane;
            *reinterpret_cast<uint2*>(place) = make_uint2(rounded(sums.x, sums.y), rounded(sums.z, sums.w));
        } else {
            const long long place = static_cast<long long>(target.segment) * (KV_HEADS * GROUP) + head;
            *reinterpret_cast<float4*>(problem.partial + place * HEAD_DIM + 4 * at.lane) = sums;
            if (at.lane == 0) problem.lse[place] = (highest + binary_log(whole)) * LN2;
        }
    }
}

extern "C" __global__ void __maxnreg__(REGISTERS)
    warp_rings(const __grid_constant__ Problem problem) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Lane at;
    const Places places(at);
    const int head = static_cast<int>(blockIdx.x) % KV_HEADS, program = static_cast<int>(blockIdx.x) / KV_HEADS;
    const unsigned rings = shared_address(shared), ring = rings + at.warp * RING_BYTES;
    if (!problem.settled) wait_for_inputs();
    const int* range = problem.programs + program * PROGRAM_FIELDS;
    int block = range[0], sequence = range[2];
    const int end = range[1];
    Fetcher fetcher(problem, at, head, block, end, sequence);
#pragma unroll 1
    for (int ahead = 0; ahead < STAGES - 1; ++ahead)
        fetcher.ask<true>(block + ahead, places, ring + ahead * STAGE_BYTES);
    Segment segment{};
    if (block < end) segment = find_segment(problem, sequence, block, end);
    wait_for_inputs();
    let_next_start();
    // The stage of the next block, and the one that may be filled again.
    unsigned stage = ring, free = ring + (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
    while (block < end) {
        sequence = segment.sequence;
        Queries queries;
        State state;
        {
            uint2 numbers[2][2][2];
            ask_queries(numbers, problem, at, sequence, head);
            turn_queries(queries, numbers, at, problem.scale);
        }
        state.clear();
        int left = static_cast<int>(problem.kv_lens[sequence]) - (block - segment.first) * BLOCK - at.warp * TOKENS;
        const bool whole = block == segment.first && segment.stop == segment.last;
#pragma unroll 1
        for (; block < segment.stop; ++block) {
            wait_copies<STAGES - 2>();
            // All lanes' copies are here, and all have read the stage that is filled next.
            __syncwarp();
            fetcher.ask<false>(block + STAGES - 1, places, free);
            add_block(state, queries, places, stage, left);
            left -= BLOCK;
            free = stage;
            stage = stage + STAGE_BYTES == ring + RING_BYTES ? ring : stage + STAGE_BYTES;
        }
        __syncwarp();
        leave_state(state, at, free);
        __syncthreads();
        add_up(problem, at, {program + sequence, sequence, head, whole}, free - ring + rings);
        if (block < end) {
            segment = find_segment(problem, sequence + 1, block, end);
            // The others have read the stages in which the states are, which are filled next.
            __syncthreads();
        }
    }
}
