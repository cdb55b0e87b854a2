// Depthwise convolution: each channel sees itself, so the input lanes are the output lanes.
#include "kernels/grouped_tiles.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

class SameLanes {
 public:
  static constexpr bool kOneInput = true, kZeroTail = true;  // src and weights are 0 there

  SameLanes(const GroupedConvolution&, const GroupedRow&, std::int64_t, const float* src)
      : src_(src) {}

  Vec operator()(std::int64_t offset) const { return Vec::loadu(src_ + offset); }

 private:
  const float* src_;
};

// Row kernels that keep their taps in registers: the kernel sizes and strides of most networks, and
// the sizes of the phases that a transposed convolution of stride 2 has. The last one takes any.
constexpr std::array kKernels{
    grouped_kernel<SameLanes, 3, 1>(), grouped_kernel<SameLanes, 5, 1>(),
    grouped_kernel<SameLanes, 7, 1>(), grouped_kernel<SameLanes, 3, 2>(),
    grouped_kernel<SameLanes, 5, 2>(), grouped_kernel<SameLanes, 7, 2>(),
    grouped_kernel<SameLanes, 2, 1>(), grouped_kernel<SameLanes, 4, 1>(),
    grouped_kernel<SameLanes, 0, 0>(),
};

}  // namespace

void depthwise(const GroupedConvolution& g, std::int64_t begin, std::int64_t end) {
  grouped_parts(g, kKernels.data(), begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
