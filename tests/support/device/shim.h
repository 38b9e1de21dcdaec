/* Runs CUDA kernels on a CPU, for tests: g++ -x c++ -include shim.h kernels.cu.
 *
 * Each CUDA thread is a fiber. A warp runs ahead alone until all its lanes wait at a barrier of the block; the order of
 * blocks, warps and lanes is a schedule: 0 ascending, 1 descending, others shuffled. So a missing barrier changes the
 * answer, which it would not if all threads went in step. Shared memory is poisoned for each block. Divergent barriers,
 * lanes that meet in different warp operations, and lanes outside their own mask abort with a message.
 *
 * Fibers take turns: an update that must be atomic and is not goes unnoticed here (compute-sanitizer's racecheck on a
 * GPU is for that).
 */
#pragma once
#define SHIM 1
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shim_shared")))
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(shim::block.dynamic_shared)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
extern char __start_shim_shared[] __attribute__((weak));
extern char __stop_shim_shared[] __attribute__((weak));
}

namespace shim {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr unsigned char POISON = 0xA5;

enum class State { ready, at_barrier, at_warp_operation, done };

struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    State state;
    bool started;
    unsigned thread;
    /* The warp operation in which the lane waits. */
    int operation;
    unsigned mask;
    unsigned participants;
    /* Values for other lanes. There are two, so a fast lane does not overwrite a value that a slow one still has to read. */
    uint64_t shown[2];
    int turn;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<char> stacks;
    jmp_buf scheduler;
    int current = -1;
    char *dynamic_shared = nullptr;
    std::function<void()> kernel;
};

static Block block;
static uint64_t (*device_clock_ns)() = nullptr;
static uint64_t ticks = 0;

[[noreturn]] inline void fail(const char *what)
{
    fprintf(stderr, "shim: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    abort();
}

inline void wait_in(State state)
{
    Fiber &fiber = block.fibers[block.current];
    fiber.state = state;
    if (!_setjmp(fiber.resume)) {
        _longjmp(block.scheduler, 1);
    }
}

inline void run_thread()
{
    block.kernel();
    block.fibers[block.current].state = State::done;
    _longjmp(block.scheduler, 1);
}

/* Called by the scheduler: run a fiber until it waits or returns. */
inline void resume(unsigned index)
{
    Fiber &fiber = block.fibers[index];
    block.current = static_cast<int>(index);
    threadIdx = dim3{fiber.thread, 0, 0};
    if (_setjmp(block.scheduler)) {
        return;
    }
    if (fiber.started) {
        _longjmp(fiber.resume, 1);
    }
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = &block.stacks[index * STACK_BYTES];
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_thread, 0);
    setcontext(&fiber.start);
}

inline void order(std::vector<unsigned> &items, unsigned schedule, std::mt19937 &random)
{
    if (schedule > 1) {
        std::shuffle(items.begin(), items.end(), random);
    }
}

inline std::vector<unsigned> first_order(unsigned count, unsigned schedule)
{
    std::vector<unsigned> items(count);
    for (unsigned i = 0; i < count; i++) {
        items[i] = schedule == 1 ? count - 1 - i : i;
    }
    return items;
}

/* Run one warp until all its live lanes wait at a barrier of the block, or have returned. */
inline void run_warp(unsigned warp, unsigned schedule, std::mt19937 &random)
{
    const unsigned first = warp * WARP, count = static_cast<unsigned>(block.fibers.size());
    const unsigned lanes = std::min(WARP, count - first);
    std::vector<unsigned> lane_order = first_order(lanes, schedule);
    for (;;) {
        order(lane_order, schedule, random);
        for (unsigned lane : lane_order) {
            if (block.fibers[first + lane].state == State::ready) {
                resume(first + lane);
            }
        }
        unsigned living = 0, waiting = 0, participants = 0, mask = 0;
        int operation = -1;
        for (unsigned lane = 0; lane < lanes; lane++) {
            Fiber &fiber = block.fibers[first + lane];
            living += fiber.state != State::done;
            if (fiber.state != State::at_warp_operation) {
                continue;
            }
            if (waiting++ > 0 && (operation != fiber.operation || mask != fiber.mask)) {
                fail("lanes of a warp meet in different operations");
            }
            operation = fiber.operation;
            mask = fiber.mask;
            participants |= 1u << lane;
        }
        if (waiting == 0) {
            return;
        }
        if (waiting != living) {
            fail("a warp operation that not all lanes reach");
        }
        for (unsigned lane = 0; lane < lanes; lane++) {
            Fiber &fiber = block.fibers[first + lane];
            if (fiber.state == State::at_warp_operation) {
                fiber.state = State::ready;
                fiber.participants = participants;
            }
        }
    }
}

inline void run_block(unsigned schedule, std::mt19937 &random)
{
    const unsigned count = static_cast<unsigned>(block.fibers.size());
    for (unsigned i = 0; i < count; i++) {
        block.fibers[i].state = State::ready;
        block.fibers[i].started = false;
        block.fibers[i].thread = i;
        block.fibers[i].turn = 0;
    }
    std::vector<unsigned> warps = first_order((count + WARP - 1) / WARP, schedule);
    for (;;) {
        order(warps, schedule, random);
        for (unsigned warp : warps) {
            run_warp(warp, schedule, random);
        }
        unsigned living = 0, waiting = 0;
        for (const Fiber &fiber : block.fibers) {
            living += fiber.state != State::done;
            waiting += fiber.state == State::at_barrier;
        }
        if (living == 0) {
            return;
        }
        if (waiting != living) {
            fail("a barrier that not all threads reach");
        }
        for (Fiber &fiber : block.fibers) {
            if (fiber.state == State::at_barrier) {
                fiber.state = State::ready;
            }
        }
    }
}

