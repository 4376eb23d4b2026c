// out = silu(x · gateᵀ) · (x · upᵀ), or x · weightᵀ + residual, for many rows of x: clusters take tile after tile, their
// CTAs the same rows of x and outputs beside each other's. Each CTA fetches its share of x for all of them.
//
// STREAM_K: the tiles of the last round, which would leave clusters without work, and those of the round before are
// divided along their inputs, so that all clusters end at once. A cluster first takes the end of a tile and leaves its
// sums to the cluster that takes the beginning of that tile last.
//
// In front of this text are hopper_parts.cu, with what it wants, TOKENS a multiple of 16, and wide_memory.cu, wide_work.cu
// and wide_exchange.cu. Defined by wide_linear.py besides: BAND, tiles of rows that are taken together; GATED, RESIDUAL
// and STREAM_K, 0 or 1; SHARED_BYTES of a CTA.

__device__ void fetch_weight(const Ring& ring, int stage, const CUtensorMap& map, int step, int output) {
    expect_bytes(ring.full(stage), STAGE_BYTES);
    if (GATED)
        copy_halves(ring.weight(stage), map, step * STEP_INPUTS, output, ring.full(stage));
    else
        copy_rows(ring.weight(stage), map, step * STEP_INPUTS, output, ring.full(stage));
}

// The other CTAs may be told before they expect it: their phase does not end before they do.
__device__ void fetch_x(const Ring& ring, int stage, const CUtensorMap& map, int step, int token, int rank) {
    const int share = rank * SHARE_TOKENS;
    copy_rows_to_all(ring.x(stage) + share * ROW_BYTES, map, step * STEP_INPUTS, token + share, ring.full(stage));
}

// One thread. The weight does not depend on the kernel in front: the ring is full of it before x is there.
__device__ void fetch_first_weights(const Ring& ring, const CUtensorMap& weight, const Work& work) {
    Part part;
    if (!Parts(work).next(work, part)) return;
#pragma unroll 1
    for (int place = 0; place < min(part.end - part.first, STAGES); ++place)
        fetch_weight(ring, place, weight, part.first + place, part.tile.output);
}

// One thread, once the barriers of all CTAs can be arrived at.
__device__ void fetch_others(
    const Ring& ring, const CUtensorMap& weight, const CUtensorMap& x, const Work& work, const Exchange& exchange) {
    wait_for_inputs();
    Place place;
    Parts parts(work);
    Part part{};
    bool more = parts.next(work, part);
    int step = part.first;
#pragma unroll 1
    for (; step < min(part.end, part.first + STAGES); ++step) {
        fetch_x(ring, place.stage, x, step, part.tile.token, work.rank);
        place.advance();
    }
#pragma unroll 1
    while (more) {
#pragma unroll 1
        for (; step < part.end; ++step) {
            // In the first turn for the phase before the first one, which is over.
            wait_phase(ring.empty(place.stage), place.phase ^ 1);
            fetch_weight(ring, place.stage, weight, step, part.tile.output);
            fetch_x(ring, place.stage, x, step, part.tile.token, work.rank);
            place.advance();
        }
#if STREAM_K
        if (part.first == 0 && part.end < work.steps)
            fetch_all_sums(ring, place, exchange, work, parts.tile_end(work));
#endif
        more = parts.next(work, part);
        step = part.first;
    }
    let_next_start();
}

__device__ void add_products(float (&sums)[TOKENS / 2], const Ring& ring, Place& place, int group, int count) {
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
        // The products of the step before have ended.
        wait_products<1>();
        if (step > 0) release(ring, under_way);
        under_way = place.stage;
        place.advance();
    }
    wait_products<0>();
    release(ring, under_way);
    keep_behind(sums);
}

// A row is a token's outputs; pieces of 16 bytes have changed places within 64 or 128 bytes, as copies swizzle them.
__device__ unsigned swizzled(int token, int piece) {
    const unsigned place = token * RESULT_ROW_BYTES + piece * 16;
    return place ^ (place >> 7 & (RESULT_ROW_BYTES / 16 - 1)) << 4;
}

__device__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Of `block`, the group's 16 tokens from 16 · block on. A pair is an output of two tokens.
__device__ void pairs_of(unsigned (&pairs)[MATRICES], const float (&sums)[TOKENS / 2], int block) {
#pragma unroll
    for (int each = 0; each < MATRICES; ++each) {
        const int first = (2 * block + each % 2) * 4 + each / 2 * 2;
        if (GATED)
            pairs[each] = rounded(gated(sums[first], sums[first + 2]), gated(sums[first + 1], sums[first + 3]));
        else
            pairs[each] = rounded(sums[first], sums[first + 1]);
    }
}

