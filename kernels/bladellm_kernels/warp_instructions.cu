// Instructions of a warp: copies into a ring of its own, products of its own, numbers of 16 bits.

__device__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ int lane_of_warp() {
    int lane;
    // Volatile: what is seldom made of it is not kept in registers.
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ void copy_piece(unsigned to, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Zeros, with nothing read, where it is not there.
__device__ void copy_piece(unsigned to, const unsigned char* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int UNDER_WAY>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
}

__device__ void load_matrices(unsigned (&units)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(units[0]), "=r"(units[1]), "=r"(units[2]), "=r"(units[3])
                 : "r"(address)
                 : "memory");
}

__device__ void load_transposed(unsigned (&units)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(units[0]), "=r"(units[1]), "=r"(units[2]), "=r"(units[3])
                 : "r"(address)
                 : "memory");
}

__device__ unsigned transposed(unsigned pair) {
    unsigned turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ void multiply_add(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

__device__ void multiply_add_bfloats(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// What other kernels wrote, once they have ended.
__device__ uint4 load_inputs(const unsigned short* place) {
    uint4 eight;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                 : "l"(place));
    return eight;
}

__device__ uint4 load_piece(unsigned address) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return words;
}

__device__ unsigned load_short(unsigned address) {
    unsigned short bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    return bits;
}

__device__ unsigned load_byte(unsigned address) {
    unsigned bits;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
    return bits;
}

__device__ uint2 load_words(unsigned address) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
    return words;
}

__device__ float load_number(unsigned address) {
    float number;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(number) : "r"(address) : "memory");
    return number;
}

__device__ float4 load_numbers(unsigned address) {
    float4 numbers;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(numbers.x), "=f"(numbers.y), "=f"(numbers.z), "=f"(numbers.w)
                 : "r"(address)
                 : "memory");
    return numbers;
}

__device__ void store_number(unsigned address, float number) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(number) : "memory");
}

__device__ void store_pair(unsigned address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

__device__ float inverse_root(float number) {
    float root;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(number));
    return root;
}

__device__ float binary_log(float number) {
    float log;
    asm("lg2.approx.f32 %0, %1;" : "=f"(log) : "f"(number));
    return log;
}

__device__ unsigned rounded_halves(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ unsigned rounded_bfloats(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ float widened_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// `units & mask | bits`, which a compiler makes two instructions of where both are constants.
__device__ unsigned masked_with(unsigned units, unsigned mask, unsigned bits) {
    unsigned found;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(units), "r"(mask), "r"(bits));
    return found;
}

__device__ unsigned difference_of_halves(unsigned pair, unsigned less) {
    unsigned difference;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(pair), "r"(less));
    return difference;
}

__device__ unsigned product_of_halves(unsigned pair, unsigned factors) {
    unsigned product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}
