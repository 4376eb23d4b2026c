// Of wide_linear.cu: what lies where in shared memory, and the instructions that move it.

// Of the 16 rows of the weight whose sums a warp has.
constexpr int WARP_OUTPUTS = GATED ? 8 : 16;
constexpr int TILE_OUTPUTS = TILE_ROWS / 16 * WARP_OUTPUTS;

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

// 8 · 8 results that a warp moves at a time: of 16 tokens, and of 8 outputs or twice as many.
constexpr int MATRICES = GATED ? 2 : 4;

// At the barrier of any CTA. With `.release.cluster` every arrival would wait for the whole GPU's memory. Nothing that a
// warp wrote is handed over here, only leave to overwrite what its products, which have ended, have read.
__device__ void arrive_there(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Of a gate-up weight as [outputs / 8][halves][8][inputs].
__device__ void copy_halves(unsigned to, const CUtensorMap& map, int column, int output, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(column), "r"(0), "r"(output / 8), "r"(barrier)
        : "memory");
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

// All CTAs copy to this stage: each is told by every warp, by a lane for each.
__device__ void release(const Ring& ring, int stage) {
    const int lane = threadIdx.x % 32;
    if (lane < CLUSTER) arrive_there(place_in(ring.empty(stage), lane));
}
