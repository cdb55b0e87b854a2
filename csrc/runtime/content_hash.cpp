// Hashes a tensor's bytes in parts, on all threads.
#include "runtime/content_hash.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

constexpr std::size_t kLanes = 8;  // independent chains, enough to hide the latency of a product
constexpr std::int64_t kPart = std::int64_t{64} << 10;  // bytes

// A step is a bijection of either argument, so one changed word always shows. The rotation brings
// the highest bits, the signs, back to where the next product spreads them.
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  return std::rotl((hash ^ word) * 0x9e3779b97f4a7c15, 31);
}

std::uint64_t hash_of(const char* data, std::size_t size) {
  std::array<std::uint64_t, kLanes> lanes{1, 2, 3, 4, 5, 6, 7, 8};
  const auto word = [](const char* from, std::size_t bytes) {
    std::uint64_t value = 0;
    std::memcpy(&value, from, bytes);
    return value;
  };
  std::size_t at = 0;
  for (; at + 8 * kLanes <= size; at += 8 * kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = mixed(lanes[lane], word(data + at + 8 * lane, 8));
    }
  }
  std::uint64_t hash = size;
  for (const std::uint64_t lane : lanes) hash = mixed(hash, lane);
  for (; at < size; at += 8)
    hash = mixed(hash, word(data + at, std::min<std::size_t>(8, size - at)));
  return hash;
}

}  // namespace

std::uint64_t content_hash(const at::Tensor& dense) {
  const char* data = static_cast<const char*>(dense.const_data_ptr());
  const auto size = static_cast<std::int64_t>(dense.nbytes());
  std::vector<std::uint64_t> parts(static_cast<std::size_t>((size + kPart - 1) / kPart));
  parallel_units(static_cast<std::int64_t>(parts.size()), kPart / 4,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t part = begin; part < end; ++part) {
                     const std::int64_t first = part * kPart;
                     parts[static_cast<std::size_t>(part)] = hash_of(
                         data + first, static_cast<std::size_t>(std::min(kPart, size - first)));
                   }
                 });
  return hash_of(reinterpret_cast<const char*>(parts.data()), parts.size() * sizeof parts[0]);
}

}  // namespace torch_blocked
