/* The ring file as C structures. run/ring.py holds the same numbers for Python; tests/run/test_ring.py compares the two. */
#ifndef TORCHLENS_PERF_NATIVE_LAYOUT_H
#define TORCHLENS_PERF_NATIVE_LAYOUT_H

#include <stdint.h>

enum { MAX_FRAMES = 64, MAX_GROUPS = 48, MAX_RECENT = 32 };

/* Kinds from DATA to CLOSURE are phases: their time is taken out of the phase around them. */
enum kind {
    KIND_STEP = 1,
    KIND_DATA = 2,
    KIND_FORWARD = 3,
    KIND_BACKWARD = 4,
    KIND_OPTIMIZER = 5,
    KIND_WAIT = 6,
    KIND_RECOMPUTE = 7,
    KIND_CLOSURE = 8,
    KIND_MODULE = 16,
    KIND_SECTION = 18,
    KIND_COLLECTIVE = 19,
    KIND_THREAD_TIME = 20,
    KIND_DEVICE = 21,
};
#define LAST_PHASE KIND_CLOSURE

enum flag {
    FLAG_EXCEPTION = 1,
    FLAG_WITHOUT_MODULES = 4,
    FLAG_WITHOUT_PHASES = 4, /* of a device's step */
    FLAG_OTHER_THREAD = 8,
    FLAG_COMPLETED = 16,
    FLAG_DEVICE = 32,
    FLAG_CAPTURED = 128,
    FLAG_MANUAL = 4096,
};

/* One closed span: one cache line, so that a record never straddles two. */
typedef struct {
    uint64_t tag; /* stamp | kind << 32 | depth << 40 | flags << 48; zero while the slot is being written */
    uint32_t name_id;
    uint32_t step;
    int64_t start_ns;
    int64_t duration_ns;
    int64_t nested_ns; /* part of the duration that lies inside nested spans */
    int64_t phase_ns;  /* part of the duration that belongs to nested phases */
    uint64_t value0;
    uint64_t value1;
} Record;

/* One span that is still open. */
typedef struct {
    int64_t start_ns;
    int64_t nested_ns;
    int64_t phase_ns;
    uint32_t name_id;
    uint32_t kind;
} Frame;

typedef struct {
    uint64_t depth; /* open spans; may exceed MAX_FRAMES, the surplus is not recorded */
    Frame frames[MAX_FRAMES];
} Stack;

/* How far a process group is, so that a reader sees who is missing in a collective. */
typedef struct {
    uint32_t name_id;
    uint32_t began;  /* the last one whose kernel is known to have begun, likewise, its lower bits; 0: nobody tells */
    uint64_t issued; /* sequence number of the last operation issued, plus 1 */
    uint64_t ended;  /* the same of the last one that is known to have ended, or whose end nobody tells */
} Group;

/* One of the last operations issued, so that a reader sees in which operation a blocked rank is. */
typedef struct {
    uint64_t key; /* sequence number | name id << 32 | row of the group plus 1 << 56; zero: empty */
    uint64_t bytes;
} Recent;

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t record_bytes;
    uint64_t capacity; /* records; a power of two */
    uint64_t metadata_offset, metadata_bytes;
    uint64_t names_offset, names_bytes;
    uint64_t records_offset;
    /* offset 64: what the writer touches with every record */
    uint64_t head; /* records written since the start */
    uint64_t step; /* index of the step in progress */
    uint64_t unbalanced;
    uint64_t too_deep;
    uint64_t tool_ns; /* time spent in our own Python hooks on the training thread */
    uint64_t state;   /* 0 open, 1 closed by its writer */
    uint64_t gc_ns;   /* time in which Python collected garbage */
    uint64_t device_since_ns; /* when the device was first seen at the mark that it has reached; the host's clock */
    /* offset 128: names and metadata */
    uint64_t names_used, names_lost;
    uint64_t metadata_revision, metadata_used;
    uint64_t internal_errors;
    uint64_t device_step;      /* of that mark: the step plus 1, and above 32 bits which of its marks; 0: not known */
    uint64_t device_mark;      /* the kind of span, 256 if it is its end, and above 32 bits its name */
    uint64_t device_looked_ns; /* when the device was last asked */
    /* offset 192: the open spans of the training thread, so that a reader sees where a hung or killed rank is */
    Stack stack;
    uint64_t groups_used;
    Group groups[MAX_GROUPS];
    Recent recent[MAX_RECENT]; /* a circular buffer, over all groups */
} Header;

_Static_assert(sizeof(Record) == 64, "a record is one cache line");
_Static_assert(sizeof(Frame) == 32, "frame size is part of the file format");
_Static_assert(__builtin_offsetof(Header, head) == 64, "header layout is part of the file format");
_Static_assert(__builtin_offsetof(Header, names_used) == 128, "header layout is part of the file format");
_Static_assert(__builtin_offsetof(Header, stack) == 192, "header layout is part of the file format");
_Static_assert(sizeof(Group) == 24, "group size is part of the file format");
_Static_assert(sizeof(Recent) == 16, "the operations' size is part of the file format");
_Static_assert(sizeof(Header) <= 4096, "the metadata begin there");

#endif
