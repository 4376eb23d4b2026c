// Of wide_linear.cu: which tiles, and which of their steps, each cluster takes.
//
// Defined by wide_linear.py: LEAST_STEPS; ranges of steps that are shorter at the end of a tile, or at its beginning, are
// left to the cluster beside.

// First row of x and first output.
struct Tile {
    int token, output;
};

// Steps of a tile that a cluster takes, up to `end`.
struct Part {
    Tile tile;
    int first, end;
};

// All tiles, and which of them this CTA takes. Where the last CTAs of a cluster have no outputs, they do all the same
// with zeros, since the others wait for their share of x.
struct Work {
    int tall, wide, steps, rank;

    __device__ Work(int rows, int outputs, int inputs)
        : tall((rows + TOKENS - 1) / TOKENS), wide((outputs + CLUSTER * TILE_OUTPUTS - 1) / (CLUSTER * TILE_OUTPUTS)),
          steps((inputs + STEP_INPUTS - 1) / STEP_INPUTS), rank(rank_in_cluster()) {}

    __device__ int cluster() const { return static_cast<int>(blockIdx.x) / CLUSTER; }
    __device__ int clusters() const { return static_cast<int>(gridDim.x) / CLUSTER; }
    __device__ int tiles() const { return tall * wide; }

    // Tiles that are not divided.
    __device__ int whole() const {
        const int rounds = tiles() / clusters();
        return STREAM_K && tiles() % clusters() ? max(rounds - 1, 0) * clusters() : tiles();
    }

    // Where the steps of a cluster begin, counted in the divided tiles one behind the other, and those of the cluster
    // before it end. Later clusters have earlier steps: they wait for earlier clusters, which started before them.
    __device__ int first_step(int cluster) const {
        const int step = (tiles() - whole()) * steps * (clusters() - 1 - cluster) / clusters();
        const int inside = step % steps;
        if (inside < LEAST_STEPS) return step - inside;
        return inside > steps - LEAST_STEPS ? step - inside + steps : step;
    }

    // The next cluster that has steps of a divided tile which ends at `tile_end`, -1 without one.
    __device__ int next_of_tile(int cluster, int tile_end) const {
        for (--cluster; cluster >= 0 && first_step(cluster) < tile_end; --cluster)
            if (first_step(cluster) < first_step(cluster - 1)) return cluster;
        return -1;
    }

    // Down a band, then to the right, then the next band: its x stays in the L2 cache while the weight passes. Divided
    // tiles of one band to the right first, where that can be: then as many clusters as it has tiles are at the same
    // place of the same weight, which they read once.
    __device__ Tile tile(int place) const {
        const int divided = place - whole(), across = (tiles() - whole()) / tall;
        if (STREAM_K && divided >= 0 && tall <= BAND && whole() % tall == 0)
            return {divided / across * TOKENS, output(whole() / tall + divided % across)};
        const int band = place / (BAND * wide), inside = place - band * BAND * wide;
        const int height = min(tall - band * BAND, BAND);
        return {(band * BAND + inside % height) * TOKENS, output(inside / height)};
    }

    __device__ int output(int column) const { return (column * CLUSTER + rank) * TILE_OUTPUTS; }
};

// Of a cluster, one after the other: whole tiles, then its steps of divided ones, the end of a tile first, then the
// beginning of one, whose other sums are there by then.
struct Parts {
    int tile, step, end;

    __device__ explicit Parts(const Work& work) : tile(work.cluster()), step(0), end(0) {
        if (STREAM_K) {
            step = work.first_step(work.cluster());
            end = work.first_step(work.cluster() - 1);
        }
    }

    __device__ bool next(const Work& work, Part& part) {
        if (tile < work.whole()) {
            part = {work.tile(tile), 0, work.steps};
            tile += work.clusters();
            return true;
        }
        if (step >= end) return false;
        const int before = step / work.steps, first = step % work.steps;
        const int last = min(first + end - step, work.steps);
        part = {work.tile(work.whole() + before), first, last};
        step += last - first;
        return true;
    }

    // Where the divided tile of the last part ends.
    __device__ int tile_end(const Work& work) const { return (step + work.steps - 1) / work.steps * work.steps; }
};

// Clusters that have the other steps of a tile which this cluster begins.
__device__ int others_of(const Part& part, const Parts& parts, const Work& work) {
    int count = 0;
    if (STREAM_K && part.first == 0 && part.end < work.steps)
        for (int at = work.cluster(); (at = work.next_of_tile(at, parts.tile_end(work))) >= 0;) ++count;
    return count;
}
