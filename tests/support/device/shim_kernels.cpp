/* The kernels as a library for a CPU, with the functions by which tests and fake_driver.cpp call them. */
#include "../../../torchlens_perf/cuda/kernels.cu"

#define KERNEL(name) static shim::Register register_##name(#name, name)
KERNEL(stamp);
KERNEL(reduce_window);
KERNEL(merged_quantiles);
KERNEL(rank_scores);

/* Occupy the stream: the fake driver advances its clock by this time. */
static void spin(u64 duration_ns)
{
    (void)duration_ns;
}
KERNEL(spin);

extern "C" int shim_launch(const char *name, unsigned grid, unsigned threads, size_t shared_bytes, void **arguments,
                           unsigned schedule)
{
    return shim::launch(name, grid, threads, shared_bytes, arguments, schedule);
}

/* Return the number of the kernel's arguments and the bytes of each, or -1 for an unknown kernel. */
extern "C" int shim_arguments(const char *name, size_t *bytes, int most)
{
    auto found = shim::kernels().find(name);
    if (found == shim::kernels().end()) {
        return -1;
    }
    const std::vector<size_t> &sizes = found->second.argument_bytes;
    for (size_t i = 0; i < sizes.size() && i < static_cast<size_t>(most); i++) {
        bytes[i] = sizes[i];
    }
    return static_cast<int>(sizes.size());
}

extern "C" void shim_set_clock(uint64_t (*now_ns)())
{
    shim::device_clock_ns = now_ns;
}
