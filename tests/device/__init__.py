"""An asynchronous device without a GPU: streams, events, operators and collectives, for tests that judge device time.

    from tests.device import device

    device.load()  # before the first backward pass of the process, and before anything is asked of torch.accelerator
    dist.init_process_group("asyncdev")
    model = DistributedDataParallel(build().to("asyncdev"))

It is a PrivateUse1 backend in C++, compiled at the first use (half a minute of two processors; tests/device/build).
Memory is the host's. Each operator is issued to the current stream and returns at once: its shapes come from the meta
device, its values later from the CPU's own kernel, on the stream's thread. Numbers are the CPU's to the last bit, and
the host runs ahead. What needs a value waits, as on CUDA: item(), cpu(), nonzero(), blocking copies, a barrier.

Times are planted, and exact on a busy machine. Each stream has a line of its own on the device's clock: a kernel begins
when the stream has come to it and the host has issued it, and takes its nominal time (`set_kernel_time`, times
`set_slowness`; `spin` for one kernel; `never` for one that does not end before it is released). What the processor
takes to compute it is not in it. A collective begins on all ranks when the last one's stream has come to it, and takes
`set_collective_time`. An event is reached when its work has been computed and its time has passed.

What it cannot show:

- What the host takes between two kernels is real: where the device waits for the host, its gaps are this machine's.
- Kernels of two streams do not slow one another down, nor do collectives, and there is no bandwidth of memory.
- Blocks of memory are not reused before they have been used (no caching allocator, no retries, no fragmentation), so
  a missing record_stream() does no harm.
- One device for each process; no graphs, captures, autocast, Inductor, or NCCL: neither its plugin nor its
  watchdog. All collectives wait for all ranks, broadcasts too.
- A wrong argument of an in-place operator may be told at the next wait, not by the call.
- Names of kernels: nothing like CUPTI or kineto sees them.
"""
