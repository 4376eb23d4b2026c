// out = x · weightᵀ + residual for few rows of x: the inputs are divided among the CTAs of a cluster, which share a
// tile of outputs and add their sums up through each other's shared memory.
//
// In front of this text are hopper_parts.cu and cluster_sums.cu, with what they want. Defined by cluster_linear.py
// besides: LAUNCH_AT, when the next kernel may start; BARRIERS_AT, bytes of the ring or of the sums that follow it.

constexpr unsigned X_AT = TILE_ROWS * ROW_BYTES;
constexpr unsigned STAGE_BYTES = X_AT + TOKENS * ROW_BYTES;

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
