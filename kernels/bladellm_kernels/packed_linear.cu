// out = x · weightᵀ + residual, or silu(gate) · up of x · weightᵀ, for few rows of x and a weight of bfloat16 that is
// stored in 12 bits a number: warps widen it in registers, from where the tensor cores take it.
//
// The weight is tiles of 64 rows and 64 inputs as `packed_weight.py` has them: of every thread of a warpgroup 16 bytes,
// three times, each behind those of the thread before; then patches, 32 bytes of each warp. x and the weight have a ring
// each, since a tile of the weight is free once it is in registers.
//
// In front of this text are hopper_parts.cu and cluster_sums.cu, with what they want, and `multiply_add_held`. Defined by
// packed_linear.py besides: LAUNCH_AT, when the next kernel may start; STAGES of x, WEIGHT_STAGES; AHEAD, 1 where a tile
// is widened while the one before is multiplied; BARRIERS_AT, bytes of the rings or of the sums that follow them.

constexpr unsigned NUMBER_BYTES = 6144, PART_BYTES = 2048, PATCH_BYTES = 32;
constexpr unsigned WEIGHT_TILE_BYTES = NUMBER_BYTES + 4 * PATCH_BYTES;
constexpr unsigned NO_PATCH = 0xFFFFFFFFu;

constexpr unsigned X_BYTES = TOKENS * ROW_BYTES, WEIGHT_BYTES = GROUPS * WEIGHT_TILE_BYTES;
constexpr unsigned WEIGHTS_AT = STAGES * X_BYTES;

// Of the thread's fragment of a tile, 16 pairs of inputs beside each other: four of each product's 16 inputs.
constexpr int PAIRS = 16;

using WeightPlace = RingPlace<WEIGHT_STAGES>;

struct Places {
    Place x;
    WeightPlace weight;
};

struct Rings {
    unsigned x_tiles, barriers;

    __device__ unsigned x(int stage) const { return x_tiles + stage * X_BYTES; }
    __device__ unsigned weight(int stage, int group) const {
        return x_tiles + WEIGHTS_AT + stage * WEIGHT_BYTES + group * WEIGHT_TILE_BYTES;
    }
    __device__ unsigned full_x(int stage) const { return barriers + 8 * stage; }
    __device__ unsigned empty_x(int stage) const { return full_x(STAGES + stage); }
    __device__ unsigned full_weight(int stage) const { return full_x(2 * STAGES + stage); }
    __device__ unsigned empty_weight(int stage) const { return full_weight(WEIGHT_STAGES + stage); }

    __device__ void init() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full_x(stage), 1);
            init_barrier(empty_x(stage), CONSUMER_WARPS);
        }
        for (int stage = 0; stage < WEIGHT_STAGES; ++stage) {
            init_barrier(full_weight(stage), 1);
            init_barrier(empty_weight(stage), CONSUMER_WARPS);
        }
        show_barriers_to_copies();
    }
};

// Tiles of all inputs of 64 rows behind each other, then those of the next rows.
struct Weight {
    const unsigned char* tiles;
    int tile_rows, steps;
};

__device__ void copy_bytes(unsigned to, const unsigned char* from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The last CTA may have fewer tiles than groups: the others of these multiply what lies in their memory, for nobody.
__device__ void fetch_weight(const Rings& rings, int stage, const Weight& weight, int tile_row, int step) {
    const int count = min(GROUPS, weight.tile_rows - tile_row);
    expect_bytes(rings.full_weight(stage), count * WEIGHT_TILE_BYTES);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        if (group >= count) return;
        const long long tile = static_cast<long long>(tile_row + group) * weight.steps + step;
        const unsigned char* from = weight.tiles + tile * WEIGHT_TILE_BYTES;
        copy_bytes(rings.weight(stage, group), from, WEIGHT_TILE_BYTES, rings.full_weight(stage));
    }
}

// One thread. The weight does not depend on the kernel in front: its ring is full before x is there.
__device__ void fetch_weights(const Rings& rings, const Weight& weight, int tile_row, Steps steps) {
    WeightPlace place;
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
        // In the first turn for the phase before the first one, which is over.
        wait_phase(rings.empty_weight(place.stage), place.phase ^ 1);
        fetch_weight(rings, place.stage, weight, tile_row, steps.first + step);
        place.advance();
    }
}

