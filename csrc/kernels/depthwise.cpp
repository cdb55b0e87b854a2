// Depthwise convolution: each channel sees itself, so the input lanes are the output lanes.
#include "kernels/grouped_tiles.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

template <typename T>
class SameLanes {
 public:
  using Number = T;
  static constexpr bool kOneInput = true, kZeroTail = true;  // src and weights are 0 there

  SameLanes(const GroupedConvolution&, const GroupedRow<T>&, std::int64_t, const T* src)
      : src_(src) {}

  Vec operator()(std::int64_t offset) const { return load_lanes<kWidth>(src_ + offset); }

 private:
  const T* src_;
};

// Row kernels that keep their taps in registers: the kernel sizes and strides of most networks, and
// the sizes of the phases that a transposed convolution of stride 2 has. The last one takes any.
template <typename T>
constexpr std::array kKernels{
    grouped_kernel<SameLanes<T>, 3, 1>(), grouped_kernel<SameLanes<T>, 5, 1>(),
    grouped_kernel<SameLanes<T>, 7, 1>(), grouped_kernel<SameLanes<T>, 3, 2>(),
    grouped_kernel<SameLanes<T>, 5, 2>(), grouped_kernel<SameLanes<T>, 7, 2>(),
    grouped_kernel<SameLanes<T>, 2, 1>(), grouped_kernel<SameLanes<T>, 4, 1>(),
    grouped_kernel<SameLanes<T>, 0, 0>(),
};

}  // namespace

void depthwise(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels<float>.data(), begin, end);
}

void depthwise_bfloats(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels<std::uint16_t>.data(), begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
