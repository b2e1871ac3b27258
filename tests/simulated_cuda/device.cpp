// A "cuda" device made of host memory, for a CPU build of torch: real values, and the paths that CUDA tensors take.
//
// Tensors are CUDA tensors to everybody (`is_cuda`, dispatch, autograd's device thread, autocast). Each operator
// without a kernel of its own here runs on the CPU: at once where its stream has nothing to do, else launched, in the
// stream's thread. What would make the host wait for the device is reported to Python by its kind.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "guard.h"

namespace simulated {

struct OnDevice {  // as CUDAGuard
  c10::DeviceIndex before = current_device;
  explicit OnDevice(std::optional<c10::Device> device) {
    if (device && device->has_index()) current_device = device->index();
  }
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

// What a stream's thread does: an exception there is an error of the device.
template <typename Work>
void as_kernel(Work work) {
  try {
    c10::InferenceMode no_gradients;  // writes tensors that the host made in this mode, too
    work();
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(streams_mutex);
    if (device_error.empty()) device_error = error.what();
  }
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
  if (from.is_cuda()) access(from, false, current_stream);
  if (to.is_cuda()) access(to, true, current_stream);
  auto source = on_host(from), target = on_host(to);
  if (waits) {
    synchronise_stream(current_stream);
    target.copy_(source);
  } else if (quiet || is_idle(current_stream)) {
    target.copy_(source);
  } else {
    if (from.is_cpu() && !pinned.holds(from.const_data_ptr())) source = source.clone();  // staged
    launch(current_stream, {operation, [target, source] { as_kernel([&] { target.copy_(source); }); }});
  }
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

// As the host frees and gets the memory of a parameter that is gathered and let go. The tensor is all of its storage.
void resize_storage(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  OnDevice on(tensor.device());
  come_to_its_turn();
  auto fresh = memory.allocate(bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) std::memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
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

// Replaces each tensor of a stack, also within lists.
template <typename Change>
void replace_tensors(torch::jit::Stack& stack, Change change) {
  for (auto& value : stack) {
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = change(tensor);
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      c10::List<std::optional<at::Tensor>> changed;
      for (auto& tensor : list) changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
      value = changed;
    }
  }
}

// Their CPU kernels make the result larger meanwhile, in memory that cannot grow.
const std::set<std::string> kGrowing = {"aten::mse_loss"};

bool can_be_launched(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded) || op.hasTag(at::Tag::dynamic_output_shape)) return false;
  if (op.hasTag(at::Tag::data_dependent_output) || kWaiting.count(op.schema().name())) return false;
  if (kGrowing.count(op.schema().name())) return false;
  const auto& returns = op.schema().returns();
  return std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    bool is_view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    return !is_view && result.type()->kind() == c10::TypeKind::TensorType;
  });
}

struct Warned final : c10::WarningHandler {
  bool warned = false;
  void process(const c10::Warning&) override { warned = true; }
};

// The results of an operator as tensors without values, by its kernel for "meta" tensors; nothing where it has none.
std::optional<torch::jit::Stack> results_without_values(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  std::map<void*, at::Tensor> known;
  bool has_cpu = false;
  for (auto& value : arguments) if (value.isDevice()) return std::nullopt;
  replace_tensors(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) { has_cpu |= tensor.dim() > 0; return tensor; }
    auto& made = known[tensor.unsafeGetTensorImpl()];
    auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta);
    if (!made.defined()) made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    return made;
  });
  if (has_cpu) return std::nullopt;
  auto shapes = [&] {
    std::vector<std::vector<int64_t>> found;
    for (auto& [_, tensor] : known) found.push_back(tensor.sizes().vec());
    return found;
  };
  auto before = shapes();
  Warned handler;
  try {
    c10::WarningUtils::WarningHandlerGuard guard(&handler);
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&arguments);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  if (handler.warned || shapes() != before) return std::nullopt;  // before: it resizes what it writes to
  return arguments;
}

