// A "cuda" device made of host memory, for a CPU build of torch: real values, and the paths that CUDA tensors take.
//
// Tensors are CUDA tensors to everybody (`is_cuda`, dispatch, autograd's device thread, autocast). Each operator
// without a kernel of its own here runs on the CPU, on copies of its arguments. What would make the host wait for the
// device is reported to Python by its kind.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace simulated {

constexpr auto kCUDA = c10::DeviceType::CUDA;
constexpr size_t kStaged = 64 << 10;  // up to this size a copy from pageable memory does not wait: it is staged

int64_t device_count = 1;
thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_stream = 0;  // of every device: a rank uses one
std::atomic<int64_t> next_stream{1};

// ---- what the host waits for ----

PyObject* on_synchronise = nullptr;  // called with the kind; never released
thread_local bool quiet = false;     // within the device's own work

struct Quiet {
  bool before = quiet;
  Quiet() { quiet = true; }
  ~Quiet() { quiet = before; }
};

void synchronised(const char* kind) {
  if (quiet || on_synchronise == nullptr) return;
  py::gil_scoped_acquire gil;
  py::handle callback(on_synchronise);
  callback(kind);
}

// ---- streams: what is launched runs in order, in a thread of each stream that has work of its own ----

struct Task {
  std::string what;  // with the line that launched it
  std::function<void()> run;
};

using Clock = std::map<int64_t, uint64_t>;  // stream -> how many of its launches have happened before

void merge(Clock& clock, const Clock& other) {
  for (const auto& [id, launches] : other) clock[id] = std::max(clock[id], launches);
}

struct Stream {
  Clock clock;  // at its end, as far as it has been launched
  std::deque<Task> tasks;
  std::string running;  // what; empty: nothing
  bool has_thread = false;
  bool abandoned = false;  // by an aborted communicator: nobody waits for it any more
  bool idle() const { return abandoned || (tasks.empty() && running.empty()); }
};

struct Mark {  // one recording of an event
  int64_t stream;
  bool done = false;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

// Never destroyed: threads may wait in them when the process ends.
std::mutex& streams_mutex = *new std::mutex();
std::condition_variable& moved = *new std::condition_variable();
std::map<int64_t, Stream>& streams = *new std::map<int64_t, Stream>();
Clock host_clock;  // what the host has waited for; threads of the host count as one
PyObject* on_hang = nullptr;  // called with a description when the host has waited for too long
double hang_s = 30;

void run_stream(int64_t id) {
  std::unique_lock<std::mutex> lock(streams_mutex);
  auto& stream = streams[id];
  while (true) {
    moved.wait(lock, [&] { return !stream.tasks.empty(); });
    auto task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    stream.running = task.what;
    lock.unlock();
    task.run();
    task = {};
    lock.lock();
    stream.running.clear();
    moved.notify_all();
    if (stream.abandoned) return;
  }
}

void push(std::unique_lock<std::mutex>&, int64_t id, Task task) {
  auto& stream = streams[id];
  if (stream.abandoned) return;
  stream.tasks.push_back(std::move(task));
  if (!std::exchange(stream.has_thread, true)) std::thread(run_stream, id).detach();
  moved.notify_all();
}

std::string describe_streams() {
  std::string text;
  for (const auto& [id, stream] : streams) {
    if (stream.idle()) continue;
    text += "stream " + std::to_string(id) + " runs: " + stream.running + "\n";
    for (const auto& task : stream.tasks) text += "    then " + task.what + "\n";
  }
  return text;
}

// The host waits. Where that takes too long, an exception tells what the streams are at.
template <typename Ready>
void wait_on_host(std::unique_lock<std::mutex>& lock, Ready ready) {
  if (ready()) return;
  std::optional<py::gil_scoped_release> release;
  if (PyGILState_Check()) {  // never wait for it with the mutex held
    lock.unlock();
    release.emplace();
    lock.lock();
  }
  bool came = moved.wait_for(lock, std::chrono::duration<double>(hang_s), ready);
  std::string at = came ? "" : describe_streams();
  lock.unlock();
  if (!came) {
    release.reset();
    py::gil_scoped_acquire gil;
    py::handle callback(on_hang);
    callback(at);
  }
}

// Before the host does a kernel's work itself: all that was launched before on its stream is done.
void come_to_its_turn() {
  std::unique_lock<std::mutex> lock(streams_mutex);
  auto& stream = streams[current_stream];
  wait_on_host(lock, [&] { return stream.idle(); });
}

void synchronise_stream(int64_t id) {
  std::unique_lock<std::mutex> lock(streams_mutex);
  auto& stream = streams[id];
  merge(host_clock, stream.clock);
  wait_on_host(lock, [&] { return stream.idle(); });
}

void synchronise_device() {
  std::unique_lock<std::mutex> lock(streams_mutex);
  for (const auto& [id, stream] : streams) merge(host_clock, stream.clock);
  wait_on_host(lock, [] {
    return std::all_of(streams.begin(), streams.end(), [](const auto& entry) { return entry.second.idle(); });
  });
}

using Recorded = std::shared_ptr<Mark>;

bool is_done(const Recorded& mark) { return mark == nullptr || mark->done || streams[mark->stream].abandoned; }

Recorded record_on(int64_t id) {
  std::unique_lock<std::mutex> lock(streams_mutex);
  auto mark = std::make_shared<Mark>();
  mark->stream = id;
  mark->clock = streams[id].clock;
  auto pass = [mark] {
    mark->time = std::chrono::steady_clock::now();
    mark->done = true;
  };
  if (streams[id].idle()) {
    pass();
  } else {
    push(lock, id, {"an event", [pass] {
      std::lock_guard<std::mutex> inner(streams_mutex);
      pass();
    }});
  }
  return mark;
}

void make_wait(int64_t id, const Recorded& mark) {
  std::unique_lock<std::mutex> lock(streams_mutex);
  if (mark == nullptr || mark->stream == id) return;
  merge(streams[id].clock, mark->clock);
  if (is_done(mark)) return;
  push(lock, id, {"a wait for stream " + std::to_string(mark->stream), [mark] {
    std::unique_lock<std::mutex> inner(streams_mutex);
    moved.wait(inner, [&] { return is_done(mark); });
  }});
}

void synchronise_with(const Recorded& mark) {
  std::unique_lock<std::mutex> lock(streams_mutex);
  if (mark != nullptr) merge(host_clock, mark->clock);
  wait_on_host(lock, [&] { return is_done(mark); });
}

void abandon(int64_t id) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams[id].abandoned = true;
  streams[id].tasks.clear();
  moved.notify_all();
}

