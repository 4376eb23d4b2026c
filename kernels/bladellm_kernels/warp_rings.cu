// Decode attention of one query token a sequence over 4-bit keys and values: every warp has a ring of its own in shared
// memory, fills it itself, and meets the others at the end of a segment only.
//
// A CTA takes a range of blocks of 128 tokens of a KV head, a warp 32 tokens of every block. In front of this text are
// warp_instructions.cu, warp_lane.cu, warp_memory.cu and warp_blocks.cu.

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
