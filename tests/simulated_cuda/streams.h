// Streams, events and their order: what is launched runs in a thread of each stream that has work of its own.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
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
  std::condition_variable given;  // a task, for its thread: to wake all threads costs more than what they do
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
size_t depth = 1024;       // launches that a stream takes before the host has to wait
std::string device_error;  // of a launched operator; the host learns of it when it waits

void run_stream(int64_t id) {
  std::unique_lock<std::mutex> lock(streams_mutex);
  auto& stream = streams[id];
  while (true) {
    stream.given.wait(lock, [&] { return !stream.tasks.empty(); });
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
  stream.tasks.push_back(std::move(task));
  if (!std::exchange(stream.has_thread, true)) std::thread(run_stream, id).detach();
  stream.given.notify_one();
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
  if (ready() && device_error.empty()) return;
  std::optional<py::gil_scoped_release> release;
  if (PyGILState_Check()) {  // never wait for it with the mutex held
    lock.unlock();
    release.emplace();
    lock.lock();
  }
  bool came = moved.wait_for(lock, std::chrono::duration<double>(hang_s), ready);
  std::string at = came ? "" : describe_streams();
  std::string error = std::exchange(device_error, "");
  lock.unlock();
  release.reset();
  TORCH_CHECK(error.empty(), "CUDA error: an operator failed on the device: ", error);
  if (!came) {
    py::gil_scoped_acquire gil;
    py::handle callback(on_hang);
    callback(at);
  }
}

void launch(int64_t id, Task task) {
  std::unique_lock<std::mutex> lock(streams_mutex);
  auto& stream = streams[id];
  wait_on_host(lock, [&] { return stream.abandoned || stream.tasks.size() < depth; });
  if (!lock.owns_lock()) lock.lock();
  if (!stream.abandoned) push(lock, id, std::move(task));
  lock.unlock();  // before a task goes that was not taken: it may hold tensors
}

bool is_idle(int64_t id) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return streams[id].idle();
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
  std::deque<Task> dropped;  // goes after the lock: it may hold tensors
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams[id].abandoned = true;
  dropped.swap(streams[id].tasks);
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

}  // namespace simulated
