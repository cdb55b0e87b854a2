// The pool behind empty_pooled(): its idle blocks, and how much it may keep.
#include "runtime/memory/memory_pool.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "format/errors.h"
#include "runtime/fork.h"
#include "runtime/memory/huge_pages.h"

namespace torch_blocked {
namespace {

constexpr std::size_t kLeastBytes = 1 << 20;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Maps a block, which consists of whole huge pages.
char* map(std::size_t bytes) {
  const std::size_t mapped = bytes + kHugePage;  // room to align it
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  // A RuntimeError, like that of ATen's own allocator.
  TORCH_CHECK(start != MAP_FAILED,
              error_sentence("memory", text(bytes, " bytes for a tensor"), "none from the system",
                             "use smaller tensors, or raise the limit of the process"));
  const auto begin = reinterpret_cast<std::uintptr_t>(start);
  const std::size_t before = round_up(begin, kHugePage) - begin;
  char* data = static_cast<char*>(start) + before;
  if (before > 0) munmap(start, before);
  if (before < kHugePage) munmap(data + bytes, kHugePage - before);
  prefer_huge_pages(data, bytes);
  return data;
}

class Pool {
 public:
  struct Block {
    char* data;
    std::size_t bytes;
  };

  // A block of about this size, a part of a larger block, or idle neighbours joined together. In a
  // loop of the same requests the first always fits. For new sizes, as in tuning, memory that has
  // been touched already is far cheaper than new memory from the system.
  Block take(std::size_t bytes) {
    bytes = round_up(bytes, kHugePage);
    {
      std::lock_guard lock(mutex_);
      auto fit = best_fit(bytes);
      if (fit == idle_.end()) {
        join_neighbours();
        fit = best_fit(bytes);
      }
      if (fit != idle_.end()) {
        Block block = take_out(fit);
        if (block.bytes > bytes + bytes / 4) {
          add_idle({block.data + bytes, block.bytes - bytes});
          block.bytes = bytes;
        }
        count_used(block.bytes);
        return block;
      }
      asked_ += bytes;
      const std::size_t wanted = used_ + asked_, most = std::max(most_, wanted);
      shrink(most + most / 4 - wanted);
    }
    char* data = nullptr;
    try {
      data = map(bytes);
    } catch (...) {  // the system gave nothing, so nothing counts as used
      got(0, bytes);
      throw;
    }
    got(bytes, bytes);
    return {data, bytes};
  }

  void give(const Block& block) noexcept {
    std::lock_guard lock(mutex_);
    used_ -= block.bytes;
    add_idle(block);
  }

  void release() {
    std::lock_guard lock(mutex_);
    shrink(0);
    most_ = used_;
  }

  std::int64_t idle_bytes() {
    std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(idle_bytes_);
  }

  // Called in a child of fork(): what other threads had asked the system for never comes.
  void forget_asked() { asked_ = 0; }

 private:
  void got(std::size_t bytes, std::size_t asked) {
    const std::lock_guard lock(mutex_);
    asked_ -= std::min(asked, asked_);
    count_used(bytes);
  }

  void count_used(std::size_t bytes) {
    used_ += bytes;
    most_ = std::max(most_, used_);
  }

  using Idle = std::vector<Block>;  // the last freed at the end

  // Memory for this list may be refused, where a tensor dies and nothing may be raised. The system
  // gets such a block.
  void add_idle(const Block& block) noexcept {
    try {
      idle_.push_back(block);
      idle_bytes_ += block.bytes;
    } catch (const std::bad_alloc&) {
      munmap(block.data, block.bytes);
    }
  }

  // The smallest block that is large enough; of several the one freed last.
  Idle::iterator best_fit(std::size_t bytes) {
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      if (block->bytes < bytes) continue;
      if (best == idle_.end() || block->bytes <= best->bytes) best = block;
    }
    return best;
  }

  Block take_out(Idle::iterator place) {
    const Block block = *place;
    idle_.erase(place);
    idle_bytes_ -= block.bytes;
    return block;
  }

  void join_neighbours() {
    std::ranges::sort(idle_, std::less(), &Block::data);
    auto joined = idle_.begin();
    for (const Block& block : idle_) {
      if (joined != idle_.begin() && (joined - 1)->data + (joined - 1)->bytes == block.data) {
        (joined - 1)->bytes += block.bytes;
      } else {
        *joined++ = block;
      }
    }
    idle_.erase(joined, idle_.end());
  }

  // Unmaps idle blocks, largest first, until at most `bytes` are left.
  void shrink(std::size_t bytes) {
    while (idle_bytes_ > bytes) {
      const Block block = take_out(std::ranges::max_element(idle_, std::less(), &Block::bytes));
      munmap(block.data, block.bytes);
    }
  }

  Idle idle_;
  std::size_t idle_bytes_ = 0, used_ = 0, most_ = 0;
  std::size_t asked_ = 0;  // bytes asked of the system and not yet received
  ForkMutex mutex_{[this] {
    abandon(idle_);
    idle_bytes_ = 0;
  }};
};

// Never destroyed: tensors may outlive every other static object.
Pool& pool() {
  static Pool& pool = *new Pool;
  return pool;
}

const bool at_fork = (in_forked_children([] { pool().forget_asked(); }), true);

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto block = std::make_unique<Pool::Block>();  // may be refused, so before there is memory
    *block = pool().take(bytes);
    void* data = block->data;
    return {data, block.release(), free, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // data is not its context
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void free(void* context) {
    const std::unique_ptr<Pool::Block> block(static_cast<Pool::Block*>(context));
    pool().give(*block);
  }
};

// TORCH_BLOCKED_POOL=0 turns it off.
bool enabled() {
  static const bool on = [] {
    const char* setting = std::getenv("TORCH_BLOCKED_POOL");
    return !setting || std::string_view(setting) != "0";
  }();
  return on;
}

c10::Allocator* allocator_for(at::IntArrayRef sizes, const at::TensorOptions& options) {
  static PoolAllocator pooled;
  const auto bytes =
      static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  return bytes >= kLeastBytes && enabled() ? &pooled : c10::GetAllocator(at::kCPU);
}

const c10::DispatchKeySet kCpu{c10::DispatchKey::CPU};

}  // namespace

at::Tensor empty_pooled(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::detail::empty_generic(sizes, allocator_for(sizes, options), kCpu,
                                   options.dtype().toScalarType(), std::nullopt);
}

at::Tensor empty_pooled(at::IntArrayRef sizes, at::IntArrayRef strides,
                        const at::TensorOptions& options) {
  return at::detail::empty_strided_generic(sizes, strides, allocator_for(sizes, options), kCpu,
                                           options.dtype().toScalarType());
}

std::int64_t idle_pool_bytes() { return pool().idle_bytes(); }

void release_pool() { pool().release(); }

void return_idle_memory() {
  release_pool();
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace torch_blocked
