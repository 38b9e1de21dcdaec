/* An NVTX injection library for the tests: counts, per domain and message, the ranges that begin and end.
 *
 * NVTX calls InitializeInjectionNvtx2 at a process's first NVTX call, if NVTX_INJECTION64_PATH names this library; the
 * callback tables are those of NVTX's public header nvtxDetail/nvtxTypes.h. At exit the counts are written to the file
 * that NVTX_COUNTER_OUT names, a line each: domain, message, begun, ended.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MODULE_CORE2 = 5, MAX_RANGES = 4096, MAX_DEPTH = 256 };
/* Positions in the CORE2 table. */
enum { DOMAIN_RANGE_START = 2, DOMAIN_RANGE_END = 3, DOMAIN_RANGE_PUSH = 4, DOMAIN_RANGE_POP = 5, REGISTER_STRING = 10, DOMAIN_CREATE = 12 };
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3 };

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type, padding;
    const char *message;
} Attributes;

typedef struct {
    size_t size;
    int (*get_module_table)(int module, void ****table, unsigned *size);
} ExportTable;

typedef struct {
    const char *domain, *message;
    unsigned long begun, ended;
} Range;

static Range ranges[MAX_RANGES];
static unsigned range_count, stack[MAX_DEPTH], depth, bad_pops;

static unsigned find(const char *domain, const Attributes *attributes)
{
    const char *message = attributes->message_type == MESSAGE_ASCII || attributes->message_type == MESSAGE_REGISTERED
                              ? attributes->message
                              : "(none)";
    for (unsigned i = 0; i < range_count; i++) {
        if (strcmp(ranges[i].message, message) == 0 && strcmp(ranges[i].domain, domain) == 0) {
            return i;
        }
    }
    ranges[range_count] = (Range){domain, strdup(message), 0, 0};
    return range_count++;
}

static int push(void *domain, const Attributes *attributes)
{
    unsigned range = find(domain, attributes);
    ranges[range].begun++;
    stack[depth % MAX_DEPTH] = range;
    return (int)depth++;
}

static int pop(void *domain)
{
    if (depth == 0) {
        bad_pops++;
        return -1;
    }
    ranges[stack[--depth % MAX_DEPTH]].ended++;
    return (int)depth;
}

static uint64_t start(void *domain, const Attributes *attributes)
{
    unsigned range = find(domain, attributes);
    ranges[range].begun++;
    return range + 1;
}

static void end(void *domain, uint64_t id)
{
    ranges[id - 1].ended++;
}

static void *create_domain(const char *name)
{
    return strdup(name);
}

static void *register_string(void *domain, const char *text)
{
    return strdup(text);
}

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t))
{
    const ExportTable *callbacks = get_export_table(1);
    void ***table;
    unsigned size;
    if (callbacks == NULL || !callbacks->get_module_table(MODULE_CORE2, &table, &size)) {
        return 0;
    }
    *table[DOMAIN_RANGE_START] = (void *)start;
    *table[DOMAIN_RANGE_END] = (void *)end;
    *table[DOMAIN_RANGE_PUSH] = (void *)push;
    *table[DOMAIN_RANGE_POP] = (void *)pop;
    *table[REGISTER_STRING] = (void *)register_string;
    *table[DOMAIN_CREATE] = (void *)create_domain;
    return 1;
}

__attribute__((destructor)) static void write_counts(void)
{
    const char *path = getenv("NVTX_COUNTER_OUT");
    FILE *file = path != NULL ? fopen(path, "w") : NULL;
    if (file == NULL) {
        return;
    }
    for (unsigned i = 0; i < range_count; i++) {
        fprintf(file, "%s\t%s\t%lu\t%lu\n", ranges[i].domain, ranges[i].message, ranges[i].begun, ranges[i].ended);
    }
    fprintf(file, "(bad pops)\t\t%u\t0\n", bad_pops);
    fclose(file);
}
