// The device's streams, events and clock, without torch.
//
// Time on the device is virtual. A task takes its nominal time: it begins when its stream is free and the host has
// issued it. The CPU time of the computation does not count. A stream's thread may therefore be ahead of real time, and
// a host that waits sleeps until real time has caught up. An event is reached when its task has been computed and its
// time has passed.
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

constexpr int MAX_STREAMS = 64; // Further requests get existing streams.
constexpr size_t QUEUE_DEPTH = 1024; // Tasks in a stream before the host waits, as with CUDA.

// Numbers of the host's calls, for tests.
struct Counters {
    std::atomic<int64_t> stream_synchronizations{0}, event_synchronizations{0}, device_synchronizations{0},
        copy_synchronizations{0}, item_synchronizations{0}, operator_synchronizations{0}, full_queues{0},
        event_queries{0}, events{0}, streams{0}, kernels{0}, collectives{0};
};

extern Counters counters;
extern std::atomic<Ns> kernel_ns;
extern std::atomic<double> slowness;
// One kernel of `outlier_every` takes `outlier_factor` times longer; none if 0.
extern std::atomic<int64_t> outlier_every;
extern std::atomic<double> outlier_factor;
Ns actual_ns(Ns nominal); // How long a kernel takes.
extern std::atomic<bool> computing; // If false, kernels take their time without computing results.

Ns clock_offset(); // The device's clock minus CLOCK_MONOTONIC, different in each process.
Ns now();          // The device's clock.
void sleep_until(Ns time);

// The point of a stream that an event was recorded at.
class Moment {
public:
    void pass(Ns time); // Called by the stream's thread.
    bool known() const { return time_ != UNKNOWN; } // True once the task has been computed.
    bool reached() const;                           // True if its time has passed too.
    Ns await();           // Waits for the computation and returns the time. For streams' threads and hosts.
    void await_reached(); // Waits until the time has passed. For hosts.
    Ns time() const { return time_.load(); }

private:
    static constexpr Ns UNKNOWN = 0;
    std::atomic<Ns> time_{UNKNOWN};
    mutable std::mutex mutex_;
    std::condition_variable passed_;
};

class Stream {
public:
    // Tasks that a graph has captured. A replay executes them as one task, which takes as long as all of them.
    struct Graph {
        std::vector<std::function<void(Stream &)>> bodies;
        Ns takes_ns = 0;
        void replay(Stream &on) const;
    };
    void begin_capture(); // Later tasks are captured, and not executed. The host must not wait for them.
    std::shared_ptr<Graph> end_capture();
    bool capturing();

    // body: runs on the stream's thread and may advance `line`.
    void enqueue(std::function<void(Stream &)> body, Ns takes_ns);
    std::shared_ptr<Moment> record();
    void wait(std::shared_ptr<Moment> moment); // Later tasks wait for the moment; the host does not.
    bool idle();
    void synchronize(); // Makes the host wait.

    // The device time that the stream has reached. Used by its thread, and by a host that finds the stream idle.
    Ns line = 0;
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
    std::shared_ptr<Graph> captured_; // None if no graph is being captured.
    bool started_ = false, ended_ = false, asleep_ = false;
    size_t issued_ = 0, done_ = 0;
    std::array<Ns, QUEUE_DEPTH> ends_{};
    friend void shut_down();
};

Stream &stream(int64_t id);
Stream &new_stream();     // One of MAX_STREAMS, which exists until the process ends.
Stream &current_stream(); // The current stream of this thread.
int64_t exchange_current_stream(int64_t id);
void synchronize_all();

void spin(Ns takes_ns); // Issues a kernel to the current stream.
int64_t never();        // Issues a kernel that ends when it is released.
void release(int64_t never);

void fail(const std::string &what); // Stores the error of a task, which the next wait of the host raises.
std::string take_failure();         // Returns the stored error and clears it, or returns "".
bool shutting_down();
void shut_down(); // Called at the end of the process. Tasks that have not begun are abandoned.

} // namespace device
