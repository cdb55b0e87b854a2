// Grouped convolution. For each input channel of a group in turn, it makes a vector in which every
// output lane has that channel of its own group.
#include <bit>

#include "kernels/grouped/grouped_tiles.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

inline Index index_of(const LaneSource& source) { return Index::loadu(source.lanes.data()); }

inline float as_float(float x) { return x; }
inline float as_float(std::uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bfloat) << 16);
}

// All output channels of the vector are of one group.
template <typename T>
class Broadcast : public InBlocks {
 public:
  using Number = T;
  static constexpr bool kOneInput = false, kZeroTail = false;

  Broadcast(const GroupedConvolution& g, const GroupedRows<T>& row, std::int64_t input,
            const T* src) {
    const LaneSource& source = row.lanes[input * g.sources];
    src_ = src + source.block * row.src_plane + source.lanes[0];
  }

  Vec operator()(std::int64_t pixel) const { return Vec(as_float(src_[pixel * kWidth])); }

 private:
  const T* src_;
};

// The input channels of the output vector lie in one vector of src.
template <typename T>
class Permute : public InBlocks {
 public:
  using Number = T;
  static constexpr bool kOneInput = false, kZeroTail = false;

  Permute(const GroupedConvolution& g, const GroupedRows<T>& row, std::int64_t input, const T* src)
      : src_(src + row.lanes[input * g.sources].block * row.src_plane),
        index_(index_of(row.lanes[input * g.sources])) {}

  Vec operator()(std::int64_t pixel) const {
    const std::int64_t offset = pixel * kWidth;
    return permute(load_lanes<kWidth>(src_ + offset), index_);
  }

 private:
  const T* src_;
  Index index_;
};

// The input channels lie in two vectors of src.
template <typename T>
class PermuteTwo : public InBlocks {
 public:
  using Number = T;
  static constexpr bool kOneInput = false, kZeroTail = false;

  PermuteTwo(const GroupedConvolution&, const GroupedRows<T>& row, std::int64_t input,
             const T* src) {
    const LaneSource* sources = row.lanes + input * 2;
    first_ = src + sources[0].block * row.src_plane;
    second_ = src + sources[1].block * row.src_plane;
    first_index_ = index_of(sources[0]);
    second_index_ = index_of(sources[1]);
  }

  Vec operator()(std::int64_t pixel) const {
    const std::int64_t offset = pixel * kWidth;
    const Vec x = permute(load_lanes<kWidth>(first_ + offset), first_index_);
    return permute(load_lanes<kWidth>(second_ + offset), second_index_, x);
  }

 private:
  const T *first_, *second_;
  Index first_index_, second_index_;
};

// The input channels lie in any number of vectors of src.
template <typename T>
class Gather : public InBlocks {
 public:
  using Number = T;
  static constexpr bool kOneInput = false, kZeroTail = false;

  Gather(const GroupedConvolution& g, const GroupedRows<T>& row, std::int64_t input, const T* src)
      : src_(src),
        first_(row.lanes + input * g.sources),
        end_(first_ + first_->count),
        plane_(row.src_plane) {}

  Vec operator()(std::int64_t pixel) const {
    const std::int64_t offset = pixel * kWidth;
    Vec x = permute(load_lanes<kWidth>(src_ + first_->block * plane_ + offset), index_of(*first_));
    for (const LaneSource* source = first_ + 1; source < end_; ++source) {
      x = permute(load_lanes<kWidth>(src_ + source->block * plane_ + offset), index_of(*source), x);
    }
    return x;
  }

 private:
  const T* src_;
  const LaneSource *first_, *end_;
  std::int64_t plane_;
};

template <typename Source>
constexpr std::array kKernels{
#if !defined(CPU_CAPABILITY_DEFAULT)  // which has no registers for the taps
    grouped_kernel<Source, 3, 1>(), grouped_kernel<Source, 3, 2>(),
    grouped_kernel<Source, 2, 1>(), grouped_kernel<Source, 1, 1>(),
#endif
    grouped_kernel<Source, 0, 0>(),
};

template <typename T>
void broadcast(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels<Broadcast<T>>.data(), begin, end);
}

template <typename T>
void permute_lanes(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  const auto& kernels = g.sources == 1 ? kKernels<Permute<T>> : kKernels<PermuteTwo<T>>;
  grouped_parts(g, kernels.data(), begin, end);
}

template <typename T>
void gather(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels<Gather<T>>.data(), begin, end);
}

}  // namespace

void grouped_broadcast(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  broadcast<float>(g, begin, end);
}

void grouped_permute(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  permute_lanes<float>(g, begin, end);
}

void grouped_gather(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  gather<float>(g, begin, end);
}

void grouped_broadcast_bfloats(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  broadcast<std::uint16_t>(g, begin, end);
}

void grouped_permute_bfloats(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  permute_lanes<std::uint16_t>(g, begin, end);
}

void grouped_gather_bfloats(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  gather<std::uint16_t>(g, begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
