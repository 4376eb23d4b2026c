// The words of CUDA C++ that kernels of warps with rings are written with, for a compiler of the host: the lanes of a CTA
// are fibers that meet where an instruction takes a whole warp. Copies come as late as they may.
//
// What a kernel calls beside C++ itself is defined here, but for `run_ctas` in warp_ctas_on_host.h. HOST_THREADS: of a CTA.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __device__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(bytes)
#define __maxnreg__(registers)

struct uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, gridDim;
using std::max;
using std::min;

constexpr int WARP = 32, THREADS = HOST_THREADS;
constexpr unsigned SHARED_BYTES = 232448;
alignas(1024) static unsigned char shared_memory[SHARED_BYTES];

struct Copy {
    unsigned to;
    unsigned char bytes[16];
};

struct Fiber {
    ucontext_t context;
    std::vector<unsigned char> stack;
    bool ended, waited;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

// Where threads meet: `arrived` of the lanes of a warp or a CTA, who were told to go on `turns` times.
struct Meeting {
    int arrived = 0;
    long turns = 0;
    const void* given[THREADS];
    void* found[THREADS];
};

static Fiber fibers[THREADS];
static Meeting warps[THREADS / WARP], block_meeting;
static ucontext_t scheduler;
static std::mt19937 chance;
static bool let_next;
// How often the threads of a CTA met.
static long meetings_of_the_block;

static Fiber& self() { return fibers[threadIdx.x]; }

static void yield() {
    swapcontext(&self().context, &scheduler);
}

// All `count` threads bring what they are given; the last one has `together` find what each gets.
static void meet(Meeting& meeting, int count, int place, const void* given, void* found,
                 const std::function<void(Meeting&)>& together) {
    meeting.given[place] = given;
    meeting.found[place] = found;
    const long turn = meeting.turns;
    if (++meeting.arrived == count) {
        together(meeting);
        meeting.arrived = 0;
        ++meeting.turns;
        return;
    }
    while (meeting.turns == turn) yield();
}

template <class Given, class Found>
static void of_warp(
    const Given& given, Found& found, const std::function<void(const Given* const*, Found**)>& together) {
    meet(warps[threadIdx.x / WARP], WARP, threadIdx.x % WARP, &given, &found, [&](Meeting& meeting) {
        together(reinterpret_cast<const Given* const*>(meeting.given), reinterpret_cast<Found**>(meeting.found));
    });
}

static float half_to_float(unsigned bits) {
    _Float16 half;
    const uint16_t low = bits;
    std::memcpy(&half, &low, 2);
    return half;
}

static unsigned float_to_half(float value) {
    const _Float16 half = value;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t all = static_cast<uint64_t>(high) << 32 | low;
    unsigned found = 0;
    for (int byte = 0; byte < 4; ++byte) {
        const int from = selector >> 4 * byte & 7;
        found |= static_cast<unsigned>(all >> 8 * from & 255) << 8 * byte;
    }
    return found;
}

template <class Number>
static Number shuffled(Number number, int from) {
    struct Given {
        Number number;
        int from;
    } given{number, from};
    Number found;
    of_warp<Given, Number>(given, found, [](const Given* const* all, Number** results) {
        for (int lane = 0; lane < WARP; ++lane) *results[lane] = all[all[lane]->from & 31]->number;
    });
    return found;
}

template <class Number>
static Number __shfl_sync(unsigned, Number number, int from) { return shuffled(number, from); }

template <class Number>
static Number __shfl_xor_sync(unsigned, Number number, int apart) {
    return shuffled(number, static_cast<int>(threadIdx.x) % WARP ^ apart);
}

static void __syncwarp() { shuffled(0, 0); }

static void __syncthreads() {
    meet(block_meeting, THREADS, threadIdx.x, nullptr, nullptr, [](Meeting&) { ++meetings_of_the_block; });
}

// --- Instructions ---

// Addresses of the memory that the kernel in front writes, and where it is as that kernel finds it.
static const unsigned char *fresh_from, *fresh_to, *stale;

static unsigned shared_address(const void*) { return 0; }

static void wait_for_inputs() { self().waited = true; }

static void let_next_start() { let_next = self().waited; }

static void copy_piece(unsigned to, const unsigned char* from, bool there) {
    Copy copy{to, {}};
    const bool early = !self().waited && from >= fresh_from && from < fresh_to;
    if (reinterpret_cast<uintptr_t>(from) % 16 || to % 16 || to + 16 > SHARED_BYTES) std::abort();
    if (there) std::memcpy(copy.bytes, early ? stale + (from - fresh_from) : from, 16);
    // Until it is there anything may be: here what nobody expects.
    std::memset(shared_memory + to, 0x7E, 16);
    self().open.push_back(copy);
}

static void copy_piece(unsigned to, const unsigned char* from) { copy_piece(to, from, true); }

static int lane_of_warp() { return threadIdx.x % WARP; }

static void close_copies() {
    self().groups.push_back(self().open);
    self().open.clear();
}

template <int UNDER_WAY>
static void wait_copies() {
    auto& groups = self().groups;
    while (groups.size() > UNDER_WAY) {
        for (const Copy& copy : groups.front()) std::memcpy(shared_memory + copy.to, copy.bytes, 16);
        groups.erase(groups.begin());
    }
}

struct Matrices {
    unsigned units[4];
};

static unsigned unit_at(unsigned address) {
    uint16_t unit;
    std::memcpy(&unit, shared_memory + address, 2);
    return unit;
}

template <bool TRANSPOSED>
static void load_matrices_of(unsigned (&units)[4], unsigned address) {
    Matrices found;
    of_warp<unsigned, Matrices>(address, found, [](const unsigned* const* rows, Matrices** results) {
        for (int lane = 0; lane < WARP; ++lane)
            for (int matrix = 0; matrix < 4; ++matrix) {
                unsigned two[2];
                for (int each = 0; each < 2; ++each) {
                    const int row = TRANSPOSED ? lane % 4 * 2 + each : lane / 4;
                    const int column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + each;
                    two[each] = unit_at(*rows[matrix * 8 + row] + 2 * column);
                }
                results[lane]->units[matrix] = two[0] | two[1] << 16;
            }
    });
    std::copy(found.units, found.units + 4, units);
}

static void load_matrices(unsigned (&units)[4], unsigned address) { load_matrices_of<false>(units, address); }

static void load_transposed(unsigned (&units)[4], unsigned address) { load_matrices_of<true>(units, address); }

static unsigned transposed(unsigned pair) {
    unsigned turned;
    of_warp<unsigned, unsigned>(pair, turned, [](const unsigned* const* pairs, unsigned** results) {
        for (int lane = 0; lane < WARP; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            unsigned two[2];
            for (int each = 0; each < 2; ++each)
                two[each] = *pairs[(column + each) * 4 + row / 2] >> row % 2 * 16 & 0xFFFF;
            *results[lane] = two[0] | two[1] << 16;
        }
    });
    return turned;
}

struct Operands {
    float sums[4];
    unsigned left[4], right[2];
};

static float bfloat_to_float(unsigned bits) { return __uint_as_float(bits << 16); }

template <float (*WIDENED)(unsigned)>
static void multiply_add_of(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
    Operands given;
    std::copy(sums, sums + 4, given.sums);
    std::copy(left, left + 4, given.left);
    std::copy(right, right + 2, given.right);
    struct Sums {
        float of[4];
    } found;
    of_warp<Operands, Sums>(given, found, [](const Operands* const* lanes, Sums** results) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < WARP; ++lane)
            for (int each = 0; each < 2; ++each)
                for (int more = 0; more < 2; ++more) {
                    const int row = lane / 4, pair = lane % 4 * 2 + each;
                    for (int half = 0; half < 2; ++half)
                        a[row + 8 * half][pair + 8 * more] =
                            WIDENED(lanes[lane]->left[2 * more + half] >> 16 * each & 0xFFFF);
                    b[pair + 8 * more][row] = WIDENED(lanes[lane]->right[more] >> 16 * each & 0xFFFF);
                }
        for (int lane = 0; lane < WARP; ++lane)
            for (int each = 0; each < 4; ++each) {
                double sum = lanes[lane]->sums[each];
                for (int k = 0; k < 16; ++k)
                    sum += static_cast<double>(a[lane / 4 + each / 2 * 8][k]) * b[k][lane % 4 * 2 + each % 2];
                results[lane]->of[each] = sum;
            }
    });
    std::copy(found.of, found.of + 4, sums);
}