// Launch an operator on a stream that is busy. False: it has to be run by the host, after the stream.
bool launched(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!can_be_launched(op)) return false;
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  auto shapes = results_without_values(op, arguments);
  if (!shapes) return false;
  torch::jit::Stack results;
  std::vector<at::Tensor> fresh;  // one for each result; undefined where an argument is the result
  for (size_t r = 0; r < schema.returns().size(); r++) {
    const auto* alias = schema.returns()[r].alias_info();
    const auto& shape = (*shapes)[r].toTensor();
    fresh.emplace_back();
    if (alias != nullptr) {
      for (size_t a = 0; a < arguments.size(); a++) {
        const auto* other = schema.arguments()[a].alias_info();
        if (other != nullptr && other->beforeSets() == alias->beforeSets()) results.push_back(arguments[a]);
      }
      if (results.size() != r + 1) return false;
    } else {
      if (shape.defined()) {
        fresh.back() = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(kCUDA));
      }
      results.push_back(fresh.back());
    }
  }
  for (size_t a = 0; a < arguments.size(); a++) {
    const auto* alias = schema.arguments()[a].alias_info();
    torch::jit::Stack one = {arguments[a]};
    replace_tensors(one, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) access(tensor, alias != nullptr && alias->isWrite(), current_stream);
      return tensor;
    });
  }
  std::vector<at::Tensor> targets;
  for (auto& tensor : fresh) {
    if (tensor.defined()) access(tensor, true, current_stream);
    targets.push_back(on_host(tensor));
  }
  replace_tensors(arguments, on_host);
  launch(current_stream, {operation, [op, arguments, targets] {
    as_kernel([&] {
      torch::jit::Stack values = arguments;
      op.callBoxed(&values);
      for (size_t r = 0; r < targets.size(); r++) {
        if (targets[r].defined()) targets[r].copy_(values[r].toTensor());
      }
    });
  }});
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& result : results) stack->push_back(result);
  return true;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Operation named(op.schema().name());
  refuse_mixed_devices(op, stack);
  if (kWaiting.count(op.schema().name())) synchronised(op.schema().name().c_str());
  if (!quiet && !is_idle(current_stream) && launched(op, stack)) return;
  come_to_its_turn();
  Quiet device;
  Warned ignored;  // what CPU kernels warn of
  Drawing drawing(op, stack);
  c10::WarningUtils::WarningHandlerGuard guard(&ignored);
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
  m.def("start", [](int64_t devices, std::vector<py::object> callbacks) {
    device_count = devices;
    for (auto [place, index] : {std::pair{&on_synchronise, 0}, {&on_hang, 1}, {&on_locate, 2}, {&on_race, 3}}) {
      *place = callbacks[index].release().ptr();
    }
  });
  m.def("synchronised", [](const std::string& kind) { synchronised(kind.c_str()); });
  m.def("synchronise_device", &synchronise_device);
  m.def("synchronise_stream", &synchronise_stream);
  m.def("access", [](const at::Tensor& tensor, bool writes, int64_t id, const std::string& what) {
    Operation named(what);
    access(tensor, writes, id);
  });
  m.def("abandon", &abandon, py::call_guard<py::gil_scoped_release>());
  m.def("set_depth", [](size_t launches) { depth = launches; });
  m.def("set_hang_limit", [](double seconds) { hang_s = seconds; });
  m.def("launch", [](int64_t id, const std::string& what, py::function function) {
    auto* held = function.release().ptr();  // needs the GIL to go: in the task itself
    auto run = [held] {
      py::gil_scoped_acquire gil;
      py::reinterpret_steal<py::function>(held)();
    };
    launch(id, {what, run});
  });
  m.def("on_host", [](const at::Tensor& tensor) {  // does not keep the memory: gloo's threads let go late
    auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  });
  m.def("resize_storage", &resize_storage);
  m.def("default_generator", [](int64_t index) { return default_generator(c10::DeviceIndex(index)); });
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
