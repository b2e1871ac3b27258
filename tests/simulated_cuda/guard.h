// What torch asks of a type of device: its guard, its hooks.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "generators.h"

namespace simulated {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Index = c10::DeviceIndex;
  using Stream = c10::Stream;
  static Stream stream(Device device, int64_t id) { return Stream(Stream::UNSAFE, device, id); }

  c10::DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device old(kCUDA, current_device);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Index deviceCount() const noexcept override { return Index(device_count); }
  Stream getStream(Device device) const noexcept override { return stream(device, current_stream); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, next_stream++); }
  Stream getNewStream(Device device, int) const override { return stream(device, next_stream++); }
  Stream exchangeStream(Stream next) const noexcept override {
    auto old = stream(next.device(), current_stream);
    current_stream = next.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream next) const override { return reinterpret_cast<void*>(next.id()); }
  void record(void** event, const Stream& stream, const Index, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Recorded();
    mark_of(*event) = record_on(stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) make_wait(stream.id(), mark_of(event));
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Recorded*>(event); }
  double elapsedTime(void* first, void* second, const Index) const override {
    return std::chrono::duration<double, std::milli>(mark_of(second)->time - mark_of(first)->time).count();
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::mutex> lock(streams_mutex);
    return event == nullptr || is_done(mark_of(event));
  }
  bool queryStream(const Stream& stream) const override {
    std::lock_guard<std::mutex> lock(streams_mutex);
    return streams[stream.id()].idle();
  }
  void synchronizeStream(const Stream& stream) const override {
    synchronised("synchronize");
    synchronise_stream(stream.id());
  }
  void synchronizeEvent(void* event) const override {
    synchronised("synchronize");
    if (event != nullptr) synchronise_with(mark_of(event));
  }
  void synchronizeDevice(const Index) const override {
    synchronised("synchronize");
    synchronise_device();
  }

 private:
  static Recorded& mark_of(void* event) { return *static_cast<Recorded*>(event); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return int(device_count); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count); }
  c10::DeviceIndex current_device() const override { return simulated::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { simulated::current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(simulated::current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? simulated::current_device : exchangeDevice(index);
  }
  void deviceSynchronize(c10::DeviceIndex) const override {
    synchronised("synchronize");
    synchronise_device();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? simulated::current_device : index);
  }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};

// torch made its own (empty) hooks while it was imported, and has no way to exchange them. Both classes have no
// members: another table of functions makes one the other.
void take_the_place_of_torchs_hooks() {
  static Hooks ours;
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(theirs), static_cast<void*>(&ours), sizeof(void*));
}

struct Timer final : c10d::Timer {  // of DDP's reducer, which wants one for each type of device
  explicit Timer(c10::Device) {}
  void record(Event) override {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 1; }
};

}  // namespace simulated
