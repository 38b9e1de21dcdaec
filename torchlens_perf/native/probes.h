/* Static probes (USDT) for bpftrace, perf and other tracers: each is one `nop` until a tracer attaches.
 *
 * Without <sys/sdt.h> (Debian: systemtap-sdt-dev) at build time there are none. docs/guides/probes.md lists them.
 */
#ifndef TORCHLENS_PERF_NATIVE_PROBES_H
#define TORCHLENS_PERF_NATIVE_PROBES_H

#ifdef __has_include
#if __has_include(<sys/sdt.h>)
#define SDT_USE_VARIADIC
#include <sys/sdt.h>
#endif
#endif
#ifndef SDT_USE_VARIADIC
#define STAP_PROBEV(...) ((void)0)
#endif

#define PROBE_STEP_BEGIN(step) STAP_PROBEV(torchlens_perf, step__begin, step)
#define PROBE_STEP_END(step, duration_ns) STAP_PROBEV(torchlens_perf, step__end, step, duration_ns)
#define PROBE_PHASE_BEGIN(kind) \
    do { \
        if (is_phase(kind)) { \
            STAP_PROBEV(torchlens_perf, phase__begin, kind); \
        } \
    } while (0)
#define PROBE_PHASE_END(kind, duration_ns, step) \
    do { \
        if (is_phase(kind)) { \
            STAP_PROBEV(torchlens_perf, phase__end, kind, duration_ns, step); \
        } \
    } while (0)
#define PROBE_COLLECTIVE_BEGIN(group, sequence, bytes, step) \
    STAP_PROBEV(torchlens_perf, collective__begin, group, sequence, bytes, step)
#define PROBE_COLLECTIVE_END(group, sequence, bytes, step, duration_ns, ended) \
    STAP_PROBEV(torchlens_perf, collective__end, group, sequence, bytes, step, duration_ns, ended)

#endif
