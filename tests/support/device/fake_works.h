/* How NCCL finds a kernel's times: it numbers the works of each channel on the host, the device does so as they run, and leaves
 * their times in a ring of 64. Included by fake_nccl.c, after its Task.
 *
 * Written after proxy.cc (ncclProxySaveOp, SaveProxyProfiler, incWorkCounter; profilerProxyProgress) and
 * device/common.h (profiler()) of 2.28 to 2.30. A work that is timed is numbered and posted to the proxy thread when it is launched,
 * and again at each replay of its graph; one that is not is numbered once, when it is enqueued, captured or not. A copy to
 * oneself the host does not number at all. The device numbers whatever runs.
 */
enum { RING = 64, MAX_POSTED = 4096, MAX_COUNTED = 4 };

typedef struct {
    uint64_t work, device_ns;
} Stamp;
typedef struct {
    Task *task;
    int channel, has_begun;
    uint64_t work;
} Posted;
typedef struct {
    void *context;
    uint64_t of_host[MAX_CHANNELS], of_device[MAX_CHANNELS];
    Stamp began[MAX_CHANNELS][RING], ended[MAX_CHANNELS][RING];
    Posted queue[MAX_POSTED];
    int posted, ever;
} Works;

static Works all_works[MAX_COUNTED];

static Works *works_of(void *context)
{
    for (int i = 0; i < MAX_COUNTED; i++) {
        if (context != NULL && all_works[i].context == context) {
            return &all_works[i];
        }
    }
    return NULL;
}

/* Number this communicator's works from now on. */
void fake_number_works(void *context)
{
    for (int i = 0; i < MAX_COUNTED; i++) {
        if (all_works[i].context == NULL) {
            memset(&all_works[i], 0, sizeof all_works[i]);
            all_works[i].context = context;
            return;
        }
    }
    abort();
}

static void works_post(Works *works, Task *task)
{
    for (int channel = 0; channel < task->channels; channel++) {
        if (works->posted == MAX_POSTED) {
            abort();
        }
        works->queue[works->posted++] = (Posted){task, channel, 0, ++works->of_host[channel]};
        works->ever++;
    }
}

static void works_enqueued(void *context, int rank, Task *task)
{
    Works *works = works_of(context);
    task->to_oneself = task->type == P2P && task->peer == rank;
    if (works == NULL || task->to_oneself) {
        return;
    }
    if (!(task->mask & KERNEL_CH)) {
        for (int channel = 0; channel < task->channels; channel++) {
            works->of_host[channel]++;
        }
    } else if (!task->captured) {
        works_post(works, task);
    }
}

static void works_replayed(void *context, Task *task)
{
    Works *works = works_of(context);
    if (works != NULL && !task->to_oneself && task->mask & KERNEL_CH) {
        works_post(works, task);
    }
}

/* Run the work on the device, whether or not it is observed. */
void fake_run(void *context, Task *task, uint64_t first_ns, uint64_t last_ns)
{
    Works *works = works_of(context);
    for (int channel = 0; works != NULL && channel < task->channels; channel++) {
        uint64_t work = ++works->of_device[channel];
        works->began[channel][work % RING] = (Stamp){work, first_ns};
        works->ended[channel][work % RING] = (Stamp){work, last_ns};
    }
}

/* Return the number of works posted to the proxy thread so far, on all channels. */
int fake_posted(void *context)
{
    Works *works = works_of(context);
    return works == NULL ? 0 : works->ever;
}