// ---- who reads and writes which memory, and whether that is in order ----

PyObject* on_locate = nullptr;  // returns the caller's source line
PyObject* on_race = nullptr;    // called with two accesses, of which the first does not wait for the second

struct Access {
  const char *begin, *end;
  bool writes;
  int64_t stream;
  uint64_t launch;   // its number on the stream
  std::string what;  // with its line
};

std::map<const void*, std::vector<Access>>& accesses = *new std::map<const void*, std::vector<Access>>();

thread_local std::string operation;  // the outermost that runs, with its line

// While an operator runs: names it. Those that it is made of have its name.
struct Operation {
  bool outermost = operation.empty();
  explicit Operation(const std::string& name) {
    if (!outermost) return;
    py::gil_scoped_acquire gil;
    py::handle locate(on_locate);
    operation = name + " at " + locate().cast<std::string>();
  }
  ~Operation() { if (outermost) operation.clear(); }
};

std::string describe(const Access& access) {
  return "stream " + std::to_string(access.stream) + (access.writes ? " writes: " : " reads: ") + access.what;
}

// The next launch on stream `id` reads or writes the memory of `tensor`.
void access(const at::Tensor& tensor, bool writes, int64_t id) {
  if (tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  std::unique_lock<std::mutex> lock(streams_mutex);
  auto& clock = streams[id].clock;
  merge(clock, host_clock);
  Access now{begin, begin + (last + 1) * tensor.itemsize(), writes, id, ++clock[id], operation};
  auto& others = accesses[tensor.storage().data()];
  std::string race;
  for (const auto& other : others) {
    bool apart = other.end <= now.begin || now.end <= other.begin;
    bool in_order = clock[other.stream] >= other.launch;
    if (!apart && !in_order && (writes || other.writes)) race = describe(other);
  }
  std::erase_if(others, [&](const Access& other) {  // what the new one stands for as well
    bool inside = now.begin <= other.begin && other.end <= now.end;
    return inside && (writes || (!other.writes && other.stream == id));
  });
  others.push_back(now);
  lock.unlock();
  if (!race.empty()) {
    py::gil_scoped_acquire gil;
    py::handle callback(on_race);
    callback(describe(now), race);
  }
}

// ---- memory ----

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

// ---- devices and streams ----

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
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};

// torch made its own (empty) hooks while it was imported, and has no way to exchange them. Both classes have no members:
// another table of functions makes one the other.
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

// ---- operators ----

struct OnDevice {  // as CUDAGuard
  c10::DeviceIndex before = current_device;
  explicit OnDevice(std::optional<c10::Device> device) { if (device && device->has_index()) current_device = device->index(); }
  ~OnDevice() { current_device = before; }
};

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type));
}

