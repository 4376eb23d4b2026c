// out = x · weightᵀ + residual for few rows of x: the inputs are divided among the CTAs of a cluster, which share a
// tile of outputs and add their sums up through each other's shared memory.
//
// In front of this text is hopper_parts.cu, with what it wants. Defined by cluster_linear.py besides: LAUNCH_AT, when
// the next kernel may start; RESIDUAL, 0 or 1; PARTIAL_ROW, floats from one token's sums to the next one's; BARRIERS_AT,
// bytes of the ring or of the sums that follow it.

enum { AT_START, AFTER_LAST_LOAD, AFTER_MAIN_LOOP };

// Every row of the weight is an output, 16 of them a warp's.
constexpr int WARP_OUTPUTS = 16, TILE_OUTPUTS = TILE_ROWS;

constexpr unsigned X_AT = TILE_ROWS * ROW_BYTES;
constexpr unsigned STAGE_BYTES = X_AT + TOKENS * ROW_BYTES;

// What a thread stores at a time, and how many threads have a token's outputs.
constexpr int QUAD = 4;
constexpr int QUADS = TILE_OUTPUTS / QUAD;
constexpr int PASS_TOKENS = CONSUMERS / QUADS;
constexpr int SLICE_TOKENS = (TOKENS + CLUSTER - 1) / CLUSTER;
constexpr int SLICE_PASSES = (SLICE_TOKENS + PASS_TOKENS - 1) / PASS_TOKENS;
// Of which a CTA alone, that has all tokens, keeps no more in registers at a time.
constexpr int PASSES = CLUSTER == 1 && SLICE_PASSES > 8 ? 8 : SLICE_PASSES;

struct Problem {
    const unsigned short* residual;
    unsigned short* out;
    int rows, outputs, inputs, residual_stride, out_stride;
};

struct Steps {
    int first, count;
};

__device__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Not a barrier to the compiler, so that many are under way; volatile ones keep their order.
__device__ float4 load_sums(unsigned address) {
    float4 sums;
    asm volatile(
#if CLUSTER > 1
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
#else
        "ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
#endif
        : "=f"(sums.x), "=f"(sums.y), "=f"(sums.z), "=f"(sums.w)
        : "r"(address));
    return sums;
}

__device__ void store_sum(unsigned address, float sum) {
    asm volatile("st.shared::cta.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
}

__device__ uint2 rounded(const float4& values) {
    return make_uint2(rounded(values.x, values.y), rounded(values.z, values.w));
}

__device__ float4 widened(const uint2& bits) {
    const unsigned low = 0xFFFF;
    return make_float4(widened(bits.x & low), widened(bits.x >> 16), widened(bits.y & low), widened(bits.y >> 16));
}

__device__ void add(float4& sums, const float4& more) {
    sums.x += more.x;
    sums.y += more.y;
    sums.z += more.z;
    sums.w += more.w;
}

__device__ Steps steps_of(int rank, int inputs) {
    const int all = (inputs + STEP_INPUTS - 1) / STEP_INPUTS;
    const int each = all / CLUSTER, more = all % CLUSTER;
    return {rank * each + min(rank, more), each + (rank < more)};
}

struct Ring {
    unsigned tiles, barriers;

    __device__ unsigned weight(int stage) const { return tiles + stage * STAGE_BYTES; }
    __device__ unsigned x(int stage) const { return weight(stage) + X_AT; }
    __device__ unsigned full(int stage) const { return barriers + 8 * stage; }
    __device__ unsigned empty(int stage) const { return barriers + 8 * (STAGES + stage); }

    __device__ void init() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full(stage), 1);
            init_barrier(empty(stage), CONSUMER_WARPS);
        }
        show_barriers_to_copies();
    }
};

__device__ void fetch_weight(const Ring& ring, int stage, const CUtensorMap& map, int step, int output) {
    expect_bytes(ring.full(stage), STAGE_BYTES);
    copy_rows(ring.weight(stage), map, step * STEP_INPUTS, output, ring.full(stage));
}

