// Of kernels that divide the inputs of a tile of outputs among the CTAs of a cluster, which add their sums up through
// each other's shared memory.
//
// Defined besides what hopper_parts.cu wants: GATED, 1 where every 16 rows of the weight are 8 outputs of the gate and
// the same ones of up, and SiLU · mul follows; RESIDUAL, 0 or 1; PARTIAL_ROW, floats from one token's sums to the next
// one's.

// When the next kernel may start.
enum { AT_START, AFTER_LAST_LOAD, AFTER_MAIN_LOOP };

constexpr int TILE_OUTPUTS = TILE_ROWS / (1 + GATED);
constexpr int UP_ROWS = 8;

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

__device__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

__device__ float4 gated(const float4& gate, const float4& up) {
    return make_float4(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w));
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

// As [token][row of the weight]. Rows are 4 floats longer than a multiple of 16: the 32 threads of a warp, 4 · 2 tokens
// and 8 rows of the weight, write to different banks.
__device__ void leave_sums(const float (&sums)[TOKENS / 2], unsigned partial, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = (group * 4 + warp) * 16 + lane / 4, token = lane % 4 * 2;
    const unsigned place = partial + 4 * (token * PARTIAL_ROW + row);
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

    // Of the weight in the tile.
    __device__ int row() const { return GATED ? quad / 2 * 16 + quad % 2 * QUAD : quad * QUAD; }
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

__device__ float4 total_of(unsigned place) {
    float4 total = load_sums(place_in(place, 0));
#pragma unroll
    for (int rank = 1; rank < CLUSTER; ++rank) add(total, load_sums(place_in(place, rank)));
    return total;
}

// What residuals become: outputs, summed over all CTAs in the order of their ranks, so that they have the same bits
// each time. Every thread loads in every pass, without a branch, so that many loads are under way at once.
__device__ void add_up(uint2 (&values)[PASSES], const Slice& slice, unsigned partial) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int token = min(slice.token_of(pass), TOKENS - 1);
        const unsigned place = partial + 4 * (token * PARTIAL_ROW + slice.row());
        float4 total = total_of(place);
        if (GATED) total = gated(total, total_of(place + 4 * UP_ROWS));
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
