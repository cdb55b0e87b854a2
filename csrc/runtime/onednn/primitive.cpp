// Executes oneDNN primitives with this thread's scratchpad, and builds their keys.
#include "runtime/onednn/primitive.h"

#include <ATen/Parallel.h>
#include <omp.h>

#include <cstdlib>

#include "format/errors.h"
#include "runtime/available_threads.h"
#include "runtime/estimated_threads.h"
#include "runtime/fork.h"
#include "runtime/onednn/engine.h"

namespace torch_blocked {
namespace {

// The calling thread's scratchpad; grows to the largest primitive it has run.
void* scratchpad(std::size_t bytes) {
  struct Free {
    void operator()(void* buffer) const { std::free(buffer); }
  };
  static thread_local std::unique_ptr<void, Free> buffer;
  static thread_local std::size_t capacity = 0;
  constexpr std::size_t kAlignment = 4096;
  if (bytes > capacity) {
    capacity = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer.reset();  // first, so that both buffers never exist at once
    buffer.reset(std::aligned_alloc(kAlignment, capacity));
    if (!buffer) {
      capacity = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.get();
}

// oneDNN begins teams of its own, of as many threads as it was told.
void check_threads() {
  if (omp_in_parallel()) return;
  const int wanted = at::get_num_threads(), given = available_threads(wanted);
  TORCH_CHECK(given >= wanted,
              error_sentence("onednn", text(wanted, " threads"), text(given, " from the system"),
                             text("call torch.set_num_threads(", given, ")")));
}

}  // namespace

Primitive::Primitive(const dnnl::primitive& primitive, std::span<const Argument> arguments,
                     const dnnl::memory::desc& scratchpad_md)
    : primitive_(primitive), scratchpad_bytes_(scratchpad_md.get_size()) {
  for (const Argument& argument : arguments) {
    memories_.emplace_back(argument.md, engine(), nullptr);
    arguments_.push_back({argument.id, memories_.back().get()});
  }
  memories_.emplace_back(scratchpad_md, engine(), nullptr);
  arguments_.push_back({DNNL_ARG_SCRATCHPAD, memories_.back().get()});
}

void Primitive::execute(std::initializer_list<const void*> buffers) {
  check_threads();
  auto memory = memories_.begin();
  for (const void* buffer : buffers) (memory++)->set_data_handle(const_cast<void*>(buffer));
  if (scratchpad_bytes_ > 0) memory->set_data_handle(scratchpad(scratchpad_bytes_));
  dnnl::error::wrap_c_api(
      dnnl_primitive_execute(primitive_.get(), stream().get(), static_cast<int>(arguments_.size()),
                             arguments_.data()),
      "could not execute a primitive");
}

dnnl::primitive_attr user_scratchpad() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

bool is_ref(std::string_view impl_name) {
  return impl_name.find("ref") != impl_name.npos || impl_name.find("simple") != impl_name.npos;
}

Key& Key::add(std::int64_t value) {
  bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  return *this;
}

Key& Key::add(std::span<const std::int64_t> values) {
  add(static_cast<std::int64_t>(values.size()));
  for (std::int64_t value : values) add(value);
  return *this;
}

Key& Key::add(Format format) {
  return add(static_cast<std::int64_t>(format.kind)).add(format.block);
}

std::string Key::finish() && {
  add(at::get_num_threads()).add(is_deterministic());
  return std::move(bytes_);
}

}  // namespace torch_blocked
