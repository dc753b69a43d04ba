// Counts the bytes that torch allocates on the CPU, whichever thread allocates or frees them.
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <unordered_map>

namespace {

void release(void* data);

struct Counting final : c10::Allocator {
  c10::Allocator* const own = c10::GetDefaultCPUAllocator();
  std::mutex mutex;
  std::unordered_map<void*, long> sizes;
  long live = 0, peak = 0;

  c10::DataPtr allocate(size_t size) override {
    void* const data = own->raw_allocate(size);
    const std::lock_guard<std::mutex> lock(mutex);
    if (data != nullptr) {
      sizes[data] = static_cast<long>(size);
      live += static_cast<long>(size);
      peak = std::max(peak, live);
    }
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t size) const override { own->copy_data(to, from, size); }
};

Counting& counting() {
  static auto* const only = new Counting;  // outlives every tensor
  return *only;
}

void release(void* data) {
  if (data == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(counting().mutex);
    const auto entry = counting().sizes.find(data);
    counting().live -= entry->second;
    counting().sizes.erase(entry);
  }
  counting().own->raw_deallocate(data);
}

}  // namespace

extern "C" void count_allocations() { c10::SetCPUAllocator(&counting(), 1); }
extern "C" void begin() { counting().peak = counting().live; }
extern "C" long live_bytes() { return counting().live; }
extern "C" long peak_bytes() { return counting().peak; }
