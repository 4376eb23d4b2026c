// Behind warp_on_host.h, the kernel and warp_ctas_on_host.h: `warp_units` on the host.

static Problem given;
unsigned char shared[1];

static void start() {
    warp_units(given);
    self().ended = true;
    yield();
}

// Returns how often threads of all CTAs met, or -1 where a thread never ended or never waited for the kernel in front.
extern "C" long run(const Problem* problem, int grid, unsigned seed) {
    given = *problem;
    return run_ctas(grid, start, seed) ? meetings_of_the_block : -1;
}