__device__ void fetch_x(const Ring& ring, int stage, const CUtensorMap& map, int step) {
    copy_rows(ring.x(stage), map, step * STEP_INPUTS, 0, ring.full(stage));
}

// One thread. The weight does not depend on the kernel in front: the ring is full of it before x is there.
__device__ void fetch_first_weights(const Ring& ring, const CUtensorMap& weight, Steps steps, int output) {
#pragma unroll 1
    for (int step = 0; step < min(steps.count, STAGES); ++step)
        fetch_weight(ring, step, weight, steps.first + step, output);
}

__device__ void fetch_others(
    const Ring& ring, const CUtensorMap& weight, const CUtensorMap& x, Steps steps, int output) {
    wait_for_inputs();
#pragma unroll 1
    for (int step = 0; step < min(steps.count, STAGES); ++step) fetch_x(ring, step, x, steps.first + step);
    Place place;
#pragma unroll 1
    for (int step = STAGES; step < steps.count; ++step) {
        wait_phase(ring.empty(place.stage), place.phase);
        fetch_weight(ring, place.stage, weight, steps.first + step, output);
        fetch_x(ring, place.stage, x, steps.first + step);
        place.advance();
    }
    if (LAUNCH_AT == AFTER_LAST_LOAD) let_next_start();
}

__device__ void add_products(float (&sums)[TOKENS / 2], const Ring& ring, int group, int count) {
    const bool first_of_warp = threadIdx.x % 32 == 0;
    Place place;
    int under_way = 0;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        const unsigned long long weight = descriptor(ring.weight(place.stage) + group * GROUP_ROWS * ROW_BYTES);
        const unsigned long long x = descriptor(ring.x(place.stage));
        wait_phase(ring.full(place.stage), place.phase);
        open_products();
#pragma unroll
        for (int part = 0; part < STEP_INPUTS / 16; ++part)
            multiply_add(sums, weight + (part * 32 >> 4), x + (part * 32 >> 4));
        close_products();
        // The products of the step before have ended: its stage may be filled again.
        wait_products<1>();
        if (first_of_warp && step > 0) arrive(ring.empty(under_way));
        under_way = place.stage;
        place.advance();
    }
    wait_products<0>();
    keep_behind(sums);
}

// As [token][output]. Rows are 4 floats longer than a multiple of 16: the 32 threads of a warp, 4 · 2 tokens and 8
// outputs, write to different banks.
__device__ void leave_sums(const float (&sums)[TOKENS / 2], unsigned partial, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int output = (group * 4 + warp) * WARP_OUTPUTS + lane / 4, token = lane % 4 * 2;
    const unsigned place = partial + 4 * (token * PARTIAL_ROW + output);
#pragma unroll
    for (int each = 0; each < TOKENS / 2; ++each) {
        const int more_tokens = each / 4 * 8 + each % 2, half = each / 2 % 2;
        const unsigned there = place + 4 * (more_tokens * PARTIAL_ROW + half * 8);
        store_sum(there, sums[each]);
    }
}

struct Slice {
    int token, end, quad;

    __device__ Slice(int rank, int rows) {
        const int tokens = (rows + CLUSTER - 1) / CLUSTER;
        token = rank * tokens + static_cast<int>(threadIdx.x) / QUADS;
        end = min(rows, (rank + 1) * tokens);
        quad = static_cast<int>(threadIdx.x) % QUADS;
    }

    __device__ int token_of(int pass) const { return token + pass * PASS_TOKENS; }
};

__device__ void ask_residuals(uint2 (&residuals)[PASSES], const Problem& problem, const Slice& slice, int output) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int token = slice.token_of(pass);
        residuals[pass] = make_uint2(0, 0);
        if (token < slice.end && output < problem.outputs) {
            const auto place = problem.residual + static_cast<long long>(token) * problem.residual_stride + output;
            residuals[pass] = *reinterpret_cast<const uint2*>(place);
        }
    }
}