// One thread.
__device__ void fetch_x(const Rings& rings, const CUtensorMap& x, Steps steps) {
    wait_for_inputs();
    Place place;
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
        wait_phase(rings.empty_x(place.stage), place.phase ^ 1);
        expect_bytes(rings.full_x(place.stage), X_BYTES);
        copy_rows(rings.x(place.stage), x, (steps.first + step) * STEP_INPUTS, 0, rings.full_x(place.stage));
        place.advance();
    }
    if (LAUNCH_AT == AFTER_LAST_LOAD) let_next_start();
}

__device__ uint4 load_words(unsigned address) {
    uint4 words;
    asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return words;
}

// Bytes of a and b, four bits of `which` for each.
__device__ unsigned chosen(unsigned a, unsigned b, unsigned which) {
    unsigned found;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(which));
    return found;
}

// Four pairs from `at` on. low, more_low: the lower bytes of their numbers; high: of the upper bytes of the first four
// numbers bits 7 and 2..0, and of the others bits 3 and 6..4. The exponents' upper bits are 0111.
__device__ void widen_eight(unsigned (&pairs)[PAIRS], int at, unsigned low, unsigned more_low, unsigned high) {
    constexpr unsigned SIGNS = 0x80808080u, CODES = 0x87878787u, EXPONENTS = 0x38383838u;
    const unsigned first = (high & CODES) | EXPONENTS;
    const unsigned turned = (high << 4 & SIGNS) | (high >> 4 & ~SIGNS);
    const unsigned second = (turned & CODES) | EXPONENTS;
    pairs[at] = chosen(low, first, 0x5140);
    pairs[at + 1] = chosen(low, first, 0x7362);
    pairs[at + 2] = chosen(more_low, second, 0x5140);
    pairs[at + 3] = chosen(more_low, second, 0x7362);
}

// word: the number in bits 31..16, which of its pair in 9, the pair in 8..5, the lane in 4..0.
__device__ void patch(unsigned (&pairs)[PAIRS], unsigned word, int lane) {
    constexpr unsigned AS_IT_IS = 0x3210, LOWER = 0x3276, UPPER = 0x7610;
    const unsigned which = word & 512 ? UPPER : LOWER;
    const unsigned pair = lane == (word & 31) ? word >> 5 & 15 : PAIRS;
#pragma unroll
    for (unsigned each = 0; each < PAIRS; ++each)
        pairs[each] = chosen(pairs[each], word, each == pair ? which : AS_IT_IS);
}

// Up to four, those in use in front. The same in all threads of a warp.
__device__ void patch_four(unsigned (&pairs)[PAIRS], const uint4& words, int lane) {
    if (words.x == NO_PATCH) return;
    patch(pairs, words.x, lane);
    if (words.y == NO_PATCH) return;
    patch(pairs, words.y, lane);
    if (words.z != NO_PATCH) patch(pairs, words.z, lane);
    if (words.w != NO_PATCH) patch(pairs, words.w, lane);
}

__device__ void load_weight(unsigned (&pairs)[PAIRS], unsigned tile) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const unsigned place = tile + thread * 16, patches_at = tile + NUMBER_BYTES + thread / 32 * PATCH_BYTES;
    const uint4 low = load_words(place), more_low = load_words(place + PART_BYTES);
    const uint4 high = load_words(place + 2 * PART_BYTES), patches = load_words(patches_at);
    widen_eight(pairs, 0, low.x, low.y, high.x);
    widen_eight(pairs, 4, low.z, low.w, high.y);
    widen_eight(pairs, 8, more_low.x, more_low.y, high.z);
    widen_eight(pairs, 12, more_low.z, more_low.w, high.w);
    // Seldom: of 1,024 numbers, where one in some 10,000 has a patch.
    if (patches.x != NO_PATCH) {
        patch_four(pairs, patches, lane);
        if (patches.w != NO_PATCH) patch_four(pairs, load_words(patches_at + 16), lane);
    }
}

// So that the compiler has all of them here, neither later nor in other registers.
__device__ void hold(unsigned (&pairs)[PAIRS]) {
#pragma unroll
    for (int each = 0; each < PAIRS; ++each) asm volatile("" : "+r"(pairs[each])::"memory");
}

__device__ void widen_step(unsigned (&pairs)[PAIRS], const Rings& rings, WeightPlace& place, int group) {
    wait_phase(rings.full_weight(place.stage), place.phase);
    load_weight(pairs, rings.weight(place.stage, group));
    hold(pairs);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(rings.empty_weight(place.stage));
    place.advance();
}