static void multiply_add(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
    multiply_add_of<half_to_float>(sums, left, right);
}

static void multiply_add_bfloats(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
    multiply_add_of<bfloat_to_float>(sums, left, right);
}

// Of the kernel in front.
static uint4 load_inputs(const unsigned short* place) {
    if (!self().waited || reinterpret_cast<uintptr_t>(place) % 16) std::abort();
    uint4 eight;
    std::memcpy(&eight, place, 16);
    return eight;
}

template <class Value>
static Value shared_value(unsigned address) {
    if (address % sizeof(Value)) std::abort();
    Value value;
    std::memcpy(&value, shared_memory + address, sizeof(Value));
    return value;
}

static uint4 load_piece(unsigned address) { return shared_value<uint4>(address); }
static unsigned load_short(unsigned address) { return shared_value<uint16_t>(address); }
static unsigned load_byte(unsigned address) { return shared_memory[address]; }
static uint2 load_words(unsigned address) { return shared_value<uint2>(address); }
static float load_number(unsigned address) { return shared_value<float>(address); }
static float4 load_numbers(unsigned address) { return shared_value<float4>(address); }
static void store_number(unsigned address, float number) { std::memcpy(shared_memory + address, &number, 4); }
static void store_pair(unsigned address, float first, float second) {
    store_number(address, first);
    store_number(address + 4, second);
}
static float power_of_two(float exponent) { return std::exp2(exponent); }
static float inverse_root(float number) { return 1.0f / std::sqrt(number); }
static float binary_log(float number) { return std::log2(number); }
static unsigned rounded_halves(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
static unsigned rounded_bfloat(float value) {
    const unsigned bits = __float_as_uint(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static unsigned rounded_bfloats(float low, float high) { return rounded_bfloat(low) | rounded_bfloat(high) << 16; }
static float widened_half(unsigned short bits) { return half_to_float(bits); }
static float lower(unsigned pair) { return half_to_float(pair & 0xFFFF); }
static float upper(unsigned pair) { return half_to_float(pair >> 16); }
static unsigned masked_with(unsigned units, unsigned mask, unsigned bits) { return units & mask | bits; }
static unsigned difference_of_halves(unsigned pair, unsigned less) {
    return rounded_halves(lower(pair) - lower(less), upper(pair) - upper(less));
}
static unsigned product_of_halves(unsigned pair, unsigned factors) {
    return rounded_halves(lower(pair) * lower(factors), upper(pair) * upper(factors));
}
