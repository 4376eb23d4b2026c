// Of wide_linear.cu with STREAM_K: sums of divided tiles, from the cluster that has found them to the one that adds them.

// Sums that a CTA leaves to another one: rows of four numbers of every consumer, of which a stage holds some.
constexpr int SUM_ROWS = TOKENS / 8;
constexpr unsigned SUM_ROW_BYTES = 16 * CONSUMERS;
constexpr int PIECE_ROWS = STAGE_BYTES / SUM_ROW_BYTES;
constexpr int PIECES = (SUM_ROWS + PIECE_ROWS - 1) / PIECE_ROWS;

// What clusters leave to each other: sums of every CTA, and how many of its groups have left theirs.
struct Exchange {
    float4* sums;
    unsigned* groups;

    __device__ float4* sums_of(int block) const { return sums + static_cast<long long>(block) * SUM_ROWS * CONSUMERS; }
};

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
