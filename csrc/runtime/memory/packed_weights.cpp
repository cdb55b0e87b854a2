// The cache of packed weights, and the storage hook that tells when weights were written.
#include "runtime/memory/packed_weights.h"

#include <c10/core/impl/COW.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "runtime/content_hash.h"
#include "runtime/fork.h"

namespace torch_blocked {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A value that Row::handed_out never has once a row is watched.
constexpr std::uint64_t kNotSeen = 0;

struct Entry {
  const void* data;
  std::vector<std::int64_t> dims, strides;
  std::string format;
  std::int64_t version;
  std::uint64_t seen;  // Row::handed_out when `packed` was last valid; kNotSeen if unsure
  std::optional<std::uint64_t> content;  // hash of the weights, if it was needed
  at::Tensor packed;
};

// The packed forms of all weights in one storage. A row lives as long as its storage, because the
// storage's hook does.
struct Row {
  WeakStorage storage;
  bool watched = false;  // the hook is set, and no pointer to write through was handed out since
  std::uint64_t handed_out = 0;  // how often such a pointer may have been handed out
  std::vector<Entry> entries;
};

// Never destroyed: a storage may outlive every static object, and its hook comes here.
struct Cache {
  std::unordered_map<const c10::StorageImpl*, Row> rows;
  ForkMutex mutex{[this] { abandon(rows); }};
};

Cache& cache() {
  static Cache& cache = *new Cache;
  return cache;
}

// The hook: PyTorch calls it, once, before it gives anybody a pointer through which this memory can
// be written. Every op that writes comes here, whichever tensor it writes, even through .data.
void handed_out(c10::StorageImpl* storage) {
  const std::lock_guard lock(cache().mutex);
  const auto row = cache().rows.find(storage);
  if (row != cache().rows.end()) row->second.watched = false;
}

// Whether the hook sees every write. It does not if somebody may hold a pointer from before the
// hook was set: through another tensor of this storage (perhaps shared with a NumPy array), or as
// the owner of memory that torch did not allocate (NumPy, another process).
bool sees_all_writes(const Row& row, const c10::Storage& storage) {
  return row.watched && storage.use_count() == 1 &&
         c10::impl::cow::has_simple_data_ptr(*storage.unsafeGetStorageImpl());
}

// The row of a storage. It sets the hook, before anybody reads the weights. A storage that is
// copied on write has a hook of its own; its writes are not seen.
Row& watched_row(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  Row& row =
      cache()
          .rows.try_emplace(impl, Row{.storage = storage.getWeakStorageImpl(), .entries = {}})
          .first->second;
  if (row.watched) return row;
  ++row.handed_out;
  if (!impl->has_materializer()) {
    impl->set_materializer(&handed_out);
    row.watched = true;
  }
  return row;
}

Entry* find(Row& row, const at::Tensor& weights, const std::string& format) {
  const auto same_place = [&](const Entry& entry) {
    return entry.data == weights.const_data_ptr() && weights.sizes() == entry.dims &&
           weights.strides() == entry.strides && entry.format == format;
  };
  const auto found = std::ranges::find_if(row.entries, same_place);
  return found == row.entries.end() ? nullptr : &*found;
}

// Frees the packed forms of weights that are gone.
void drop_dead() {
  std::erase_if(cache().rows, [](const auto& item) { return item.second.storage.expired(); });
}

}  // namespace

at::Tensor packed_weights(const at::Tensor& weights, const std::string& format,
                          const std::function<at::Tensor()>& pack) {
  if (!weights.is_non_overlapping_and_dense()) return pack();
  const c10::Storage& storage = weights.storage();
  const auto version =
      weights.is_inference() ? std::int64_t{-1} : static_cast<std::int64_t>(weights._version());
  std::optional<std::uint64_t> content;
  std::uint64_t seen = 0;
  bool sure = false, doubted = false;
  {
    const std::lock_guard lock(cache().mutex);
    Row& row = watched_row(storage);
    seen = row.handed_out;
    sure = sees_all_writes(row, storage);
    const Entry* entry = find(row, weights, format);
    if (entry && entry->version == version) {
      if (sure && entry->seen == seen) return entry->packed;
      doubted = true;
    }
  }
  // Somebody who holds a pointer now may write through it after the weights were read here, and
  // drop it unnoticed. So later uses may skip the hash only if nobody held a pointer while the
  // weights were read.
  if (!sure) seen = kNotSeen;
  // Hashing reads all weights, so it happens without the lock. Doing it twice is harmless.
  if (doubted || !sure) content = content_hash(weights);
  if (doubted) {
    const std::lock_guard lock(cache().mutex);
    Entry* entry = find(watched_row(storage), weights, format);
    if (entry && entry->version == version && entry->content == content) {
      entry->seen = seen;
      return entry->packed;
    }
  }
  at::Tensor packed = pack();
  const std::lock_guard lock(cache().mutex);
  drop_dead();
  Row& row = watched_row(storage);
  Entry* entry = find(row, weights, format);
  if (!entry) entry = &row.entries.emplace_back();
  *entry = {weights.const_data_ptr(),
            weights.sizes().vec(),
            weights.strides().vec(),
            format,
            version,
            seen,
            content,
            packed};
  return packed;
}

std::int64_t packed_weight_bytes() {
  const std::lock_guard lock(cache().mutex);
  drop_dead();
  std::int64_t bytes = 0;
  for (const auto& [storage, row] : cache().rows) {
    for (const Entry& entry : row.entries) {
      bytes += static_cast<std::int64_t>(entry.packed.nbytes());
    }
  }
  return bytes;
}

void clear_packed_weights() {
  const std::lock_guard lock(cache().mutex);
  drop_dead();
  for (auto& [storage, row] : cache().rows) row.entries.clear();
}

}  // namespace torch_blocked