__device__ void multiply_step(
    float (&sums)[TOKENS / 2], unsigned (&pairs)[PAIRS], const Rings& rings, const Place& place) {
    const unsigned long long x = descriptor(rings.x(place.stage));
    wait_phase(rings.full_x(place.stage), place.phase);
    open_products();
#pragma unroll
    for (int part = 0; part < STEP_INPUTS / 16; ++part) {
        const unsigned* four = pairs + 4 * part;
        multiply_add_held(sums, four[0], four[1], four[2], four[3], x + (part * 32 >> 4));
    }
    close_products();
}

// While the products of `before` run `pairs` is widened, and its products stand behind them when they end.
__device__ void add_step(
    float (&sums)[TOKENS / 2], unsigned (&pairs)[PAIRS], unsigned (&before)[PAIRS], const Rings& rings, Places& places,
    int group) {
    const int under_way = places.x.stage;
    places.x.advance();
    widen_step(pairs, rings, places.weight, group);
    multiply_step(sums, pairs, rings, places.x);
    wait_products<1>();
    hold(before);
    if (threadIdx.x % 32 == 0) arrive(rings.empty_x(under_way));
}

__device__ void add_products_ahead(float (&sums)[TOKENS / 2], const Rings& rings, int group, int count) {
    Places places;
    unsigned even[PAIRS], odd[PAIRS];
    widen_step(even, rings, places.weight, group);
    multiply_step(sums, even, rings, places.x);
#pragma unroll 1
    for (int step = 1; step + 1 < count; step += 2) {
        add_step(sums, odd, even, rings, places, group);
        add_step(sums, even, odd, rings, places, group);
    }
    if (count % 2 == 0) add_step(sums, odd, even, rings, places, group);
    wait_products<0>();
    hold(even);
    hold(odd);
    keep_behind(sums);
}

// A tile after the other; other warpgroups multiply meanwhile, those of a second CTA, too, whose registers fit then.
__device__ void add_products_in_turn(float (&sums)[TOKENS / 2], const Rings& rings, int group, int count) {
    Places places;
    unsigned pairs[PAIRS];
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        widen_step(pairs, rings, places.weight, group);
        multiply_step(sums, pairs, rings, places.x);
        wait_products<0>();
        hold(pairs);
        if (threadIdx.x % 32 == 0) arrive(rings.empty_x(places.x.stage));
        places.x.advance();
    }
    keep_behind(sums);
}

// factors: what the numbers of each row of the tile are to be multiplied by, powers of two.
__device__ void scale(float (&sums)[TOKENS / 2], const float* factors, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float* own = factors + (group * 4 + warp) * 16 + lane / 4;
    const float both[2] = {own[0], own[8]};
#pragma unroll
    for (int each = 0; each < TOKENS / 2; ++each) sums[each] *= both[each / 2 % 2];
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) packed_linear(
    const unsigned char* tiles, const float* factors, const __grid_constant__ CUtensorMap x,
    const unsigned short* residual, unsigned short* out, int rows, int outputs, int inputs, int residual_stride,
    int out_stride) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Rings rings{shared_address(shared), shared_address(shared) + BARRIERS_AT};
    const Weight weight{tiles, outputs * (1 + GATED) / GROUP_ROWS, inputs / STEP_INPUTS};
    const int rank = rank_in_cluster(), tile_row = static_cast<int>(blockIdx.x) / CLUSTER * GROUPS;
    const Steps steps = steps_of(rank, inputs);
    if (threadIdx.x == CONSUMERS) {
        prefetch(x);
        rings.init();
        if (LAUNCH_AT == AT_START) let_next_start();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) fetch_x(rings, x, steps);
        if (threadIdx.x == CONSUMERS + 32) fetch_weights(rings, weight, tile_row, steps);
        return;
    }
    const int group = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
    float sums[TOKENS / 2] = {};
    if (AHEAD)
        add_products_ahead(sums, rings, group, steps.count);
    else
        add_products_in_turn(sums, rings, group, steps.count);
    if (LAUNCH_AT == AFTER_MAIN_LOOP && threadIdx.x == 0) let_next_start();
    if (tile_row + group < weight.tile_rows) scale(sums, factors + tile_row * GROUP_ROWS, group);
    // Behind what the kernel in front wrote and read: residual and out.
    wait_for_inputs();
    finish(sums, {residual, out, rows, outputs, inputs, residual_stride, out_stride}, rings.x_tiles, group, rank);
}