#if RESIDUAL
__device__ void add_residuals(float (&sums)[TOKENS / 2], int block, unsigned place) {
    unsigned pairs[4];
    load_turned(pairs, place);
#pragma unroll
    for (int each = 0; each < 4; ++each) {
        const int first = (2 * block + each % 2) * 4 + each / 2 * 2;
        sums[first] += widened(pairs[each] & 0xFFFF);
        sums[first + 1] += widened(pairs[each] >> 16);
    }
}
#endif

// To shared memory, where the residual lies, if there is one.
__device__ void leave_results(float (&sums)[TOKENS / 2], unsigned results) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // Where the lane's row of a matrix goes: of two or four matrices, the first two are tokens below each other.
    const unsigned place = results + swizzled(lane % 16, GATED ? warp : warp * 2 + lane / 16);
#pragma unroll
    for (int block = 0; block < TOKENS / 16; ++block) {
        const unsigned there = place + block * 16 * RESULT_ROW_BYTES;
#if RESIDUAL
        add_residuals(sums, block, there);
#endif
        unsigned pairs[MATRICES];
        pairs_of(pairs, sums, block);
        store_turned(there, pairs);
    }
}

struct Maps {
    const CUtensorMap &residual, &out;
};

// Ahead of a tile's products, to where the group's results of its last tile were.
__device__ void fetch_residual(const Ring& ring, const CUtensorMap& map, const Tile& tile, int group) {
    wait_for_copies_back();
    expect_bytes(ring.residual(group), RESULT_BYTES);
    copy_rows(ring.results(group), map, tile.output + group * GROUP_OUTPUTS, tile.token, ring.residual(group));
}

// Once the group's sums of a tile are all there.
__device__ void finish(
    float (&sums)[TOKENS / 2], const Ring& ring, const Maps& maps, const Tile& tile, int group, unsigned phase) {
    const bool first_of_group = threadIdx.x % 128 == 0;
    if (RESIDUAL) {
        wait_phase(ring.residual(group), phase);
    } else {
        if (first_of_group) wait_for_copies_back();
        sync_group(group);
    }
    leave_results(sums, ring.results(group));
    show_to_copies();
    sync_group(group);
    if (first_of_group) copy_back(maps.out, tile.output + group * GROUP_OUTPUTS, tile.token, ring.results(group));
}

__device__ void take_parts(const Ring& ring, const Maps& maps, const Work& work, const Exchange& exchange) {
    const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
    const bool first_of_group = threadIdx.x % 128 == 0;
    Place place;
    Parts parts(work);
    Part part;
    unsigned residual_phase = 0;
    // Behind what the kernel in front wrote and read: residual and out.
    wait_for_inputs();
#pragma unroll 1
    while (parts.next(work, part)) {
        const bool finishes = !STREAM_K || part.first == 0;
        if (RESIDUAL && first_of_group && finishes) fetch_residual(ring, maps.residual, part.tile, group);
        int others = others_of(part, parts, work);
        float sums[TOKENS / 2] = {};
        add_products(sums, ring, place, group, part.end - part.first);
#if STREAM_K
        if (!finishes) {
            leave_sums(sums, exchange, group);
            continue;
        }
#pragma unroll 1
        for (; others > 0; --others) add_left_sums(sums, ring, place);
#endif
        finish(sums, ring, maps, part.tile, group, residual_phase);
        residual_phase ^= 1;
    }
    if (first_of_group) wait_for_copies_back();
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) wide_linear(
    const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
    const __grid_constant__ CUtensorMap residual, const __grid_constant__ CUtensorMap out, float4* sums,
    unsigned* groups, int rows, int outputs, int inputs) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring ring{shared_address(shared)};
    const Work work(rows, outputs, inputs);
    const Exchange exchange{sums, groups};
    if (threadIdx.x == CONSUMERS) {
        prefetch(weight);
        prefetch(x);
        prefetch(out);
        ring.init();
        fetch_first_weights(ring, weight, work);
    }
    sync_cluster();
    if (threadIdx.x == CONSUMERS) fetch_others(ring, weight, x, work, exchange);
    if (threadIdx.x < CONSUMERS) take_parts(ring, {residual, out}, work, exchange);
    // Until then the other CTAs copy to this one's shared memory and arrive at its barriers.
    if (CLUSTER > 1) sync_cluster();
}
