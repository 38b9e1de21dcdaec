/* What the plugin needs to know of NCCL's profiler interface, versions 5 (NCCL 2.28) and 6 (2.29 and later).
 *
 * Written from the documented layout, and only as far as the plugin reads it. tests/native/test_nccl_abi.py holds it against
 * the whole layout. NCCL asks a library for the newest version that it knows, so that these go on to work with later ones.
 */
#ifndef TORCHLENS_PERF_NATIVE_NCCL_ABI_H
#define TORCHLENS_PERF_NATIVE_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NCCL_SUCCESS = 0 };

/* Bits of the event mask, and types of events. */
enum nccl_event {
    NCCL_GROUP = 1 << 0,
    NCCL_COLL = 1 << 1,
    NCCL_P2P = 1 << 2,
    NCCL_KERNEL_CH = 1 << 6,
    NCCL_GROUP_API = 1 << 8,
    NCCL_COLL_API = 1 << 9,
    NCCL_P2P_API = 1 << 10,
};

/* The state that a kernel's event gets with the device's time of its end. */
enum { NCCL_KERNEL_CH_STOP = 22 };

/* The part of an event's description that depends on its type. The same place in all versions. */
typedef union {
    struct {
        const char *function;
        size_t count;
        const char *datatype;
        int root;
        void *stream;
        bool captured;
    } coll_api;
    struct {
        const char *function;
        size_t count;
        const char *datatype;
        void *stream;
        bool captured;
    } p2p_api;
    struct {
        uint64_t sequence;
        const char *function;
        const void *send;
        void *receive;
        size_t count;
        int root;
        const char *datatype;
        uint8_t channels;
    } coll;
    struct {
        const char *function;
        void *buffer;
        const char *datatype;
        size_t count;
        int peer;
        uint8_t channels;
    } p2p;
    struct {
        uint8_t channel;
        uint64_t device_ns; /* the device's globaltimer at the kernel's start */
    } kernel_ch;
} NcclDetails;

typedef struct {
    uint64_t type;
    void *parent;
    int rank; /* in the communicator */
    NcclDetails details;
} NcclEvent;

typedef union {
    uint64_t kernel_device_ns;
} NcclState;

/* NCCL's log function, which is not called here. */
typedef void (*NcclLog)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

typedef struct {
    const char *name;
    int (*init)(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, NcclLog log);
    int (*start)(void *context, void **handle, NcclEvent *event);
    int (*stop)(void *handle);
    int (*record)(void *handle, int state, NcclState *arguments);
    int (*finalize)(void *context);
} NcclProfiler;

_Static_assert(sizeof(void *) == 8, "the offsets are those of 64-bit systems");
_Static_assert(offsetof(NcclEvent, parent) == 8 && offsetof(NcclEvent, rank) == 16, "part of the interface");
_Static_assert(offsetof(NcclEvent, details) == 24, "part of the interface");
_Static_assert(offsetof(NcclDetails, coll_api.captured) == 40, "part of the interface");
_Static_assert(offsetof(NcclDetails, p2p_api.captured) == 32, "part of the interface");
_Static_assert(offsetof(NcclDetails, coll.channels) == 56, "part of the interface");
_Static_assert(offsetof(NcclDetails, p2p.peer) == 32 && offsetof(NcclDetails, p2p.channels) == 36,
               "part of the interface");
_Static_assert(offsetof(NcclDetails, kernel_ch.device_ns) == 8, "part of the interface");
_Static_assert(sizeof(NcclProfiler) == 48, "part of the interface");

#endif
