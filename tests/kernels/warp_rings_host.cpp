// Behind warp_on_host.h, the kernel and warp_ctas_on_host.h: `warp_rings` on the host.

static Problem given;
unsigned char shared[1];

static void start() {
    warp_rings(given);
    // What comes next may start when what it needs of the plan is there.
    if (!let_next) std::abort();
    self().ended = true;
    yield();
}

// fresh, fresh_bytes: memory that the kernel in front writes; stale: what is there before. Returns how often threads of
// all CTAs met, or -1 where a thread never ended or never waited for the kernel in front.
extern "C" long run(const Problem* problem, int grid, const unsigned char* fresh, long fresh_bytes,
                    const unsigned char* before, unsigned seed) {
    given = *problem;
    fresh_from = fresh;
    fresh_to = fresh + fresh_bytes;
    stale = before;
    return run_ctas(grid, start, seed) ? meetings_of_the_block : -1;
}
