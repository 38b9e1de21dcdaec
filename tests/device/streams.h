// The device's streams, events and clock: threads and numbers, nothing of torch.
//
// The device's line is virtual. A task's time is its nominal one: it begins when its stream is free, not before the
// host has issued it, and ends that much later. What the processor takes to compute it is not in it. A stream's thread
// may therefore be ahead of that line, and a host that waits sleeps until real time has come to it: an event has been
// reached when its task has been computed and its time has passed.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace device {

using Ns = int64_t;

constexpr int MAX_STREAMS = 64; // then they are handed out again
constexpr size_t QUEUE_DEPTH = 1024; // tasks that a stream may have before it; then the host waits, as for CUDA

// How often the host has done what; for tests.
struct Counters {
    std::atomic<int64_t> stream_synchronizations{0}, event_synchronizations{0}, device_synchronizations{0},
        copy_synchronizations{0}, item_synchronizations{0}, operator_synchronizations{0}, full_queues{0},
        event_queries{0}, events{0}, streams{0}, kernels{0}, collectives{0};
};

extern Counters counters;
extern std::atomic<Ns> kernel_ns;
extern std::atomic<double> slowness;
extern std::atomic<bool> computing; // else kernels take their time and leave their results as they are

Ns clock_offset(); // of the device's clock to CLOCK_MONOTONIC; another one in each process
Ns now();          // on the device's clock
void sleep_until(Ns time);

// The point of a stream that an event was recorded at.
class Moment {
public:
    void pass(Ns time);    // by the stream's thread
    bool known() const { return time_ != UNKNOWN; } // computed
    bool reached() const;  // and its time has come
    Ns await();            // until computed; by threads of streams, and hosts. Returns its time
    void await_reached();  // by hosts
    Ns time() const { return time_.load(); }

private:
    static constexpr Ns UNKNOWN = 0;
    std::atomic<Ns> time_{UNKNOWN};
    mutable std::mutex mutex_;
    std::condition_variable passed_;
};

class Stream {
public:
    // body: on the stream's thread, where it may move `line`.
    void enqueue(std::function<void(Stream &)> body, Ns takes_ns);
    std::shared_ptr<Moment> record();
    void wait(std::shared_ptr<Moment> moment); // what comes later here waits for it; the host does not
    bool idle();
    void synchronize(); // the host waits

    Ns line = 0; // of the device's clock: up to where this stream has come; its thread's, and of who finds it idle
    int id = 0;

private:
    struct Task {
        Ns takes_ns = 0;
        std::function<void(Stream &)> body;
        std::shared_ptr<Moment> awaited, recorded;
        Ns issued_ns = 0;
    };
    void push(Task task);
    void pass(Task &task);
    void run();
    void start();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
    bool started_ = false, ended_ = false, asleep_ = false;
    size_t issued_ = 0, done_ = 0;
    std::array<Ns, QUEUE_DEPTH> ends_{};
    friend void shut_down();
};

Stream &stream(int64_t id);
Stream &new_stream();     // one of its own, for as long as the process lives, of MAX_STREAMS
Stream &current_stream(); // this thread's
int64_t exchange_current_stream(int64_t id);
void synchronize_all();

void spin(Ns takes_ns);   // a kernel on the current stream
int64_t never();        // one that ends when it is released
void release(int64_t never);

void fail(const std::string &what);         // what a task has met; raised where the host waits next
std::string take_failure();                 // empty: none
bool shutting_down();
void shut_down(); // at the process's end: tasks that have not begun are left

} // namespace device
