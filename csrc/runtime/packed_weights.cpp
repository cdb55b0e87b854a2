#include "runtime/packed_weights.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch_blocked {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Entry {
  WeakStorage storage;
  const void* data;
  std::vector<std::int64_t> dims, strides;
  std::string format;
  std::uint32_t version;
  std::uint64_t sample;
  at::Tensor packed;
};

std::mutex mutex;
std::unordered_map<const c10::StorageImpl*, std::vector<Entry>> entries;

// FNV-1a over 64 elements spread over the weights.
std::uint64_t sample_of(const at::Tensor& weights) {
  constexpr std::int64_t kSamples = 64;
  const std::int64_t numel = weights.numel();
  const std::int64_t step = std::max<std::int64_t>(1, numel / kSamples);
  const auto size = static_cast<std::int64_t>(weights.itemsize());
  const char* data = static_cast<const char*>(weights.const_data_ptr());
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::int64_t i = 0; i < numel; i += step) {
    std::uint64_t element = 0;
    std::memcpy(&element, data + i * size, std::min<std::size_t>(size, sizeof element));
    hash = (hash ^ element) * 0x100000001b3;
  }
  return hash;
}

bool same_place(const Entry& entry, const at::Tensor& weights, const std::string& format) {
  return entry.data == weights.const_data_ptr() && weights.sizes() == entry.dims &&
         weights.strides() == entry.strides && entry.format == format;
}

// Frees what belonged to weights that are gone; a new storage may have their address.
void drop_dead() {
  for (auto it = entries.begin(); it != entries.end();) {
    std::erase_if(it->second, [](const Entry& entry) { return entry.storage.expired(); });
    it = it->second.empty() ? entries.erase(it) : std::next(it);
  }
}

}  // namespace

at::Tensor packed_weights(const at::Tensor& weights, const std::string& format,
                          const std::function<at::Tensor()>& pack) {
  if (weights.is_inference() || !weights.is_non_overlapping_and_dense()) return pack();
  const c10::StorageImpl* storage = weights.storage().unsafeGetStorageImpl();
  const auto version = static_cast<std::uint32_t>(weights._version());
  const std::uint64_t sample = sample_of(weights);
  {
    std::lock_guard lock(mutex);
    for (const Entry& entry : entries[storage]) {
      if (!entry.storage.expired() && same_place(entry, weights, format) &&
          entry.version == version && entry.sample == sample) {
        return entry.packed;
      }
    }
  }
  at::Tensor packed = pack();  // unlocked: packing is slow, and packing twice is harmless
  std::lock_guard lock(mutex);
  drop_dead();
  std::vector<Entry>& row = entries[storage];
  std::erase_if(row, [&](const Entry& entry) { return same_place(entry, weights, format); });
  row.push_back({weights.storage().getWeakStorageImpl(), weights.const_data_ptr(),
                 weights.sizes().vec(), weights.strides().vec(), format, version, sample, packed});
  return packed;
}

std::int64_t packed_weight_bytes() {
  std::lock_guard lock(mutex);
  drop_dead();
  std::int64_t bytes = 0;
  for (const auto& [storage, row] : entries) {
    for (const Entry& entry : row) bytes += static_cast<std::int64_t>(entry.packed.nbytes());
  }
  return bytes;
}

void clear_packed_weights() {
  std::lock_guard lock(mutex);
  entries.clear();
}

}  // namespace torch_blocked
