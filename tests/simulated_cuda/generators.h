// Random numbers of devices: each has a generator of its own, beside the CPU's, with a seed and a state of its own.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "memory.h"

namespace simulated {

// Draws with a generator for CPU kernels, since those are what runs.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(kCUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        numbers(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  void set_state(const c10::TensorImpl& state) override { implementation()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return implementation()->get_state(); }

  at::Generator numbers;

 private:
  c10::GeneratorImpl* implementation() const { return numbers.unsafeGetGeneratorImpl(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->numbers = numbers.clone();
    return copy;
  }
};

at::Generator new_generator(c10::DeviceIndex index) { return at::make_generator<DeviceGenerator>(index); }

// Not seeded as the CPU's is, until somebody does so.
const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::mutex made;
  static std::map<c10::DeviceIndex, at::Generator> generators;
  std::lock_guard<std::mutex> lock(made);
  if (index < 0) index = current_device;
  auto& found = generators[index];
  if (!found.defined()) {
    found = new_generator(index);
    found.seed();
  }
  return found;
}

const at::Generator& numbers_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->numbers;
}

// The generator of the tensors that an operator works on.
const at::Generator& generator_for(torch::jit::Stack* stack) {
  for (const auto& value : *stack) {
    if (value.isTensor() && value.toTensor().is_cuda()) return default_generator(value.toTensor().device().index());
  }
  return default_generator(-1);
}

// While an operator runs that draws: from its device's generator, also where it is not among its arguments.
struct Drawing {
  Drawing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    const auto& arguments = op.schema().arguments();
    for (size_t a = 0; a < arguments.size(); a++) {
      auto& value = (*stack)[stack->size() - arguments.size() + a];
      bool is_generator = arguments[a].type()->str() == "Generator?" || value.isGenerator();
      if (!is_generator) continue;
      value = numbers_of(value.isNone() ? generator_for(stack) : value.toGenerator());
      return;
    }
    host = at::detail::getDefaultCPUGenerator();
    before = host.get_state();
    numbers = numbers_of(generator_for(stack));
    host.set_state(numbers.get_state());
  }
  ~Drawing() {
    if (!host.defined()) return;
    numbers.set_state(host.get_state());
    host.set_state(before);
  }
  at::Generator host, numbers;  // the CPU's, if it stands in, and the device's
  at::Tensor before;
};

}  // namespace simulated
