/* Device code: stamps of the device's clock, and the reduction of the spans between them.
 *
 * Three compilers build this source: NVRTC through CuPy on a GPU (kernels.py), nvcc to count registers, and g++ with
 * tests/support/device/shim.h, where every CUDA thread is a fiber. twins.py in that folder is the same in NumPy.
 *
 * Durations are whole nanoseconds and their statistics are integers. They do not depend on the order of threads, blocks
 * or ranks, and merge by one SUM and one MAX. Only scores are floating-point, with one rounding per operation.
 */
typedef unsigned long long u64;
typedef unsigned int u32;
typedef long long i64;

#ifndef SHIM
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
__device__ __forceinline__ u64 global_timer_ns()
{
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
#endif

/* The histogram of run/sketch.py: OpenTelemetry's exponential histogram of scale 5, in seconds, up to 2^12 s. A second
 * is not a power of two in nanoseconds, so no bound is one either: 32 bounds lie between two powers of two. The first
 * bucket ends at FIRST_BOUND ns, which is bound number FIRST_PLACE between 2^FIRST_BIT and its double. */
#define SUBDIVISIONS 32
#define BUCKETS 1152
#define FIRST_BOUND 60
#define FIRST_BIT 5
#define FIRST_PLACE 29

/* A row of the values that merge by SUM: these, then the histogram. Each square is split into three parts of 32 bits
 * with a column each, whose sums are exact for 2^31 durations. */
enum { SUM_COUNT, SUM_NS, SUM_SQUARES_0, SUM_SQUARES_1, SUM_SQUARES_2, SUM_LOST, SUM_FIELDS };
/* Values that merge by MAX. */
enum { MAX_NS, MAX_MINUS_SMALLEST, MAX_FIELDS };
/* Exact values of this window, which do not merge. */
enum { EXACT_MEDIAN, EXACT_MAD, EXACT_FIRST_START, EXACT_LAST_END, EXACT_FIELDS };

#define SUM_ROW (SUM_FIELDS + BUCKETS)
#define WHOLE_WARP 0xffffffffu
#define REDUCE_THREADS 256
#define SCORE_THREADS 1024

/* Closes the open span of the slot `close` and opens one in the slot `open`; -1 stands for no slot. A chain of S
 * sections takes S + 1 stamps. All state is in device memory, so that a captured graph appends at each replay.
 *
 * Only one thread works. Streams must order the stamps of a slot. A close without an open span records nothing.
 */
extern "C" __global__ void __launch_bounds__(32)
    stamp(u64 *opened, u64 *start_ns, u64 *duration_ns, u32 *head, int close, int open, u32 mask)
{
    if (threadIdx.x > 0) {
        return;
    }
    u64 now = global_timer_ns();
    if (close >= 0 && opened[close] != 0) {
        u64 since = opened[close];
        u32 sequence = head[close];
        size_t at = (size_t)close * (mask + 1u) + (sequence & mask);
        start_ns[at] = since;
        duration_ns[at] = now > since ? now - since : 0;
        /* A reduction on another stream that reads the new head must read the new span too. */
        __threadfence();
        head[close] = sequence + 1u;
        opened[close] = 0;
    }
    if (open >= 0) {
        opened[open] = now;
    }
}

/* Returns the bucket of a duration. bounds: the ordered bounds of one octave, see reduction.mantissa_bounds(). The
 * duration is shifted until its highest set bit is bit 63, and compared with the bounds as integers. A logarithm in
 * floating point would be wrong at some bounds. */
__device__ __forceinline__ int bucket_of(u64 duration_ns, const u64 *bounds)
{
    if (duration_ns <= FIRST_BOUND) {
        return 0;
    }
    int shift = __clzll((i64)duration_ns);
    u64 mantissa = duration_ns << shift;
    int below = 0;
#pragma unroll
    for (int half = SUBDIVISIONS / 2; half > 0; half >>= 1) {
        if (mantissa > bounds[below + half - 1]) {
            below += half;
        }
    }
    below += mantissa > bounds[below]; /* All bounds may be smaller than the mantissa. */
    int bucket = (63 - shift - FIRST_BIT) * SUBDIVISIONS + below - FIRST_PLACE;
    return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

__device__ __forceinline__ u64 larger(u64 a, u64 b)
{
    return a > b ? a : b;
}

__device__ __forceinline__ u64 distance(u64 a, u64 b)
{
    return a > b ? a - b : b - a;
}

/* Sorts `size` values in shared memory. `size` is a power of two. All threads of the block call it after a barrier. */
__device__ void bitonic_sort(u64 *values, u32 size)
{
    for (u32 run = 2; run <= size; run <<= 1) {
        for (u32 stride = run >> 1; stride > 0; stride >>= 1) {
            for (u32 pair = threadIdx.x; pair < size >> 1; pair += blockDim.x) {
                u32 low = 2 * pair - (pair & (stride - 1)), high = low + stride;
                u64 first = values[low], second = values[high];
                if ((first > second) == ((low & run) == 0)) {
                    values[low] = second;
                    values[high] = first;
                }
            }
            __syncthreads();
        }
    }
}

/* Reduces the spans in each slot's ring since the last reduction, and marks them as read. One block per slot.
 *
 * sums [slots, SUM_ROW], largest [slots, MAX_FIELDS] and exact [slots, EXACT_FIELDS] are overwritten. Spans that were
 * overwritten in the ring before they were read are counted as lost. A block has REDUCE_THREADS threads and 8 bytes of
 * shared memory for each place of the ring. During the reduction, another stream may stamp one more span into a full
 * ring; the place that it overwrites is not read.
 */
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
    reduce_window(const u64 *start_ns, const u64 *duration_ns, const u32 *head,
                  u32 *__restrict__ tail, const u64 *__restrict__ octave_bounds, i64 *__restrict__ sums,
                  i64 *__restrict__ largest, i64 *__restrict__ exact, u32 mask)
{
    enum { WARPS = REDUCE_THREADS / 32, PARTIALS = 4 };
    DYNAMIC_SHARED(u64, sorted);
    __shared__ u64 bounds[SUBDIVISIONS];
    __shared__ u32 histogram[BUCKETS];
    __shared__ u64 partial[WARPS][PARTIALS];
    __shared__ u64 min_distance[WARPS];
    __shared__ u32 newest_seen, oldest_new;
    const u32 slot = blockIdx.x, thread = threadIdx.x, lane = thread & 31u, warp = thread >> 5;
    const size_t ring = (size_t)slot * (mask + 1u);

    if (thread == 0) { /* One thread reads the head for all, as another stream may change it at the same time. */
        newest_seen = head[slot];
        oldest_new = tail[slot];
    }
    if (thread < SUBDIVISIONS) {
        bounds[thread] = octave_bounds[thread];
    }
    for (u32 bucket = thread; bucket < BUCKETS; bucket += blockDim.x) {
        histogram[bucket] = 0;
    }
    __syncthreads();
    const u32 newest = newest_seen, written = newest - oldest_new;
    /* The oldest place of a full ring is not read, as another stream may be stamping there. */
    const u32 count = written < mask ? written : mask, oldest = newest - count;

    u32 size = 1;
    while (size < count) {
        size <<= 1;
    }
    u64 sum = 0, squares_0 = 0, squares_1 = 0, squares_2 = 0;
    for (u32 i = thread; i < size; i += blockDim.x) {
        u64 value = ~0ull; /* Padding, which sorts to the end. */
        if (i < count) {
            value = duration_ns[ring + ((oldest + i) & mask)];
            u64 low = value * value;
            sum += value;
            squares_0 += low & 0xffffffffull;
            squares_1 += low >> 32;
            squares_2 += __umul64hi(value, value);
            atomicAdd(&histogram[bucket_of(value, bounds)], 1u);
        }
        sorted[i] = value;
    }
    for (int offset = 16; offset > 0; offset >>= 1) {
        sum += __shfl_down_sync(WHOLE_WARP, sum, offset);
        squares_0 += __shfl_down_sync(WHOLE_WARP, squares_0, offset);
        squares_1 += __shfl_down_sync(WHOLE_WARP, squares_1, offset);
        squares_2 += __shfl_down_sync(WHOLE_WARP, squares_2, offset);
    }
    if (lane == 0) {
        partial[warp][0] = sum;
        partial[warp][1] = squares_0;
        partial[warp][2] = squares_1;
        partial[warp][3] = squares_2;
    }
    __syncthreads();
    bitonic_sort(sorted, size);

    /* The median absolute deviation is the smallest radius around the median that holds half of the sorted values:
     * the least, over all runs of middle + 1 neighbours, of the farther end's distance. */
    const u32 middle = count > 0 ? (count - 1) / 2 : 0;
    const u64 median = count > 0 ? sorted[middle] : 0;
    u64 least = ~0ull;
    for (u32 i = thread; i + middle < count; i += blockDim.x) {
        u64 radius = larger(distance(sorted[i], median), distance(sorted[i + middle], median));
        least = radius < least ? radius : least;
    }
    for (int offset = 16; offset > 0; offset >>= 1) {
        u64 other = __shfl_down_sync(WHOLE_WARP, least, offset);
        least = other < least ? other : least;
    }
    if (lane == 0) {
        min_distance[warp] = least;
    }
    __syncthreads();

    i64 *row = sums + (size_t)slot * SUM_ROW;
    for (u32 bucket = thread; bucket < BUCKETS; bucket += blockDim.x) {
        row[SUM_FIELDS + bucket] = histogram[bucket];
    }
    if (thread > 0) {
        return;
    }
    for (u32 other = 1; other < WARPS; other++) {
        sum += partial[other][0];
        squares_0 += partial[other][1];
        squares_1 += partial[other][2];
        squares_2 += partial[other][3];
        least = min_distance[other] < least ? min_distance[other] : least;
    }
    row[SUM_COUNT] = count;
    row[SUM_NS] = (i64)sum;
    row[SUM_SQUARES_0] = (i64)squares_0;
    row[SUM_SQUARES_1] = (i64)squares_1;
    row[SUM_SQUARES_2] = (i64)squares_2;
    row[SUM_LOST] = written - count;
    i64 *most = largest + (size_t)slot * MAX_FIELDS;
    most[MAX_NS] = count > 0 ? (i64)sorted[count - 1] : 0;
    most[MAX_MINUS_SMALLEST] = count > 0 ? -(i64)sorted[0] : -0x7fffffffffffffffll;
    i64 *now = exact + (size_t)slot * EXACT_FIELDS;
    const size_t last = ring + ((newest - 1u) & mask);
    now[EXACT_MEDIAN] = (i64)median;
    now[EXACT_MAD] = count > 0 ? (i64)least : 0;
    now[EXACT_FIRST_START] = count > 0 ? (i64)start_ns[ring + (oldest & mask)] : 0;
    now[EXACT_LAST_END] = count > 0 ? (i64)(start_ns[last] + duration_ns[last]) : 0;
    tail[slot] = newest;
}

/* Finds the buckets of quantiles in merged histograms, -1 for an empty one. One warp per slot, blocks of 128 threads.
 *
 * sums [slots, SUM_ROW]; parts [quantiles], each in units of 2^-16; buckets [slots, quantiles].
 */
extern "C" __global__ void __launch_bounds__(128)
    merged_quantiles(const i64 *__restrict__ sums, int slots, const u32 *__restrict__ parts, int quantiles,
                     int *__restrict__ buckets)
{
    const int slot = (int)(blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)), lane = (int)(threadIdx.x & 31u);
    if (slot >= slots) {
        return; /* All threads of a warp have the same slot and return together. */
    }
    const i64 *histogram = sums + (size_t)slot * SUM_ROW + SUM_FIELDS;
    const u64 count = (u64)sums[(size_t)slot * SUM_ROW + SUM_COUNT];
    for (int quantile = 0; quantile < quantiles; quantile++) {
        /* The rank of the wanted value from 0, rounded to the nearest. It is exact for up to 2^48 values. */
        u64 wanted = count > 0 ? ((count - 1) * parts[quantile] + 32768u) >> 16 : 0;
        u64 before = 0;
        int found = -1;
        for (int first = 0; first < BUCKETS && found < 0 && count > 0; first += 32) {
            u64 until = (u64)histogram[first + lane];
            for (int offset = 1; offset < 32; offset <<= 1) {
                u64 left = __shfl_up_sync(WHOLE_WARP, until, offset);
                until += lane >= offset ? left : 0;
            }
            u32 beyond = __ballot_sync(WHOLE_WARP, before + until > wanted);
            if (beyond != 0) {
                found = first + __ffs((int)beyond) - 1;
            }
            before += __shfl_sync(WHOLE_WARP, until, 31);
        }
        if (lane == 0) {
            buckets[(size_t)slot * (size_t)quantiles + (size_t)quantile] = found;
        }
    }
}

/* Returns the k-th smallest of `count` keys in shared memory, by four passes of eight bits. All threads of the block
 * call it. It begins with a barrier before the keys are read, and ends with one after. Each group of warps counts in a
 * histogram of its own to reduce contention, as most keys share their high bits. */
#define COPIES 8
__device__ u32 select_key(const u32 *keys, u32 count, u32 k, u32 (*counts)[256], u32 *chosen)
{
    const u32 thread = threadIdx.x, copy = (thread >> 5) & (COPIES - 1);
    u32 prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = thread; i < 256 * COPIES; i += blockDim.x) {
            (&counts[0][0])[i] = 0;
        }
        __syncthreads();
        for (u32 i = thread; i < count; i += blockDim.x) {
            if ((keys[i] & mask) == prefix) {
                atomicAdd(&counts[copy][(keys[i] >> shift) & 255u], 1u);
            }
        }
        __syncthreads();
        for (u32 digit = thread; digit < 256; digit += blockDim.x) {
            u32 total = 0;
            for (u32 each = 0; each < COPIES; each++) {
                total += counts[each][digit];
            }
            counts[0][digit] = total;
        }
        __syncthreads();
        if (thread < 32) { /* One warp searches the 256 totals, eight per lane. */
            u32 total = 0;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                total += counts[0][thread * 8 + i];
            }
            u32 until = total;
            for (u32 offset = 1; offset < 32; offset <<= 1) {
                u32 left = __shfl_up_sync(WHOLE_WARP, until, offset);
                until += thread >= offset ? left : 0;
            }
            u32 before = until - total;
            if (k >= before && k < until) {
                u32 digit = thread * 8;
                while (k >= before + counts[0][digit]) {
                    before += counts[0][digit++];
                }
                chosen[0] = digit;
                chosen[1] = before;
            }
        }
        __syncthreads();
        prefix |= chosen[0] << shift;
        mask |= 255u << shift;
        k -= chosen[1]; /* Two more barriers come before `chosen` is written again. */
    }
    return prefix;
}

