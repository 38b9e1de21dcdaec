// The device's place in torch: allocator, guard, hooks and generator.
#include "memory.h"

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <set>

namespace device {

namespace {

constexpr size_t TOTAL_BYTES = size_t(8) << 30;
constexpr size_t ALIGNMENT = 64;
const c10::Device DEVICE(TYPE, 0);

std::mutex memory_mutex;
size_t allocated_bytes, peak_bytes, allocated_in_all, allocations, freed;
std::set<const void *> pinned;

struct Block {
    explicit Block(size_t bytes) : bytes(bytes), address(std::aligned_alloc(ALIGNMENT, rounded(bytes)))
    {
        TORCH_CHECK(address != nullptr, "the device has no memory of ", bytes, " bytes");
        std::lock_guard<std::mutex> lock(memory_mutex);
        allocated_bytes += bytes;
        allocated_in_all += bytes;
        peak_bytes = std::max(peak_bytes, allocated_bytes);
        ++allocations;
    }
    ~Block()
    {
        std::free(address);
        std::lock_guard<std::mutex> lock(memory_mutex);
        allocated_bytes -= bytes;
        ++freed;
    }
    static size_t rounded(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

    size_t bytes;
    void *address;
};

using Held = std::shared_ptr<Block>;

void let_go(void *held) { delete static_cast<Held *>(held); }

c10::DataPtr pointer_to(const Held &block, c10::Device device)
{
    return {block->address, new Held(block), let_go, device};
}

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        return bytes == 0 ? c10::DataPtr(nullptr, DEVICE) : pointer_to(std::make_shared<Block>(bytes), DEVICE);
    }
    void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr &, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override
    {
        std::lock_guard<std::mutex> lock(memory_mutex);
        c10::CachingDeviceAllocator::DeviceStats stats;
        for (auto *each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
            (*each)[0].current = allocated_bytes, (*each)[0].peak = peak_bytes,
            (*each)[0].allocated = allocated_in_all, (*each)[0].freed = allocated_in_all - allocated_bytes;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override
    {
        std::lock_guard<std::mutex> lock(memory_mutex);
        peak_bytes = allocated_bytes;
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override
    {
        std::lock_guard<std::mutex> lock(memory_mutex);
        return {TOTAL_BYTES - std::min(TOTAL_BYTES, allocated_bytes), TOTAL_BYTES};
    }
};

void unpin(void *address)
{
    {
        std::lock_guard<std::mutex> lock(memory_mutex);
        pinned.erase(address);
    }
    std::free(address);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        void *address = std::aligned_alloc(ALIGNMENT, std::max(ALIGNMENT, Block::rounded(bytes)));
        std::lock_guard<std::mutex> lock(memory_mutex);
        pinned.insert(address);
        return {address, address, unpin, c10::Device(c10::DeviceType::CPU)};
    }
    void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

using Recorded = std::shared_ptr<Moment>;

struct Event {
    Recorded moment;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
    c10::Device getDevice() const override { return DEVICE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }

    c10::Stream of(const Stream &stream) const { return c10::Stream(c10::Stream::UNSAFE, DEVICE, stream.id); }
    c10::Stream getStream(c10::Device) const override { return of(current_stream()); }
    c10::Stream getDefaultStream(c10::Device) const override { return of(stream(0)); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return of(new_stream()); }
    c10::Stream getNewStream(c10::Device, int) const override { return of(new_stream()); }
    c10::Stream exchangeStream(c10::Stream to) const override
    {
        return c10::Stream(c10::Stream::UNSAFE, DEVICE, exchange_current_stream(to.id()));
    }
    // Older versions of torch do not have this method.
    void *getStreamNativeHandle(const c10::Stream which) const { return &stream(which.id()); }
    bool queryStream(const c10::Stream &which) const override { return stream(which.id()).idle(); }
    void synchronizeStream(const c10::Stream &which) const override
    {
        ++counters.stream_synchronizations;
        stream(which.id()).synchronize();
        raise_failure();
    }
    void synchronizeDevice(const c10::DeviceIndex) const override
    {
        ++counters.device_synchronizations;
        synchronize_all();
        raise_failure();
    }

    void record(
        void **event, const c10::Stream &on, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        if (*event == nullptr)
            *event = new Event();
        ++counters.events;
        static_cast<Event *>(*event)->moment = stream(on.id()).record();
    }
    void block(void *event, const c10::Stream &which) const override
    {
        if (event != nullptr)
            stream(which.id()).wait(static_cast<Event *>(event)->moment);
    }
    bool queryEvent(void *event) const override
    {
        ++counters.event_queries;
        return event == nullptr || static_cast<Event *>(event)->moment->reached();
    }
    void synchronizeEvent(void *event) const override
    {
        ++counters.event_synchronizations;
        if (event != nullptr)
            static_cast<Event *>(event)->moment->await_reached();
        raise_failure();
    }
    double elapsedTime(void *from, void *to, const c10::DeviceIndex) const override
    {
        const Moment &begin = *static_cast<Event *>(from)->moment, &end = *static_cast<Event *>(to)->moment;
        TORCH_CHECK(begin.reached() && end.reached(), "both events must have been reached");
        return double(end.time() - begin.time()) / 1e6;
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override
    {
        delete static_cast<Event *>(event);
    }
};

at::Generator &drawer()
{
    static at::Generator it = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
    return it;
}

// The generator that users see. It does not draw itself: operators draw later from drawer().
struct DeviceGenerator final : at::CPUGeneratorImpl {
    DeviceGenerator()
    {
        device_ = DEVICE;
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
    // Returns the generator after all issued operators have drawn.
    static at::Generator quiet()
    {
        synchronize_all();
        return drawer();
    }
    void set_current_seed(uint64_t seed) override { quiet().set_current_seed(seed); }
    uint64_t current_seed() const override { return drawer().current_seed(); }
    uint64_t seed() override { return quiet().seed(); }
    void set_state(const c10::TensorImpl &state) override { quiet().unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override
    {
        return quiet().unsafeGetGeneratorImpl()->get_state();
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    void init() const override {}
    c10::DeviceIndex deviceCount() const override { return 1; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void *data) const override { return is_pinned(data); }
    c10::Allocator *getPinnedMemoryAllocator() const override
    {
        static auto *it = new PinnedMemory();
        return it;
    }
    c10::Device getDeviceFromPtr(void *) const override { return DEVICE; }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override
    {
        static at::Generator it = at::make_generator<DeviceGenerator>();
        return it;
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        resize_storage(*storage.unsafeGetStorageImpl(), bytes);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
    c10::SetAllocator(TYPE, allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    return true;
}();

} // namespace

c10::Allocator *allocator()
{
    static auto *it = new DeviceMemory(); // Never freed, as memory may be freed later than all other objects.
    return it;
}

c10::Storage storage_on_cpu(const c10::Storage &on_device)
{
    const c10::Device cpu(c10::DeviceType::CPU);
    auto *held = static_cast<Held *>(on_device.data_ptr().get_context());
    return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), on_device.nbytes(),
        held == nullptr ? c10::DataPtr(nullptr, cpu) : pointer_to(*held, cpu), nullptr, false));
}

void resize_storage(c10::StorageImpl &storage, size_t bytes)
{
    c10::DataPtr fresh = allocator()->allocate(bytes);
    auto *before = static_cast<Held *>(storage.data_ptr().get_context());
    auto *after = static_cast<Held *>(fresh.get_context());
    if (before != nullptr && after != nullptr) {
        const size_t kept = std::min(bytes, storage.nbytes());
        current_stream().enqueue(
            [from = *before, to = *after, kept](Stream &) { std::memcpy(to->address, from->address, kept); }, 0);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
}

at::Generator generator_on_cpu() { return drawer(); }

bool is_pinned(const void *address)
{
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto after = pinned.upper_bound(address);
    return after != pinned.begin() && *std::prev(after) == address;
}

void raise_failure()
{
    const std::string what = take_failure();
    TORCH_CHECK(what.empty(), "on the device: ", what);
}

} // namespace device
