// Depthwise convolution: each channel sees itself, so the input lanes are the output lanes.
#include "kernels/grouped/grouped_tiles.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

template <typename T>
class SameLanes : public InBlocks {
 public:
  using Number = T;
  static constexpr bool kOneInput = true, kZeroTail = true;  // src and weights are 0 there

  SameLanes(const GroupedConvolution&, const GroupedRows<T>&, std::int64_t, const T* src)
      : src_(src) {}

  Vec operator()(std::int64_t pixel) const { return load_lanes<kWidth>(src_ + pixel * kWidth); }

 private:
  const T* src_;
};

// The input lanes of channels-last.
template <typename T>
class LanesOfPixels {
 public:
  using Number = T;
  static constexpr bool kOneInput = true, kZeroTail = true;  // there is no tail
  static std::int64_t src_pixel(const GroupedConvolution& g) { return g.src_pixel; }
  static std::int64_t dst_pixel(const GroupedConvolution& g) { return g.dst_pixel; }

  LanesOfPixels(const GroupedConvolution& g, const GroupedRows<T>&, std::int64_t, const T* src)
      : src_(src), step_(g.src_pixel) {}

  Vec operator()(std::int64_t pixel) const { return load_lanes<kWidth>(src_ + pixel * step_); }

 private:
  const T* src_;
  std::int64_t step_;
};

// Row kernels that keep their taps in registers, for the kernel sizes and strides of most networks
// and for the phases of transposed convolutions of stride 2. The last one takes any size.
template <typename Source>
constexpr std::array kKernels{
#if !defined(CPU_CAPABILITY_DEFAULT)  // which has no registers for the taps
    grouped_kernel<Source, 3, 1>(), grouped_kernel<Source, 5, 1>(), grouped_kernel<Source, 7, 1>(),
    grouped_kernel<Source, 3, 2>(), grouped_kernel<Source, 5, 2>(), grouped_kernel<Source, 7, 2>(),
    grouped_kernel<Source, 2, 1>(), grouped_kernel<Source, 4, 1>(),
#endif
    grouped_kernel<Source, 0, 0>(),
};

}  // namespace

void depthwise(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels<SameLanes<float>>.data(), begin, end);
}

void depthwise_bfloats(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels<SameLanes<std::uint16_t>>.data(), begin, end);
}

void depthwise_last(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels<LanesOfPixels<float>>.data(), begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