// A CPU tensor in the same memory, which it keeps.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  Operation named("copy_");
  bool waits = false;
  if (to.is_cuda() != from.is_cuda() && from.numel() > 0 && !quiet) {
    const auto& host = to.is_cuda() ? from : to;
    waits = !non_blocking || !pinned.holds(host.const_data_ptr());
    if (to.is_cuda() && non_blocking && host.nbytes() <= kStaged) waits = false;
    if (waits) synchronised(to.is_cuda() ? "copy from the host" : "copy to the host");
  }
  come_to_its_turn();
  if (from.is_cuda()) access(from, false, current_stream);
  if (to.is_cuda()) access(to, true, current_stream);
  if (waits) synchronise_stream(current_stream);
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  Quiet device;
  at::Tensor target = to;
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_(target, from, false);
}

at::Scalar item(const at::Tensor& tensor) {
  Operation named("item");
  synchronised("item");
  access(tensor, false, current_stream);
  synchronise_stream(current_stream);
  return on_host(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    OnDevice on(tensor.device());
    come_to_its_turn();
    auto fresh = memory.allocate(needed);
    if (storage->nbytes() > 0) std::memcpy(fresh.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(needed);
  }
  return tensor;
}

void record_stream(at::Tensor&, c10::Stream) {}

// Their results' sizes depend on values: the host waits for them.
const std::set<std::string> kWaiting = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique_dim",
                                        "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave"};

void refuse_mixed_devices(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  if (name.find("index") != std::string::npos || name.find("pack_padded") != std::string::npos) return;
  const at::Tensor *on_cuda = nullptr, *on_cpu = nullptr;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& tensor = value.toTensor();
    if (tensor.is_cuda()) on_cuda = &tensor;
    if (tensor.is_cpu() && tensor.dim() > 0) on_cpu = &tensor;  // one without dimensions is taken for a number
  }
  TORCH_CHECK(on_cuda == nullptr || on_cpu == nullptr, "Expected all tensors to be on the same device, but found at "
              "least two devices, cuda and cpu! (", name, " on a simulated device)");
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Operation named(op.schema().name());
  refuse_mixed_devices(op, stack);
  if (kWaiting.count(op.schema().name())) synchronised(op.schema().name().c_str());
  come_to_its_turn();
  Quiet device;
  at::native::cpu_fallback(op, stack);
}

}  // namespace simulated

namespace at {
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &simulated::memory)
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated::Timer)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace simulated;
  m.impl("empty.memory_format", &simulated::empty);
  m.impl("empty_strided", &simulated::empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("resize_", &simulated::resize_);
  m.impl("copy_", &simulated::copy_);
  m.impl("_copy_from", &simulated::copy_from);
  m.impl("_copy_from_and_resize", &simulated::copy_from_and_resize);
  m.impl("_local_scalar_dense", &simulated::item);
  m.impl("record_stream", &simulated::record_stream);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  simulated::take_the_place_of_torchs_hooks();
  m.def("start", [](int64_t devices, py::object synchronising, py::object hanging, py::object locating, py::object racing) {
    device_count = devices;
    on_synchronise = synchronising.release().ptr();
    on_hang = hanging.release().ptr();
    on_locate = locating.release().ptr();
    on_race = racing.release().ptr();
  });
  m.def("synchronised", [](const std::string& kind) { synchronised(kind.c_str()); });
  m.def("synchronise_device", &synchronise_device);
  m.def("synchronise_stream", &synchronise_stream);
  m.def("access", [](const at::Tensor& tensor, bool writes, int64_t id, const std::string& what) {
    Operation named(what);
    access(tensor, writes, id);
  });
  m.def("abandon", &abandon, py::call_guard<py::gil_scoped_release>());
  m.def("set_hang_limit", [](double seconds) { hang_s = seconds; });
  m.def("launch", [](int64_t id, const std::string& what, py::function function) {
    auto* held = function.release().ptr();  // needs the GIL to go: in the task itself
    auto run = [held] {
      py::gil_scoped_acquire gil;
      py::reinterpret_steal<py::function>(held)();
    };
    py::gil_scoped_release release;
    std::unique_lock<std::mutex> lock(streams_mutex);
    push(lock, id, {what, run});
  });
  m.def("on_host", &on_host);
  m.def("current_device", [] { return int64_t(current_device); });
  m.def("exchange_device", [](int64_t index) {
    return int64_t(std::exchange(current_device, index < 0 ? current_device : c10::DeviceIndex(index)));
  });
  m.def("current_stream", [] { return current_stream; });
  m.def("exchange_stream", [](int64_t id) { return std::exchange(current_stream, id); });
  m.def("set_capacity", [](size_t bytes) { memory.capacity = bytes; });
  m.def("capacity", [] { return memory.capacity; });
  m.def("allocated", [](int64_t device) { return memory.uses[c10::DeviceIndex(device)].now; });
  m.def("peak", [](int64_t device) { return memory.uses[c10::DeviceIndex(device)].peak; });
  m.def("reset_peak", [](int64_t device) {
    auto& use = memory.uses[c10::DeviceIndex(device)];
    use.peak = use.now;
  });
}
