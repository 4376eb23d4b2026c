// out = silu(x · gateᵀ) · (x · upᵀ), or x · weightᵀ + residual, for many rows of x: clusters take tile after tile, their
// CTAs the same rows of x and outputs beside each other's. Each CTA fetches its share of x for all of them.
//
// STREAM_K: the tiles of the last round, which would leave clusters without work, and those of the round before are
// divided along their inputs, so that all clusters end at once. A cluster first takes the end of a tile and leaves its
// sums to the cluster that takes the beginning of that tile last.
//
// In front of this text is hopper_parts.cu, with what it wants, TOKENS a multiple of 16. Defined by wide_linear.py
// besides: BAND, tiles of rows that are taken together; RESIDUAL and STREAM_K, 0 or 1; SHARED_BYTES of a CTA.

constexpr unsigned WEIGHT_BYTES = TILE_ROWS * ROW_BYTES;
constexpr unsigned X_BYTES = TOKENS * ROW_BYTES;
constexpr unsigned STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
// Rows of x that one CTA fetches.
constexpr int SHARE_TOKENS = TOKENS / CLUSTER;

// Results lie in shared memory by tokens, those of each group apart.
constexpr int GROUP_OUTPUTS = TILE_OUTPUTS / GROUPS;
constexpr unsigned RESULT_ROW_BYTES = 2 * GROUP_OUTPUTS;
constexpr unsigned RESULT_BYTES = TOKENS * RESULT_ROW_BYTES;
constexpr unsigned RESULTS_AT = STAGES * STAGE_BYTES;
constexpr unsigned BARRIERS_AT = RESULTS_AT + GROUPS * RESULT_BYTES;
static_assert(BARRIERS_AT + 8 * (2 * STAGES + GROUPS) == SHARED_BYTES, "as many bytes as a launch asks for");

// Sums that a CTA leaves to another one: rows of four numbers of every consumer, of which a stage holds some.
constexpr int SUM_ROWS = TOKENS / 8;
constexpr unsigned SUM_ROW_BYTES = 16 * CONSUMERS;
constexpr int PIECE_ROWS = STAGE_BYTES / SUM_ROW_BYTES;
constexpr int PIECES = (SUM_ROWS + PIECE_ROWS - 1) / PIECE_ROWS;
// Ranges of steps that are shorter at the end of a tile, or at its beginning, are left to the cluster beside.
constexpr int LEAST_STEPS = 4;

// 8 · 8 results that a warp moves at a time: of 16 tokens, and of 8 outputs or twice as many.
constexpr int MATRICES = GATED ? 2 : 4;

// At the barrier of any CTA. With `.release.cluster` every arrival would wait for the whole GPU's memory. Nothing that a
// warp wrote is handed over here, only leave to overwrite what its products, which have ended, have read.
__device__ void arrive_there(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// To the same place in all CTAs, each of which is told by its own barrier.
__device__ void copy_rows_to_all(unsigned to, const CUtensorMap& map, int column, int row, unsigned barrier) {
#if CLUSTER > 1
    constexpr unsigned short ALL_CTAS = (1 << CLUSTER) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ALL_CTAS)
        : "memory");
#else
    copy_rows(to, map, column, row, barrier);
#endif
}

__device__ void copy_back(const CUtensorMap& map, int column, int row, unsigned from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
        "r"(row), "r"(from)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all that this thread copies back has been read.
__device__ void wait_for_copies_back() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

__device__ void sync_cluster() {
    __syncwarp();
#if CLUSTER > 1
    arrive_at_cluster();
    wait_for_cluster();
#else
    __syncthreads();
#endif
}

// A row of a matrix is 8 outputs of a token, of which every lane has other tokens: the matrix is turned on its way.
__device__ void store_turned(unsigned address, const unsigned (&pairs)[MATRICES]) {
#if GATED
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(address), "r"(pairs[0]),
                 "r"(pairs[1])
                 : "memory");
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
#endif
}

__device__ void load_turned(unsigned (&pairs)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(address)
                 : "memory");
}

struct Ring {
    unsigned tiles;

