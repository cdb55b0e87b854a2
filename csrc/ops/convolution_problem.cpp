// Checks the arguments of a convolution and derives its sizes and its key.
#include "ops/convolution_problem.h"

#include <bit>
#include <limits>
#include <numeric>

#include "format/errors.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// The largest size or step. oneDNN counts in 32 bits in places, and products of two such numbers
// still fit 64 bits.
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

// One of the arguments for which ATen allows a single number for all spatial dims.
Dims per_dim(const char* name, at::IntArrayRef values, std::size_t spatial, std::int64_t least) {
  if (values.size() != 1 && values.size() != spatial) {
    fail_value("convolution", text(name, " with 1 or ", spatial, " values"), text(values), "");
  }
  if (std::ranges::any_of(values, [&](std::int64_t value) { return value < least; })) {
    fail_value("convolution", text(name, " >= ", least), text(values), "");
  }
  if (std::ranges::any_of(values, [&](std::int64_t value) { return value > kMost; })) {
    fail_value("convolution", text(name, " <= ", kMost), text(values), "");
  }
  return values.size() == 1 ? Dims(spatial, values[0]) : values.vec();
}

void check_sizes(const Problem& p) {
  const auto large = [](std::int64_t size) { return size > kMost; };
  if (std::ranges::any_of(p.src_dims, large) || std::ranges::any_of(p.weight_dims, large) ||
      p.groups > kMost) {
    fail_value("convolution", text("sizes and groups <= ", kMost),
               text("weight ", p.weight_dims, " in ", p.groups, " groups on ", p.src_dims), "");
  }
}

void check_weight(const Problem& p, const at::Tensor& bias) {
  const std::size_t ndims = p.src_dims.size();
  if (p.weight_dims.size() != ndims) {
    fail_value("convolution", text("a weight with ", ndims, " dims"), text(p.weight_dims), "");
  }
  if (p.groups < 1) fail_value("convolution", "groups >= 1", text(p.groups), "");
  if (std::ranges::count(p.weight_dims, 0) > 0) {
    fail_value("convolution", "a weight without zero dims", text(p.weight_dims),
               "its result has no defined value");
  }
  const std::int64_t channels = p.transposed ? p.weight_dims[0] : p.weight_dims[1] * p.groups;
  if (channels != p.src_dims[1] || p.weight_dims[0] % p.groups != 0) {
    fail_value("convolution",
               text("a weight for ", p.src_dims[1], " input channels in ", p.groups, " groups"),
               text(p.weight_dims), "");
  }
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != p.dst_dims[1])) {
    fail_value("convolution", text("a bias of size [", p.dst_dims[1], "]"), text(bias.sizes()), "");
  }
}

Dims output_dims(const Problem& p) {
  Dims dims{p.src_dims[0], p.transposed ? p.weight_dims[1] * p.groups : p.weight_dims[0]};
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    const std::int64_t in = p.src_dims[2 + i];
    const std::int64_t out =
        p.transposed ? p.window(i).transposed(in, p.output_padding[i]) : p.window(i).count(in);
    if (out < 1 || in < 1) {
      fail_value("convolution", "a kernel that fits the padded input",
                 text("kernel ", p.weight_dims, " on input ", p.src_dims),
                 "pad more or use a smaller kernel");
    }
    if (p.transposed && p.output_padding[i] >= std::max(p.stride[i], p.dilation[i])) {
      fail_value("convolution", "output_padding below stride or dilation", text(p.output_padding),
                 "");
    }
    dims.push_back(out);
  }
  return dims;
}

}  // namespace

ConvolutionProblem convolution_problem(at::IntArrayRef src_dims, Format format,
                                       const at::Tensor& weight, const at::Tensor& bias,
                                       at::IntArrayRef stride, at::IntArrayRef padding,
                                       at::IntArrayRef dilation, bool transposed,
                                       at::IntArrayRef output_padding, std::int64_t groups) {
  const std::size_t spatial = src_dims.size() - 2;
  Problem p{.src_dims = src_dims.vec(),
            .dst_dims = {},
            .weight_dims = weight.sizes().vec(),
            .stride = per_dim("stride", stride, spatial, 1),
            .padding = per_dim("padding", padding, spatial, 0),
            .dilation = per_dim("dilation", dilation, spatial, 1),
            .output_padding = per_dim("output_padding", output_padding, spatial, 0),
            .groups = groups,
            .src_format = format,
            .dst_format = format,
            .transposed = transposed,
            .has_bias = bias.defined(),
            .dtype = weight.scalar_type()};
  check_sizes(p);
  if (p.weight_dims.size() >= 2)
    p.dst_dims = {0, transposed ? p.weight_dims[1] * groups : p.weight_dims[0]};
  check_weight(p, bias);
  p.dst_dims = output_dims(p);
  return p;
}

GroupBundles group_bundles(const Problem& p) {
  if (p.groups == 1) return {1, 1};
  const auto filling = [&](std::int64_t channels) {
    return p.dst_format.block / std::gcd(channels / p.groups, p.dst_format.block);
  };
  const std::int64_t groups = std::lcm(filling(p.src_dims[1]), filling(p.dst_dims[1]));
  return {p.groups % groups == 0 ? p.groups / groups : 0, groups};
}

SpatialSizes spatial_sizes(const Problem& p) {
  const auto spatial = [](const Dims& dims) { return as_3d(at::IntArrayRef(dims).slice(2), 1); };
  return {.in = spatial(p.src_dims),
          .out = spatial(p.dst_dims),
          .kernel = spatial(p.weight_dims),
          .stride = as_3d(p.stride, 1),
          .padding = as_3d(p.padding, 0),
          .dilation = as_3d(p.dilation, 1)};
}

Key convolution_key(const char* name, const Problem& p) {
  Key key(name);
  for (const Dims* dims :
       {&p.src_dims, &p.weight_dims, &p.stride, &p.padding, &p.dilation, &p.output_padding}) {
    key.add(*dims);
  }
  key.add(p.groups).add(p.src_format).add(p.dst_format).add(p.transposed).add(p.has_bias);
  for (const Activation* activation : {&p.epilogue.before, &p.epilogue.after}) {
    key.add(static_cast<std::int64_t>(activation->kind));
    key.add(std::bit_cast<std::int32_t>(activation->alpha));
    key.add(std::bit_cast<std::int32_t>(activation->beta));
  }
  key.add(p.epilogue.residual);
  key.add(static_cast<std::int64_t>(p.dtype));
  return key;
}

}  // namespace torch_blocked
