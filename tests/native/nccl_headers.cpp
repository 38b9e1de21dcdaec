// Compares native/nccl_abi.h with NCCL's own headers at compile time: test_nccl_abi.py compiles this file.
#include <cstddef>
#include <cstdint>
#include <unistd.h>

typedef enum { ncclSuccess = 0 } ncclResult_t;
typedef void (*ncclDebugLogger_t)(int level, unsigned long flags, const char *file, int line, const char *fmt, ...);
typedef pid_t ncclPid_t;
#include "nccl_profiler.h"
#define _Static_assert static_assert
#include "nccl_abi.h"

#define EQUAL(theirs, ours) static_assert((unsigned long)(theirs) == (unsigned long)(ours), #theirs)
#define SAME_PLACE(THEIRS, theirs, OURS, ours) EQUAL(offsetof(THEIRS, theirs), offsetof(OURS, ours))

template <class Theirs, class Ours> void compare_events()
{
    EQUAL(sizeof(Theirs{}.type), sizeof(Ours{}.type));
    SAME_PLACE(Theirs, parentObj, Ours, parent);
    SAME_PLACE(Theirs, rank, Ours, rank);
    SAME_PLACE(Theirs, coll.seqNumber, Ours, details.coll.sequence);
    SAME_PLACE(Theirs, coll.func, Ours, details.coll.function);
    SAME_PLACE(Theirs, coll.count, Ours, details.coll.count);
    SAME_PLACE(Theirs, coll.root, Ours, details.coll.root);
    SAME_PLACE(Theirs, coll.datatype, Ours, details.coll.datatype);
    SAME_PLACE(Theirs, coll.nChannels, Ours, details.coll.channels);
    SAME_PLACE(Theirs, p2p.func, Ours, details.p2p.function);
    SAME_PLACE(Theirs, p2p.peer, Ours, details.p2p.peer);
    SAME_PLACE(Theirs, p2p.nChannels, Ours, details.p2p.channels);
    SAME_PLACE(Theirs, kernelCh.channelId, Ours, details.kernel_ch.channel);
    SAME_PLACE(Theirs, kernelCh.pTimer, Ours, details.kernel_ch.device_ns);
}

template <class Theirs, class Ours> void compare_calls()
{
    SAME_PLACE(Theirs, collApi.graphCaptured, Ours, details.coll_api.captured);
    SAME_PLACE(Theirs, p2pApi.graphCaptured, Ours, details.p2p_api.captured);
}

template <class Theirs, class Arguments, class Ours> void compare_functions()
{
    SAME_PLACE(Theirs, name, Ours, name);
    SAME_PLACE(Theirs, init, Ours, init);
    SAME_PLACE(Theirs, startEvent, Ours, start);
    SAME_PLACE(Theirs, stopEvent, Ours, stop);
    SAME_PLACE(Theirs, recordEventState, Ours, record);
    SAME_PLACE(Theirs, finalize, Ours, finalize);
    EQUAL(sizeof(Theirs), sizeof(Ours));
    SAME_PLACE(Arguments, kernelCh.pTimer, NcclState, kernel_device_ns);
}

EQUAL(ncclProfileGroup, NCCL_GROUP);
EQUAL(ncclProfileColl, NCCL_COLL);
EQUAL(ncclProfileP2p, NCCL_P2P);
EQUAL(ncclProfileKernelCh, NCCL_KERNEL_CH);
EQUAL(ncclProfilerKernelChStop, NCCL_KERNEL_CH_STOP);

void compare()
{
    EQUAL(ncclProfileGroupApi, NCCL_GROUP_API);
    EQUAL(ncclProfileCollApi, NCCL_COLL_API);
    EQUAL(ncclProfileP2pApi, NCCL_P2P_API);
    compare_events<ncclProfilerEventDescr_v5_t, NcclEvent>();
    compare_calls<ncclProfilerEventDescr_v5_t, NcclEvent>();
    compare_functions<ncclProfiler_v5_t, ncclProfilerEventStateArgs_v5_t, NcclProfiler>();
#if NEWEST >= 6
    compare_events<ncclProfilerEventDescr_v6_t, NcclEvent>();
    compare_calls<ncclProfilerEventDescr_v6_t, NcclEvent>();
    compare_functions<ncclProfiler_v6_t, ncclProfilerEventStateArgs_v6_t, NcclProfiler>();
#endif
}