/* Computes scores of ranks: by how many robust deviations a rank's time exceeds the ranks' median in each slot. One
 * block per slot, SCORE_THREADS threads, 4 bytes of shared memory for each rank.
 *
 * times_ns [ranks, slots]: a time of 0 means that the rank does not take part in the slot.
 * middle [slots, 2]: lower median and median absolute deviation (MAD) in ns, as float.
 * worst [ranks]: zeroed before the call; the bits of the rank's highest score, and below them its slot.
 *
 * A score is (time - median) / max(1.4826 MAD, min_spread * median). A slot needs at least two ranks with a time; of
 * two times, the shorter is the median. 1.4826 MAD estimates the standard deviation of normally distributed values.
 */
extern "C" __global__ void __launch_bounds__(SCORE_THREADS)
    rank_scores(const i64 *__restrict__ times_ns, int ranks, int slots, float min_spread, float *__restrict__ middle,
                u64 *__restrict__ worst)
{
    DYNAMIC_SHARED(u32, keys); /* The bits of non-negative floats have the same order as the floats. */
    __shared__ u32 counts[COPIES][256];
    __shared__ u32 chosen[2];
    __shared__ u32 absent;
    const u32 slot = blockIdx.x, count = (u32)ranks;
    if (threadIdx.x == 0) {
        absent = 0;
    }
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < count; rank += blockDim.x) {
        i64 time_ns = times_ns[(size_t)rank * (size_t)slots + slot];
        keys[rank] = __float_as_uint((float)time_ns);
        if (time_ns == 0) {
            atomicAdd(&absent, 1u);
        }
    }
    __syncthreads();
    const u32 present = count - absent;
    if (threadIdx.x == 0) {
        middle[2 * slot] = 0.0f;
        middle[2 * slot + 1] = 0.0f;
    }
    if (present == 0) {
        return;
    }
    /* The zeros of absent ranks come first. */
    const float median = __uint_as_float(select_key(keys, count, absent + (present - 1) / 2, counts, chosen));
    for (u32 rank = threadIdx.x; rank < count; rank += blockDim.x) {
        float time = __uint_as_float(keys[rank]);
        /* Absent ranks come last. */
        keys[rank] = time == 0.0f ? ~0u : __float_as_uint(fabsf(time - median));
    }
    const float mad = __uint_as_float(select_key(keys, count, (present - 1) / 2, counts, chosen));
    const float spread = fmaxf(1.4826f * mad, min_spread * median);
    if (threadIdx.x == 0) {
        middle[2 * slot] = median;
        middle[2 * slot + 1] = mad;
    }
    if (present < 2 || !(spread > 0.0f)) {
        return;
    }
    for (u32 rank = threadIdx.x; rank < count; rank += blockDim.x) {
        float score = ((float)times_ns[(size_t)rank * (size_t)slots + slot] - median) / spread;
        if (score > 0.0f) {
            atomicMax(&worst[rank], (u64)__float_as_uint(score) << 32 | slot);
        }
    }
}
