/* What the tests and benchmarks compare the recorder with: offsets as the compiler sees them, and the floor of a mark. */
#include "layout.h"

#include <stddef.h>
#include <stdio.h>
#include <time.h>

/* Offsets of the ring file's fields as JSON. */
const char *layout(void)
{
#define FIELD(type, field) {#type "." #field, offsetof(type, field)}
    static const struct {
        const char *name;
        size_t offset;
    } fields[] = {
        FIELD(Header, magic), FIELD(Header, version), FIELD(Header, record_bytes), FIELD(Header, capacity),
        FIELD(Header, metadata_offset), FIELD(Header, metadata_bytes), FIELD(Header, names_offset),
        FIELD(Header, names_bytes), FIELD(Header, records_offset), FIELD(Header, head), FIELD(Header, step),
        FIELD(Header, unbalanced), FIELD(Header, too_deep), FIELD(Header, tool_ns), FIELD(Header, state),
        FIELD(Header, gc_ns), FIELD(Header, device_since_ns), FIELD(Header, device_step),
        FIELD(Header, device_mark), FIELD(Header, device_looked_ns),
        FIELD(Header, names_used), FIELD(Header, names_lost), FIELD(Header, metadata_revision),
        FIELD(Header, metadata_used), FIELD(Header, internal_errors), FIELD(Header, stack), FIELD(Record, tag),
        FIELD(Record, name_id), FIELD(Record, step), FIELD(Record, start_ns), FIELD(Record, duration_ns),
        FIELD(Record, nested_ns), FIELD(Record, phase_ns), FIELD(Record, value0), FIELD(Record, value1),
        FIELD(Frame, start_ns), FIELD(Frame, nested_ns), FIELD(Frame, phase_ns), FIELD(Frame, name_id),
        FIELD(Frame, kind), FIELD(Stack, depth), FIELD(Stack, frames), FIELD(Header, groups_used),
        FIELD(Header, groups), FIELD(Header, recent), FIELD(Group, name_id), FIELD(Group, issued), FIELD(Group, ended),
    };
#undef FIELD
    static char text[4096];
    size_t used = 0;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]) && used < sizeof(text); i++) {
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%s\"%s\": %zu", i == 0 ? "{" : ", ", fields[i].name,
                                 fields[i].offset);
    }
    snprintf(text + used, sizeof(text) - used, "}");
    return text;
}

/* Floor of any section that reads the clock twice and stores a record: what benchmarks divide by. */
long long floor_ns(long rounds)
{
    static Record slots[1024];
    struct timespec first, start, end;
    clock_gettime(CLOCK_MONOTONIC, &first);
    for (long i = 0; i < rounds; i++) {
        Record *slot = &slots[i & 1023];
        clock_gettime(CLOCK_MONOTONIC, &start);
        __asm__ volatile("" ::: "memory");
        clock_gettime(CLOCK_MONOTONIC, &end);
        slot->start_ns = (int64_t)start.tv_sec * 1000000000 + start.tv_nsec;
        slot->duration_ns = (int64_t)end.tv_sec * 1000000000 + end.tv_nsec - slot->start_ns;
        slot->tag = (uint64_t)i;
        __asm__ volatile("" ::: "memory");
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (long long)(end.tv_sec - first.tv_sec) * 1000000000 + end.tv_nsec - first.tv_nsec;
}
