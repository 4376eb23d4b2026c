// What a program of `warp_rings.cu` reads, and how each warp fills its ring.
//
// In a ring, a token's key and value are a line of 128 bytes of eight pieces; piece c lies at c ^ (token / 4 % 8). The
// 16 rows of tile a of a warp's 32 tokens are 4 r + 2 a + h for r of 8 and h of 2, row 8 h + r: what a lane has of two
// tiles are four tokens side by side, and the eight rows of a matrix lie in different banks.
//
// Defined in front of this text, by warp_rings.py: STAGES of a ring; REGISTERS of a thread at most; AFFINE, 1 where
// there are zeros, else codes are 8 too high; HALF, 1 for queries and outputs in float16 and 0 for bfloat16; KV_HEADS;
// GROUP, query heads of one; GRANULE_TOKENS; and ROW_BYTES of the payload, from one token's to the next one's.

constexpr int WARPS = 4;
constexpr int TOKENS = 32;
constexpr int BLOCK = WARPS * TOKENS;
constexpr int HEAD_DIM = 128;
constexpr int ROWS = 8;
constexpr int PLANES = AFFINE ? 4 : 2;
constexpr int SEQUENCE_FIELDS = 5;
constexpr int PROGRAM_FIELDS = 3;

constexpr unsigned LINE_BYTES = 128;
// A copy of a whole warp.
constexpr int COPY_TOKENS = 4;
constexpr int COPIES = TOKENS / COPY_TOKENS;
constexpr unsigned PLANE_BYTES = 2 * TOKENS;
constexpr int PLANE_PIECES = 4;
constexpr unsigned SCALES_AT = TOKENS * LINE_BYTES;
constexpr unsigned STAGE_BYTES = SCALES_AT + PLANES * PLANE_BYTES;
constexpr unsigned RING_BYTES = STAGES * STAGE_BYTES;

// A warp's state, in a stage that it has read: outputs [rows][numbers], then maxima and totals.
constexpr unsigned STATE_ROW = 4 * HEAD_DIM;
constexpr unsigned MAXIMA_AT = ROWS * STATE_ROW;
constexpr unsigned TOTALS_AT = MAXIMA_AT + 4 * ROWS;
static_assert(TOTALS_AT + 4 * ROWS <= STAGE_BYTES, "a state fits a stage");
static_assert(GROUP <= ROWS && GRANULE_TOKENS % BLOCK == 0, "rows of a tile, and blocks of a granule");

constexpr float LOWEST = -1e30f;
constexpr float LN2 = 0.6931471805599453f;
// What a code of 1 counts among values, and 16 times that, among keys.
constexpr float CODE_STEP = 1.0f / (1 << 24);
constexpr float KEY_STEP = 16.0f * CODE_STEP;
constexpr float OFFSET = 8.0f;
// The exponent by which probabilities are raised before they are multiplied by scales and rounded.
constexpr float RAISED = 2.0f;

// Strides of queries and outputs in numbers, of memory in bytes.
struct Problem {
    const unsigned short* q;
    const unsigned char* payload;
    const unsigned char* scales;
    const int* table;
    const long long* base_rows;
    const long long* slots;
    const long long* kv_lens;
    const int* programs;
    const int* sequences;
    unsigned short* out;
    float* partial;
    float* lse;
    int q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    int head_bytes, value_bytes, granule_bytes, scale_head_bytes, scale_value_bytes, scale_plane_bytes;
    int table_stride;
    // Whether a kernel in front has waited for the plan: it can be read at once.
    int settled;
    float scale;
};

// Where a lane reads matrices and scales in a stage, and where it writes.
struct Places {
    unsigned keys, values, factors, copies;

    __device__ Places(const Lane& at) {
        const unsigned row = at.lane % 8, second = at.lane / 8 % 2, third = at.lane / 16;
        keys = row * 4 * LINE_BYTES + second * LINE_BYTES + (third ^ row) * PIECE_BYTES;
        values = row * 4 * LINE_BYTES + third * LINE_BYTES + ((4 + second) ^ row) * PIECE_BYTES;
        factors = SCALES_AT + at.row * 8;
        copies = at.lane * PIECE_BYTES;
    }
};

