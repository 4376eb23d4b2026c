// Behind warp_on_host.h and a kernel: CTAs one by one, their warps at paces of their own.

// Whether all threads of all CTAs ended, and waited for the kernel in front; `start` runs the kernel and ends its fiber.
static bool run_ctas(int grid, void (*start)(), unsigned seed) {
    chance.seed(seed);
    meetings_of_the_block = 0;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < static_cast<unsigned>(grid); ++blockIdx.x) {
        std::memset(shared_memory, 0x7E, SHARED_BYTES);
        let_next = false;
        block_meeting = Meeting();
        for (int warp = 0; warp < THREADS / WARP; ++warp) warps[warp] = Meeting();
        for (int thread = 0; thread < THREADS; ++thread) {
            Fiber& fiber = fibers[thread];
            fiber.stack.resize(1 << 16);
            fiber.ended = fiber.waited = false;
            fiber.groups.clear();
            fiber.open.clear();
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, start, 0);
        }
        int left = THREADS;
        long idle = 0;
        while (left > 0) {
            // A warp goes on for some time alone.
            const int warp = chance() % (THREADS / WARP), rounds = 1 + chance() % 60;
            for (int round = 0; round < rounds; ++round)
                for (int lane = 0; lane < WARP; ++lane) {
                    threadIdx.x = warp * WARP + lane;
                    if (fibers[threadIdx.x].ended) continue;
                    swapcontext(&scheduler, &fibers[threadIdx.x].context);
                    if (fibers[threadIdx.x].ended) {
                        --left;
                        if (!fibers[threadIdx.x].waited) return false;
                        idle = 0;
                    }
                }
            if (++idle > 1000000) return false;
        }
    }
    return true;
}
