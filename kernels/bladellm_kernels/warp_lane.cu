// What kernels of warps with rings of their own have in common, behind warp_instructions.cu.

constexpr unsigned WHOLE_WARP = 0xFFFFFFFF;
// That a lane copies at once.
constexpr unsigned PIECE_BYTES = 16;
constexpr float LOG2E = 1.4426950408889634f;

struct Lane {
    int lane, warp, row, pair;

    __device__ Lane() {
        lane = static_cast<int>(threadIdx.x) % 32;
        warp = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x) / 32, 0);
        // Of a product's operands and sums.
        row = lane / 4;
        pair = lane % 4;
    }
};
