// Memory of the devices, of a size that can be set, and page-locked memory of the host.
#pragma once

#include "streams.h"

namespace simulated {

// Counts what is allocated on each device, and refuses what is more than the device has.
struct Memory final : c10::Allocator {
  struct Block { size_t bytes; c10::DeviceIndex device; };
  struct Use { size_t now = 0, peak = 0; };
  std::mutex mutex;
  std::map<void*, Block> blocks;
  std::map<c10::DeviceIndex, Use> uses;
  size_t capacity = size_t(80) << 30;

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &drop, c10::Device(kCUDA, current_device)};
    std::lock_guard<std::mutex> lock(mutex);
    auto& use = uses[current_device];
    TORCH_CHECK_WITH(OutOfMemoryError, use.now + bytes <= capacity, "CUDA out of memory. Tried to allocate ", bytes,
                     " bytes. Simulated GPU ", int(current_device), " has a total capacity of ", capacity,
                     " bytes of which ", capacity - use.now, " bytes are free.");
    void* data = malloc(bytes);
    blocks[data] = {bytes, current_device};
    use.now += bytes;
    use.peak = std::max(use.peak, use.now);
    return {data, data, &drop, c10::Device(kCUDA, current_device)};
  }
  void release(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto block = blocks.find(data);
    if (block == blocks.end()) return;
    uses[block->second.device].now -= block->second.bytes;
    {
      std::lock_guard<std::mutex> streams_lock(streams_mutex);
      accesses.erase(data);
    }
    blocks.erase(block);
    free(data);
  }
  static void drop(void* data);
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory& memory = *new Memory();  // outlives every tensor
void Memory::drop(void* data) { if (data != nullptr) memory.release(data); }

// Page-locked host memory: copies from and to it need no wait.
struct Pinned final : c10::Allocator {
  std::mutex mutex;
  std::map<char*, size_t> blocks;
  c10::DataPtr allocate(size_t bytes) override {
    char* data = static_cast<char*>(malloc(bytes + 1));
    std::lock_guard<std::mutex> lock(mutex);
    blocks[data] = bytes;
    return {data, data, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (after == blocks.begin()) return false;
    --after;
    return static_cast<const char*>(data) <= after->first + after->second;
  }
  static void drop(void* data);
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Pinned& pinned = *new Pinned();
void Pinned::drop(void* data) {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.blocks.erase(static_cast<char*>(data));
  free(data);
}

}  // namespace simulated
