"""An asynchronous device without a GPU for tests of device times.

The device has streams, events, operators and collectives:

    from tests.device import device

    device.load()  # Before the first backward pass and the first use of torch.accelerator.
    dist.init_process_group("asyncdev")
    model = DistributedDataParallel(build().to("asyncdev"))

The device is a PrivateUse1 backend in C++. The backend is compiled at the first use, in about 30 s
on two processors, into tests/device/build. The device's memory is host memory. Each operator is
issued to the current stream and returns at once. Output shapes come from the meta device. Values
are computed later by the CPU's kernel on the stream's thread. Results therefore equal the CPU's bit
for bit, and the host runs ahead. Operations that need a value wait, as on CUDA: item(), cpu(),
nonzero(), blocking copies, and barriers.

Tests plant the times of kernels, which are exact even on a busy machine. Each stream has its own
virtual time on the device's clock:

- A kernel begins when the stream is free and the host has issued the kernel. A kernel takes its
  nominal time (`set_kernel_time` multiplied by `set_slowness`, or the time of `spin`). A kernel
  that `start_endless_kernel` has started runs until the test releases it. The CPU time of the
  computation does not affect device times.
- A collective begins on all ranks when the last rank's stream has reached it, and takes
  `set_collective_time`.
- An event is reached when the work before it is computed and that work's time has passed.
- `capture_graph` captures the work of one stream. A replay is one launch, and takes as long as the
  captured work.

Limits:

- Host times between kernels are real, so gaps depend on the host if the device waits for it.
- Kernels and collectives do not slow down work on other streams. Memory bandwidth is not modelled.
- Memory is not reused while it is in use (no caching allocator, retries or fragmentation), so a
  missing record_stream() has no effect.
- There is one device per process, and no graphs of several streams, autocast, Inductor or NCCL with its
  plugin and watchdog. All collectives wait for all ranks, broadcasts too.
- An invalid argument of an in-place operator may raise at the next wait instead of in the call.
- Kernels have no names that tools such as CUPTI or Kineto could read.
"""
