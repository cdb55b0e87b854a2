#include "runtime/memory/workspace.h"

#include <array>
#include <cstdlib>
#include <memory>
#include <new>

#include "runtime/memory/borders.h"
#include "runtime/memory/huge_pages.h"

namespace torch_blocked {

float* workspace(std::int64_t floats, WorkspaceOf of) {
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  struct Memory {
    std::unique_ptr<float, Free> data;
    std::size_t size = 0;
  };
  static thread_local std::array<Memory, 3> memory;
  auto& [data, size] = memory[static_cast<std::size_t>(of)];
  const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float);
  if (size < bytes) {
    data.reset();
    size = 0;
    const std::size_t rounded = (bytes + kBorder + kHugePage - 1) / kHugePage * kHugePage;
    data.reset(static_cast<float*>(std::aligned_alloc(kHugePage, rounded)));
    if (!data) throw std::bad_alloc();
    prefer_huge_pages(data.get(), rounded);
    size = rounded;
  }
  set_border(data.get(), static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(size));
  return data.get();
}

}  // namespace torch_blocked
