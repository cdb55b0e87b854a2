// Packs the weights of Winograd convolutions to U.
#include <ATen/ops/zeros.h>

#include <numeric>

#include "ops/convolution/winograd/winograd.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

using Problem = ConvolutionProblem;
using kernels::Winograd;
using kernels::WinogradShape;

std::int64_t winograd_padded_outputs(const Winograd& kernel, std::int64_t oc, std::int64_t block) {
  return round_up(round_up(oc, block), kernel.channels / 2);
}

std::int64_t winograd_u_size(const Winograd& kernel, const WinogradShape& shape) {
  return kernel.position_weights * ceil_div(shape.ic, kernel.input_channels) *
         winograd_padded_outputs(kernel, shape.oc, shape.block);
}

bool has_own_taps(const Winograd& kernel, const Problem& p) {
  return WinogradOrder(p).dims == WinogradSizes{0, 1, 2} &&
         as_3d(at::IntArrayRef(p.weight_dims).slice(2), 1) == kernel.taps;
}

kernels::WinogradWeights winograd_weights(const Problem& p, const at::Tensor& weight) {
  const float* data = weight.const_data_ptr<float>();
  WinogradSizes strides = as_3d(weight.strides().slice(2), 0);
  const WinogradSizes taps = as_3d(at::IntArrayRef(p.weight_dims).slice(2), 1);
  for (std::size_t i = 0; p.transposed && i < 3; ++i) {
    data += (taps[i] - 1) * strides[i];
    strides[i] = -strides[i];
  }
  return {.data = data,
          .oc = p.dst_dims[1],
          .ic = p.src_dims[1],
          .oc_stride = weight.stride(p.transposed ? 1 : 0),
          .ic_stride = weight.stride(p.transposed ? 0 : 1),
          .d_stride = strides[0],
          .h_stride = strides[1],
          .w_stride = strides[2]};
}

namespace {

// The weight of one bundle, from weight [OC, IC / groups, *kernel], transposed [IC, OC / groups,
// *kernel]. It has its groups' blocks along the diagonal and zeros elsewhere.
at::Tensor weight_of_bundle(const Problem& p, const at::Tensor& weight, std::int64_t bundle) {
  const std::int64_t groups = group_bundles(p).groups;
  const std::int64_t rows = weight.size(0) / p.groups, columns = weight.size(1);
  const at::Tensor own = weight.narrow(0, bundle * groups * rows, groups * rows);
  if (groups == 1) return own;
  Dims dims = weight.sizes().vec();
  dims[0] = groups * rows;
  dims[1] = groups * columns;
  const at::Tensor whole = at::zeros(dims, weight.options());
  for (std::int64_t i = 0; i < groups; ++i) {
    whole.narrow(0, i * rows, rows)
        .narrow(1, i * columns, columns)
        .copy_(own.narrow(0, i * rows, rows));
  }
  return whole;
}

// [OC, IC / groups, *kernel], transposed [IC, OC / groups, *kernel], as the kernels' parts:
//   [OC, parts x padded IC, *taps], dims of one tap first, with zeros for taps there are not
at::Tensor in_parts(const Winograd& kernel, const Problem& p, const at::Tensor& weight) {
  const WinogradOrder order(p);
  const WinogradShape shape = winograd_shape(p, kernel.taps);
  at::Tensor plain = weight;
  if (p.transposed) {
    Dims taps(p.spatial());
    std::iota(taps.begin(), taps.end(), 2);
    plain = weight.transpose(0, 1).flip(taps);
  }
  while (plain.dim() < 5) plain = plain.unsqueeze(2);
  const auto& [first, second, third] = order.dims;
  plain = plain.permute({0, 1, 2 + first, 2 + second, 2 + third});
  const auto& [d, h, w] = shape.parts;
  const WinogradSizes& taps = kernel.taps;
  const at::Tensor whole = at::zeros(
      {shape.oc, shape.ic / (d * h * w), d * taps[0], h * taps[1], w * taps[2]}, weight.options());
  at::Tensor inside = whole.narrow(1, 0, plain.size(1));
  for (std::int64_t dim = 2; dim < 5; ++dim) inside = inside.narrow(dim, 0, plain.size(dim));
  inside.copy_(plain);
  return whole.view({shape.oc, -1, d, taps[0], h, taps[1], w, taps[2]})
      .permute({0, 2, 4, 6, 1, 3, 5, 7})
      .reshape({shape.oc, shape.ic, taps[0], taps[1], taps[2]});
}

// weight [OC, IC, d, h, w]
kernels::WinogradWeights weights_in_parts(const at::Tensor& weight) {
  return {.data = weight.const_data_ptr<float>(),
          .oc = weight.size(0),
          .ic = weight.size(1),
          .oc_stride = weight.stride(0),
          .ic_stride = weight.stride(1),
          .d_stride = weight.stride(2),
          .h_stride = weight.stride(3),
          .w_stride = weight.stride(4)};
}

// Packs one bundle's weights to its U.
void pack_bundle(const Winograd& kernel, const Problem& p, const at::Tensor& weight, float* u) {
  const std::int64_t ic = winograd_shape(p, kernel.taps).ic, width = kernel.channels / 2;
  const std::int64_t padded_oc = winograd_padded_outputs(kernel, p.dst_dims[1], p.dst_format.block);
  const bool is_own = has_own_taps(kernel, p);
  const at::Tensor own = is_own ? weight : in_parts(kernel, p, weight);
  const kernels::WinogradWeights weights =
      is_own ? winograd_weights(p, own) : weights_in_parts(own);
  // A unit: one group of output channels, kChannels input channels. Its vectors share cache lines.
  constexpr std::int64_t kChannels = 16;
  const std::int64_t parts = ceil_div(ic, kChannels);
  const auto pack_unit = [&](std::int64_t group, std::int64_t first) {
    const std::int64_t end = std::min(padded_oc, (group + 1) * kernel.channels);
    for (std::int64_t channel = group * kernel.channels; channel < end; channel += width) {
      kernel.weights(weights, channel, first, std::min(ic, first + kChannels), padded_oc, u);
    }
  };
  parallel_units(ceil_div(padded_oc, kernel.channels) * parts,
                 kernel.position_weights * kChannels * kernel.channels,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t unit = begin; unit < end; ++unit) {
                     pack_unit(unit / parts, unit % parts * kChannels);
                   }
                 });
}

}  // namespace

std::int64_t packed_winograd_floats(const Winograd& kernel, const Problem& p) {
  return group_bundles(p).count *
         winograd_u_size(kernel, winograd_shape(winograd_bundle(p), kernel.taps));
}

at::Tensor pack_winograd(const Winograd& kernel, const Problem& p, const at::Tensor& narrow) {
  const at::Tensor weight = narrow.to(at::kFloat);
  const Problem q = winograd_bundle(p);
  const std::int64_t count = group_bundles(p).count, all = packed_winograd_floats(kernel, p),
                     floats = all / count;
  const at::Tensor packed = empty_packed(all, weight.scalar_type());
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(narrow.nbytes() + packed.nbytes()));
  float* u = packed.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < count; ++i) {
    pack_bundle(kernel, q, weight_of_bundle(p, weight, i), u + i * floats);
  }
  return packed;
}

}  // namespace torch_blocked