    __device__ unsigned weight(int stage) const { return tiles + stage * STAGE_BYTES; }
    __device__ unsigned x(int stage) const { return weight(stage) + WEIGHT_BYTES; }
    __device__ unsigned results(int group) const { return tiles + RESULTS_AT + group * RESULT_BYTES; }
    __device__ unsigned full(int stage) const { return tiles + BARRIERS_AT + 8 * stage; }
    __device__ unsigned empty(int stage) const { return full(STAGES + stage); }
    __device__ unsigned residual(int group) const { return full(2 * STAGES + group); }

    __device__ void init() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full(stage), 1);
            init_barrier(empty(stage), CLUSTER * CONSUMER_WARPS);
        }
        for (int group = 0; group < GROUPS; ++group) init_barrier(residual(group), 1);
        show_barriers_to_copies();
    }
};

// First row of x and first output.
struct Tile {
    int token, output;
};

// Steps of a tile that a cluster takes, up to `end`.
struct Part {
    Tile tile;
    int first, end;
};

// What clusters leave to each other: sums of every CTA, and how many of its groups have left theirs.
struct Exchange {
    float4* sums;
    unsigned* groups;

    __device__ float4* sums_of(int block) const { return sums + static_cast<long long>(block) * SUM_ROWS * CONSUMERS; }
};

// All tiles, and which of them this CTA takes. Where the last CTAs of a cluster have no outputs, they do all the same
// with zeros, since the others wait for their share of x.
struct Work {
    int tall, wide, steps, rank;

    __device__ Work(int rows, int outputs, int inputs)
        : tall((rows + TOKENS - 1) / TOKENS), wide((outputs + CLUSTER * TILE_OUTPUTS - 1) / (CLUSTER * TILE_OUTPUTS)),
          steps((inputs + STEP_INPUTS - 1) / STEP_INPUTS), rank(rank_in_cluster()) {}

    __device__ int cluster() const { return static_cast<int>(blockIdx.x) / CLUSTER; }
    __device__ int clusters() const { return static_cast<int>(gridDim.x) / CLUSTER; }
    __device__ int tiles() const { return tall * wide; }

    // Tiles that are not divided.
    __device__ int whole() const {
        const int rounds = tiles() / clusters();
        return STREAM_K && tiles() % clusters() ? max(rounds - 1, 0) * clusters() : tiles();
    }

    // Where the steps of a cluster begin, counted in the divided tiles one behind the other, and those of the cluster
    // before it end. Later clusters have earlier steps: they wait for earlier clusters, which started before them.
    __device__ int first_step(int cluster) const {
        const int step = (tiles() - whole()) * steps * (clusters() - 1 - cluster) / clusters();
        const int inside = step % steps;
        if (inside < LEAST_STEPS) return step - inside;
        return inside > steps - LEAST_STEPS ? step - inside + steps : step;
    }

    // The next cluster that has steps of a divided tile which ends at `tile_end`, -1 without one.
    __device__ int next_of_tile(int cluster, int tile_end) const {
        for (--cluster; cluster >= 0 && first_step(cluster) < tile_end; --cluster)
            if (first_step(cluster) < first_step(cluster - 1)) return cluster;
        return -1;
    }

    // Down a band, then to the right, then the next band: its x stays in the L2 cache while the weight passes. Divided
    // tiles of one band to the right first, where that can be: then as many clusters as it has tiles are at the same
    // place of the same weight, which they read once.
    __device__ Tile tile(int place) const {
        const int divided = place - whole(), across = (tiles() - whole()) / tall;
        if (STREAM_K && divided >= 0 && tall <= BAND && whole() % tall == 0)
            return {divided / across * TOKENS, output(whole() / tall + divided % across)};
        const int band = place / (BAND * wide), inside = place - band * BAND * wide;
        const int height = min(tall - band * BAND, BAND);
        return {(band * BAND + inside % height) * TOKENS, output(inside / height)};
    }

    __device__ int output(int column) const { return (column * CLUSTER + rank) * TILE_OUTPUTS; }
};

// Of a cluster, one after the other: whole tiles, then its steps of divided ones, the end of a tile first, then the
// beginning of one, whose other sums are there by then.
struct Parts {
    int tile, step, end;

    __device__ explicit Parts(const Work& work) : tile(work.cluster()), step(0), end(0) {
        if (STREAM_K) {
            step = work.first_step(work.cluster());
            end = work.first_step(work.cluster() - 1);
        }
    }