/* Kernels by name, called with pointers to their arguments, as by cuLaunchKernel. */
struct Kernel {
    std::function<void(void **)> call;
    std::vector<size_t> argument_bytes;
};

inline std::map<std::string, Kernel> &kernels()
{
    static std::map<std::string, Kernel> registered;
    return registered;
}

template <class... Arguments, size_t... Index>
void call_with(void (*kernel)(Arguments...), void **arguments, std::index_sequence<Index...>)
{
    kernel(*static_cast<Arguments *>(arguments[Index])...);
}

template <class... Arguments>
struct Register {
    Register(const char *name, void (*kernel)(Arguments...))
    {
        kernels()[name] = Kernel{
            [kernel](void **arguments) { call_with(kernel, arguments, std::index_sequence_for<Arguments...>()); },
            {sizeof(Arguments)...}};
    }
};

inline int launch(const char *name, unsigned grid, unsigned threads, size_t shared_bytes, void **arguments,
                  unsigned schedule)
{
    auto found = kernels().find(name);
    if (found == kernels().end()) {
        return 1;
    }
    std::mt19937 random(schedule);
    gridDim = dim3{grid, 1, 1};
    blockDim = dim3{threads, 1, 1};
    block.fibers.resize(threads);
    block.stacks.resize(threads * STACK_BYTES);
    std::vector<uint64_t> dynamic_shared(shared_bytes / 8 + 1);
    block.dynamic_shared = reinterpret_cast<char *>(dynamic_shared.data());
    block.kernel = [&] { found->second.call(arguments); };
    std::vector<unsigned> blocks = first_order(grid, schedule);
    order(blocks, schedule, random);
    for (unsigned index : blocks) {
        blockIdx = dim3{index, 0, 0};
        if (__start_shim_shared != nullptr) {
            memset(__start_shim_shared, POISON, static_cast<size_t>(__stop_shim_shared - __start_shim_shared));
        }
        memset(dynamic_shared.data(), POISON, dynamic_shared.size() * 8);
        run_block(schedule, random);
    }
    return 0;
}

/* Exchange data inside a warp: publish a value, wait for the other lanes, and return that of lane `from`. */
template <class Value>
Value exchange(int operation, unsigned mask, Value value, unsigned from, bool taken)
{
    Fiber &fiber = block.fibers[block.current];
    const unsigned lane = static_cast<unsigned>(block.current) % WARP, first = block.current - lane;
    if (!(mask >> lane & 1u)) {
        fail("a lane outside its own mask");
    }
    const int turn = fiber.turn;
    fiber.turn ^= 1;
    fiber.operation = operation;
    fiber.mask = mask;
    memcpy(&fiber.shown[turn], &value, sizeof value);
    wait_in(State::at_warp_operation);
    if (!taken || first + from >= block.fibers.size()) {
        return value;
    }
    memcpy(&value, &block.fibers[first + from].shown[turn], sizeof value);
    return value;
}

inline unsigned this_lane()
{
    return static_cast<unsigned>(block.current) % WARP;
}

enum { SHUFFLE, SHUFFLE_DOWN, SHUFFLE_UP, BALLOT };

}  // namespace shim

inline void __syncthreads()
{
    shim::wait_in(shim::State::at_barrier);
}

template <class Value>
Value __shfl_sync(unsigned mask, Value value, int lane)
{
    return shim::exchange(shim::SHUFFLE, mask, value, static_cast<unsigned>(lane) % shim::WARP, true);
}

template <class Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned offset)
{
    const unsigned from = shim::this_lane() + offset;
    return shim::exchange(shim::SHUFFLE_DOWN, mask, value, from, from < shim::WARP);
}

template <class Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned offset)
{
    const unsigned lane = shim::this_lane();
    return shim::exchange(shim::SHUFFLE_UP, mask, value, lane - offset, lane >= offset);
}

inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    const unsigned first = static_cast<unsigned>(shim::block.current) - shim::this_lane();
    const int turn = shim::block.fibers[shim::block.current].turn;
    shim::exchange<int>(shim::BALLOT, mask, predicate != 0, 0, false);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < shim::WARP && first + lane < shim::block.fibers.size(); lane++) {
        int vote = 0;
        memcpy(&vote, &shim::block.fibers[first + lane].shown[turn], sizeof vote);
        const unsigned participants = mask & shim::block.fibers[shim::block.current].participants;
        votes |= (participants >> lane & 1u) && vote ? 1u << lane : 0;
    }
    return votes;
}

template <class Value, class Operand>
Value atomicAdd(Value *at, Operand operand)
{
    Value before = *at;
    *at = before + static_cast<Value>(operand);
    return before;
}

template <class Value, class Operand>
Value atomicMax(Value *at, Operand operand)
{
    Value before = *at;
    *at = std::max(before, static_cast<Value>(operand));
    return before;
}

inline void __threadfence()
{
    /* There is only one processor, so each store is visible at once. */
}

inline int __clzll(long long value)
{
    return value ? __builtin_clzll(static_cast<unsigned long long>(value)) : 64;
}

inline int __ffs(int value)
{
    return __builtin_ffs(value);
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline unsigned __float_as_uint(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned long long global_timer_ns()
{
    return shim::device_clock_ns != nullptr ? shim::device_clock_ns() : ++shim::ticks;
}
