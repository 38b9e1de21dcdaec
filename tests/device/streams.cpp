#include "streams.h"

#include <time.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <map>
#include <thread>
#include <utility>

namespace device {

namespace {

constexpr auto LOOK_EVERY = std::chrono::milliseconds(100); // Interval of checks for the end of the process.
constexpr auto POLL_EVERY = std::chrono::microseconds(100); // Interval of checks for new tasks.
constexpr int POLLS = 200;                                  // Checks without a task before a stream sleeps.
constexpr auto LAST_PATIENCE = std::chrono::seconds(2);     // Limit for a running task when the process ends.

const pid_t loaded_in = getpid(); // A forked child does not have the threads.
std::atomic<bool> stopping{false};
std::mutex failure_mutex;
std::string failure;

std::mutex streams_mutex;
Stream *streams[MAX_STREAMS];
int next_stream = 0;
thread_local int64_t current = 0;

std::mutex nevers_mutex;
std::map<int64_t, std::shared_ptr<Moment>> nevers;
int64_t next_never = 0;

Ns monotonic()
{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

} // namespace

Counters counters;
std::atomic<Ns> kernel_ns{20'000};
std::atomic<double> slowness{1.0}, outlier_factor{1.0};
std::atomic<int64_t> outlier_every{0};
std::atomic<bool> computing{true};

Ns clock_offset()
{
    // The clock differs much from the host's, and between ranks.
    return 1'000'000'000'000'000LL + loaded_in * 1'000'000'007LL;
}

Ns now() { return monotonic() + clock_offset(); }

void sleep_until(Ns time)
{
    const Ns host = time - clock_offset();
    const timespec until{host / 1'000'000'000, host % 1'000'000'000};
    if (host > monotonic())
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) != 0)
            ;
}

void Moment::pass(Ns time)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        time_ = time;
    }
    passed_.notify_all();
}

bool Moment::reached() const
{
    const Ns time = time_;
    return time != UNKNOWN && now() >= time;
}

Ns Moment::await()
{
    if (time_ == UNKNOWN) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (time_ == UNKNOWN && !stopping)
            passed_.wait_for(lock, LOOK_EVERY);
    }
    return time_;
}

void Moment::await_reached()
{
    await();
    sleep_until(time_);
}

void Stream::start()
{
    if (started_)
        return;
    started_ = true;
    std::thread([this] { run(); }).detach();
}

void Stream::push(Task task)
{
    std::unique_lock<std::mutex> lock(mutex_);
    if (captured_) {
        if (task.recorded)
            task.recorded->pass(now()); // It orders nothing, as one stream is captured.
        if (task.body)
            captured_->bodies.push_back(std::move(task.body));
        captured_->takes_ns += task.takes_ns;
        return;
    }
    if (issued_ >= QUEUE_DEPTH) {
        const size_t before = issued_ - QUEUE_DEPTH;
        const auto full = [&] { return done_ <= before; };
        bool waited = full();
        while (full() && !stopping)
            changed_.wait_for(lock, LOOK_EVERY);
        const Ns end = ends_[before % QUEUE_DEPTH];
        if (end > now() && !stopping) {
            waited = true;
            lock.unlock();
            sleep_until(end);
            lock.lock();
        }
        counters.full_queues += waited;
    }
    task.issued_ns = now();
    if (!task.body && done_ == issued_ && (!task.awaited || task.awaited->known())) {
        pass(task); // Nothing to compute or to wait for, so no thread is woken up.
        ++issued_;
        return;
    }
    start();
    tasks_.push_back(std::move(task));
    ++issued_;
    // No thread is woken up, so that a launch costs the host the same on an idle and on a busy device.
    const bool asleep = std::exchange(asleep_, false);
    lock.unlock();
    if (asleep)
        changed_.notify_all();
}

// Completes a computed task. The caller holds the lock.
void Stream::pass(Task &task)
{
    line = std::max(line, task.issued_ns);
    if (task.awaited)
        line = std::max(line, task.awaited->time());
    line += task.takes_ns;
    if (task.recorded)
        task.recorded->pass(line);
    ends_[done_++ % QUEUE_DEPTH] = line;
}

void Stream::enqueue(std::function<void(Stream &)> body, Ns takes_ns) { push({takes_ns, std::move(body)}); }

void Stream::begin_capture()
{
    std::lock_guard<std::mutex> lock(mutex_);
    captured_ = std::make_shared<Graph>();
}

std::shared_ptr<Stream::Graph> Stream::end_capture()
{
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(captured_, nullptr);
}

bool Stream::capturing()
{
    std::lock_guard<std::mutex> lock(mutex_);
    return captured_ != nullptr;
}