    __device__ bool next(const Work& work, Part& part) {
        if (tile < work.whole()) {
            part = {work.tile(tile), 0, work.steps};
            tile += work.clusters();
            return true;
        }
        if (step >= end) return false;
        const int before = step / work.steps, first = step % work.steps;
        const int last = min(first + end - step, work.steps);
        part = {work.tile(work.whole() + before), first, last};
        step += last - first;
        return true;
    }

    // Where the divided tile of the last part ends.
    __device__ int tile_end(const Work& work) const { return (step + work.steps - 1) / work.steps * work.steps; }
};

// Clusters that have the other steps of a tile which this cluster begins.
__device__ int others_of(const Part& part, const Parts& parts, const Work& work) {
    int count = 0;
    if (STREAM_K && part.first == 0 && part.end < work.steps)
        for (int at = work.cluster(); (at = work.next_of_tile(at, parts.tile_end(work))) >= 0;) ++count;
    return count;
}

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

#if STREAM_K
// Until all groups of a CTA have left their sums; it may leave others then.
__device__ void await_sums(unsigned* groups) {
    unsigned count;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(groups) : "memory");
    } while (count != GROUPS);
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(groups) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ void fetch_sums(const Ring& ring, Place& place, const Exchange& exchange, int block) {
    await_sums(exchange.groups + block);
    const char* from = reinterpret_cast<const char*>(exchange.sums_of(block));
#pragma unroll 1
    for (int row = 0; row < SUM_ROWS; row += PIECE_ROWS) {
        const unsigned bytes = min(SUM_ROWS - row, PIECE_ROWS) * SUM_ROW_BYTES;
        wait_phase(ring.empty(place.stage), place.phase ^ 1);
        expect_bytes(ring.full(place.stage), bytes);
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                ring.weight(place.stage)),
            "l"(from + static_cast<long long>(row) * SUM_ROW_BYTES), "r"(bytes), "r"(ring.full(place.stage))
            : "memory");
        place.advance();
    }
}

// Of the clusters that have the other steps of a tile.
__device__ void fetch_all_sums(
    const Ring& ring, Place& place, const Exchange& exchange, const Work& work, int tile_end) {
#pragma unroll 1
    for (int cluster = work.cluster(); (cluster = work.next_of_tile(cluster, tile_end)) >= 0;)
        fetch_sums(ring, place, exchange, cluster * CLUSTER + work.rank);
}
#endif

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

// All CTAs copy to this stage: each is told by every warp, by a lane for each.
__device__ void release(const Ring& ring, int stage) {
    const int lane = threadIdx.x % 32;
    if (lane < CLUSTER) arrive_there(place_in(ring.empty(stage), lane));
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

#if STREAM_K
// To where the cluster that has the first steps of the tile looks for them.
__device__ void leave_sums(const float (&sums)[TOKENS / 2], const Exchange& exchange, int group) {
    const int block = static_cast<int>(blockIdx.x);
    float4* to = exchange.sums_of(block) + threadIdx.x;
#pragma unroll
    for (int row = 0; row < SUM_ROWS; ++row)
        to[row * CONSUMERS] = make_float4(sums[4 * row], sums[4 * row + 1], sums[4 * row + 2], sums[4 * row + 3]);
    sync_group(group);
    if (threadIdx.x % 128 == 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(exchange.groups + block) : "memory");
}

__device__ void add_left_sums(float (&sums)[TOKENS / 2], const Ring& ring, Place& place) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const unsigned from = ring.weight(place.stage) + 16 * threadIdx.x;
        wait_phase(ring.full(place.stage), place.phase);
#pragma unroll
        for (int row = piece * PIECE_ROWS; row < min(SUM_ROWS, (piece + 1) * PIECE_ROWS); ++row) {
            float4 more;
            asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                         : "r"(from + (row - piece * PIECE_ROWS) * SUM_ROW_BYTES));
            sums[4 * row] += more.x;
            sums[4 * row + 1] += more.y;
            sums[4 * row + 2] += more.z;
            sums[4 * row + 3] += more.w;
        }
        __syncwarp();
        release(ring, place.stage);
        place.advance();
    }
}
#endif

// A row is a token's outputs; pieces of 16 bytes have changed places within 64 or 128 bytes, as copies swizzle them.
__device__ unsigned swizzled(int token, int piece) {
    const unsigned place = token * RESULT_ROW_BYTES + piece * 16;
    return place ^ (place >> 7 & (RESULT_ROW_BYTES / 16 - 1)) << 4;
}

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