// What residuals become: outputs, summed over all CTAs in the order of their ranks, so that they have the same bits
// each time. Every thread loads in every pass, without a branch, so that many loads are under way at once.
__device__ void add_up(uint2 (&values)[PASSES], const Slice& slice, unsigned partial) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int token = min(slice.token_of(pass), TOKENS - 1);
        const unsigned place = partial + 4 * (token * PARTIAL_ROW + slice.quad * QUAD);
        float4 total = load_sums(place_in(place, 0));
#pragma unroll
        for (int rank = 1; rank < CLUSTER; ++rank) add(total, load_sums(place_in(place, rank)));
        if (RESIDUAL) add(total, widened(values[pass]));
        values[pass] = rounded(total);
    }
}

__device__ void store_outputs(const uint2 (&values)[PASSES], const Problem& problem, const Slice& slice, int output) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int token = slice.token_of(pass);
        if (token < slice.end && output < problem.outputs) {
            const auto place = problem.out + static_cast<long long>(token) * problem.out_stride + output;
            *reinterpret_cast<uint2*>(place) = values[pass];
        }
    }
}

__device__ void finish_alone(const Problem& problem, Slice slice, int output, unsigned partial) {
    uint2 values[PASSES];
    sync_consumers();
#pragma unroll 1
    for (; slice.token < slice.end; slice.token += PASSES * PASS_TOKENS) {
        if (RESIDUAL) ask_residuals(values, problem, slice, output);
        add_up(values, slice, partial);
        store_outputs(values, problem, slice, output);
    }
}

__device__ void finish_in_cluster(const Problem& problem, const Slice& slice, int output, unsigned partial) {
    uint2 values[PASSES];
    arrive_at_cluster();
    if (RESIDUAL) ask_residuals(values, problem, slice, output);
    wait_for_cluster();
    add_up(values, slice, partial);
    // Ahead of the outputs, which its release would wait for. A CTA's sums stay until all others have read them.
    arrive_at_cluster();
    store_outputs(values, problem, slice, output);
    wait_for_cluster();
}

__device__ void finish(const float (&sums)[TOKENS / 2], const Problem& problem, unsigned partial, int group, int rank) {
    const Slice slice(rank, problem.rows);
    const int output = static_cast<int>(blockIdx.x) / CLUSTER * TILE_OUTPUTS + slice.quad * QUAD;
    // All warpgroups have read the ring, which lies where the sums will.
    sync_consumers();
    leave_sums(sums, partial, group);
    if (CLUSTER > 1)
        finish_in_cluster(problem, slice, output, partial);
    else
        finish_alone(problem, slice, output, partial);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) cluster_linear(
    const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x, const unsigned short* residual,
    unsigned short* out, int rows, int outputs, int inputs, int residual_stride, int out_stride) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring ring{shared_address(shared), shared_address(shared) + BARRIERS_AT};
    const int rank = rank_in_cluster();
    const Steps steps = steps_of(rank, inputs);
    const int first_output = static_cast<int>(blockIdx.x) / CLUSTER * TILE_OUTPUTS;
    if (threadIdx.x == CONSUMERS) {
        prefetch(weight);
        prefetch(x);
        ring.init();
        fetch_first_weights(ring, weight, steps, first_output);
        if (LAUNCH_AT == AT_START) let_next_start();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) fetch_others(ring, weight, x, steps, first_output);
        return;
    }
    const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
    float sums[TOKENS / 2] = {};
    add_products(sums, ring, group, steps.count);
    if (LAUNCH_AT == AFTER_MAIN_LOOP && threadIdx.x == 0) let_next_start();
    // Behind what the kernel in front wrote and read: residual and out.
    wait_for_inputs();
    finish(sums, {residual, out, rows, outputs, inputs, residual_stride, out_stride}, ring.tiles, group, rank);
}
