// What kernels of linear layers on a Hopper have in common: barriers, copies, products, clusters, types. In front of the
// text of each, by hopper_parts.py.
//
// Defined: TOKENS, rows of x in a tile, a multiple of 8; GROUPS, consumer warpgroups of 64 rows of the weight each;
// STAGES of the ring; CLUSTER, CTAs; HALF, 1 for float16 and 0 for bfloat16; PRODUCER_WARPS, 1 where it is not; and
// `multiply_add`, a wgmma of 64 · TOKENS · 16.

constexpr int STEP_INPUTS = 64;
constexpr int ROW_BYTES = 128;
constexpr int GROUP_ROWS = 64;
constexpr int TILE_ROWS = GROUPS * GROUP_ROWS;
constexpr int CONSUMERS = GROUPS * 128;
constexpr int CONSUMER_WARPS = GROUPS * 4;
#ifndef PRODUCER_WARPS
#define PRODUCER_WARPS 1
#endif
constexpr int PRODUCERS = PRODUCER_WARPS * 32;

struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};

// In a ring of so many stages.
template <int COUNT>
struct RingPlace {
    int stage = 0;
    unsigned phase = 0;

    __device__ void advance() {
        if (++stage == COUNT) {
            stage = 0;
            phase ^= 1;
        }
    }
};

using Place = RingPlace<STAGES>;

__device__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ void init_barrier(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// What this thread wrote to shared memory, before copies read or write there.
__device__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ void show_barriers_to_copies() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    show_to_copies();
}

__device__ void expect_bytes(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void wait_phase(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

__device__ void prefetch(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ void copy_rows(unsigned to, const CUtensorMap& map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

__device__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int UNDER_WAY>
__device__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(UNDER_WAY) : "memory");
}

// Sums that products have written are read behind this, and not before.
__device__ void keep_behind(float (&sums)[TOKENS / 2]) {
#pragma unroll
    for (int each = 0; each < TOKENS / 2; ++each) asm volatile("" : "+f"(sums[each])::"memory");
}

__device__ int rank_in_cluster() {
    unsigned rank = 0;
#if CLUSTER > 1
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return static_cast<int>(rank);
}

__device__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same place in the shared memory of another CTA.
__device__ unsigned place_in(unsigned address, int rank) {
#if CLUSTER > 1
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
#else
    return address;
#endif
}

// Volatile: the compiler would put it off to where its result is stored, and keep twice as many registers until then.
__device__ unsigned rounded(float low, float high) {
    unsigned pair;
#if HALF
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ float widened(unsigned bits) {
#if HALF
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
#else
    return __uint_as_float(bits << 16);
#endif
}

// Of rows of 128 bytes, swizzled, 8 of them to 1024 bytes; inputs follow each other in a row.
__device__ unsigned long long descriptor(unsigned address) {
    constexpr unsigned long long SWIZZLED_128 = 1ull << 62, EIGHT_ROWS = 1024ull >> 4 << 32, UNUSED = 1ull << 16;
    return SWIZZLED_128 | EIGHT_ROWS | UNUSED | ((address & 0x3FFFF) >> 4);
}