void Stream::Graph::replay(Stream &on) const
{
    ++counters.kernels;
    on.enqueue(
        [bodies = bodies](Stream &stream) {
            for (const auto &body : bodies)
                body(stream);
        },
        takes_ns);
}

std::shared_ptr<Moment> Stream::record()
{
    auto moment = std::make_shared<Moment>();
    push({.recorded = moment});
    return moment;
}

void Stream::wait(std::shared_ptr<Moment> moment) { push({.awaited = std::move(moment)}); }

void Stream::run()
{
    std::unique_lock<std::mutex> lock(mutex_);
    for (int polls = 0; !stopping;) {
        if (tasks_.empty()) {
            asleep_ = ++polls > POLLS;
            if (asleep_)
                changed_.wait_for(lock, LOOK_EVERY);
            else
                changed_.wait_for(lock, POLL_EVERY);
            continue;
        }
        polls = 0;
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        line = std::max(line, task.issued_ns);
        try {
            if (task.body)
                task.body(*this);
        } catch (const std::exception &error) {
            fail(error.what());
        }
        task.body = nullptr; // Free its objects before the host sees the task as done.
        if (task.awaited)
            task.awaited->await();
        lock.lock();
        pass(task);
        changed_.notify_all();
    }
    ended_ = true;
    changed_.notify_all();
}

bool Stream::idle()
{
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == issued_ && now() >= line;
}

void Stream::synchronize()
{
    Ns until;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (captured_)
            return fail("the host waits while a graph is captured");
        const size_t last = issued_;
        if (done_ < last)
            changed_.notify_all(); // The thread may be asleep.
        while (done_ < last && !stopping)
            changed_.wait_for(lock, LOOK_EVERY);
        if (last == 0 || stopping)
            return;
        until = done_ - last < QUEUE_DEPTH ? ends_[(last - 1) % QUEUE_DEPTH] : 0;
    }
    sleep_until(until);
}

Stream &stream(int64_t id)
{
    std::lock_guard<std::mutex> lock(streams_mutex);
    Stream *&found = streams[id % MAX_STREAMS];
    if (found == nullptr) {
        found = new Stream(); // Never freed, as its thread may outlive all other objects.
        found->id = id;
        ++counters.streams;
    }
    return *found;
}

Stream &new_stream()
{
    int id;
    {
        std::lock_guard<std::mutex> lock(streams_mutex);
        id = 1 + next_stream++ % (MAX_STREAMS - 1);
    }
    return stream(id);
}

Stream &current_stream() { return stream(current); }

int64_t exchange_current_stream(int64_t id) { return std::exchange(current, id); }

void synchronize_all()
{
    for (int id = 0; id < MAX_STREAMS; ++id) {
        Stream *each;
        {
            std::lock_guard<std::mutex> lock(streams_mutex);
            each = streams[id];
        }
        if (each != nullptr)
            each->synchronize();
    }
}

Ns actual_ns(Ns nominal)
{
    const int64_t every = outlier_every;
    const bool outlies = every > 0 && counters.kernels % every == 0;
    return Ns(nominal * slowness * (outlies ? outlier_factor.load() : 1.0));
}

void spin(Ns takes_ns)
{
    ++counters.kernels;
    current_stream().enqueue(nullptr, actual_ns(takes_ns));
}

int64_t never()
{
    auto released = std::make_shared<Moment>();
    int64_t id;
    {
        std::lock_guard<std::mutex> lock(nevers_mutex);
        nevers[id = ++next_never] = released;
    }
    ++counters.kernels;
    current_stream().wait(released);
    return id;
}

void release(int64_t never)
{
    std::lock_guard<std::mutex> lock(nevers_mutex);
    auto found = nevers.find(never);
    if (found == nevers.end())
        return;
    found->second->pass(now());
    nevers.erase(found);
}

void fail(const std::string &what)
{
    std::lock_guard<std::mutex> lock(failure_mutex);
    if (failure.empty())
        failure = what;
}

std::string take_failure()
{
    std::lock_guard<std::mutex> lock(failure_mutex);
    return std::exchange(failure, "");
}

bool shutting_down() { return stopping; }

void shut_down()
{
    if (getpid() != loaded_in || stopping.exchange(true))
        return;
    const auto until = std::chrono::steady_clock::now() + LAST_PATIENCE;
    for (Stream *each : streams) {
        if (each == nullptr)
            continue;
        std::unique_lock<std::mutex> lock(each->mutex_);
        each->changed_.notify_all();
        while (each->started_ && !each->ended_ && std::chrono::steady_clock::now() < until)
            each->changed_.wait_for(lock, LOOK_EVERY);
        // Remaining tasks are not freed: freeing tensors may need the interpreter, which is about to end.
        new std::deque<Stream::Task>(std::move(each->tasks_));
    }
}

} // namespace device