// Blocks from one of a program's on, up to `stop`, of a sequence whose blocks are [first, last).
struct Segment {
    int sequence, first, last, stop;
};

// Of the first sequence from `sequence` on that has blocks behind `block`, which is before the program's `end`.
__device__ Segment find_segment(const Problem& problem, int sequence, int block, int end) {
    const int* fields = problem.sequences + sequence * SEQUENCE_FIELDS;
    while (fields[1] <= block) {
        fields += SEQUENCE_FIELDS;
        ++sequence;
    }
    const int last = fields[1];
    return {sequence, fields[0], last, min(last, end)};
}

// Asks for a warp's tokens of one block after the other, through all sequences of a program.
struct Fetcher {
    const Problem& problem;
    // The lane's first piece of a block.
    const unsigned char* codes;
    // Of the sequence in the table of granules, and of the lane in a granule's scales.
    int entries, lane_scales;
    int head, warp, end, stop, sequence, position, left, granule;

    __device__ Fetcher(const Problem& given, const Lane& at, int kv_head, int first, int behind, int first_sequence)
        : problem(given), codes(given.payload), entries(0), head(kv_head), warp(at.warp), end(behind), stop(first),
          sequence(first_sequence), position(0), left(0), granule(0) {
        const int plane = at.lane / PLANE_PIECES;
        lane_scales = head * problem.scale_head_bytes + plane / (PLANES / 2) * problem.scale_value_bytes +
                      plane % (PLANES / 2) * problem.scale_plane_bytes + at.lane % PLANE_PIECES * PIECE_BYTES;
    }

    __device__ void open(int block) {
        const Segment segment = find_segment(problem, sequence, block, end);
        const int lane = lane_of_warp(), piece = lane % 8;
        position = (block - segment.first) * BLOCK + warp * TOKENS;
        left = static_cast<int>(problem.kv_lens[segment.sequence]) - position;
        codes = problem.payload + (problem.base_rows[segment.sequence] + position + lane / 8) * ROW_BYTES +
                static_cast<long long>(head) * problem.head_bytes + piece / 4 * problem.value_bytes +
                piece % 4 * static_cast<int>(PIECE_BYTES);
        entries = static_cast<int>(problem.slots[segment.sequence]) * problem.table_stride;
        granule = problem.table[entries + position / GRANULE_TOKENS];
        stop = segment.stop;
        sequence = segment.sequence + 1;
    }

    // The next block, if the program has it. The newest token of a sequence is what the kernel in front may write.
    template <bool MAY_WAIT>
    __device__ void ask(int block, const Places& places, unsigned stage) {
        if (block < end) {
            if (block == stop) open(block);
            if (MAY_WAIT && left <= TOKENS) wait_for_inputs();
            copy(places, stage);
            position += BLOCK;
            left -= BLOCK;
            codes += BLOCK * static_cast<long long>(ROW_BYTES);
            // Asked for a block before it is needed.
            if (block + 1 < stop) granule = problem.table[entries + position / GRANULE_TOKENS];
        }
        close_copies();
    }

    __device__ void copy(const Places& places, unsigned stage) const {
        const unsigned to = stage + places.copies;
        if (left >= TOKENS) {
#pragma unroll
            for (int each = 0; each < COPIES; ++each)
                copy_piece(place_of(to, each), codes + each * COPY_TOKENS * static_cast<long long>(ROW_BYTES));
        } else {
            const int token = lane_of_warp() / 8;
#pragma unroll 1
            for (int each = 0; each < COPIES; ++each)
                copy_piece(
                    place_of(to, each), codes + each * COPY_TOKENS * static_cast<long long>(ROW_BYTES),
                    token + each * COPY_TOKENS < left);
        }
        if (places.copies < PLANES * PLANE_BYTES)
            copy_piece(
                to + SCALES_AT, problem.scales + static_cast<long long>(granule) * problem.granule_bytes +
                                    (lane_scales + position % GRANULE_TOKENS * 2));
    }

    // Of the tokens of a copy, in their lines.
    __device__ static unsigned place_of(unsigned to, int copy) {
        return (to ^ copy * PIECE_BYTES) + copy * COPY_TOKENS * LINE_BYTES;
    }
};
