// The sizes and types of an op's results, from those of its arguments: a table of rules by op.
//
// Meta tensors give the same answers. But many of PyTorch's meta kernels, such as convolution and
// sums, are in Python: the first call imports sympy and 400 modules, 70 MiB and 0.7 s. Meta tensors
// serve ops without a rule, arguments that a rule does not expect, and all errors.
#include <ATen/native/TypeProperties.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string_view>

#include "graph/call_arguments.h"
#include "graph/passes/rules.h"
#include "ops/window.h"

namespace torch_blocked::graph {
namespace {

// ---- results with the sizes of their arguments --------------------------------------------------

Metas same(const Call& call) { return {call.floating(0)}; }

// (input, dim, dtype), only without `dtype`.
Metas softmax(const Call& call) {
  require(call.is_none(2));
  wrap(call.integer(1), call.tensor(0).dims.size());
  return {call.floating(0)};
}

Dims broadcast(const Dims& a, const Dims& b) {
  Dims dims = a.size() < b.size() ? b : a;
  const Dims& shorter = a.size() < b.size() ? a : b;
  const std::size_t offset = dims.size() - shorter.size();
  for (std::size_t i = 0; i < shorter.size(); ++i) {
    std::int64_t& size = dims[offset + i];
    require(size == shorter[i] || size == 1 || shorter[i] == 1);
    if (size == 1) size = shorter[i];
  }
  return dims;
}

// Tensors with dims decide the dtype before tensors without dims, and these before numbers. Source:
// at::result_type.
Metas pointwise(const Call& call) {
  at::native::ResultTypeState types{};
  const auto join = [](at::ScalarType& type, at::ScalarType other) {
    type = type == at::ScalarType::Undefined ? other : c10::promoteTypes(type, other);
  };
  Dims dims;
  for (const std::size_t i : {0, 1}) {
    if (call.is_tensor(i)) {
      const Meta& meta = call.tensor(i);
      join(meta.dims.empty() ? types.zeroResult : types.dimResult, meta.dtype);
      dims = broadcast(dims, meta.dims);
    } else {
      require(call.constant(i).isScalar());
      const at::ScalarType type = call.constant(i).toScalar().type();
      join(types.wrappedResult,
           type == at::kDouble ? c10::get_default_dtype_as_scalartype() : type);
    }
  }
  const at::ScalarType dtype = at::native::result_type(types);
  require(c10::isFloatingType(dtype) || dtype == at::kLong || dtype == at::kInt);
  return {{dims, dtype}};
}

// Division of integers gives floats.
Metas true_divide(const Call& call) {
  Metas result = pointwise(call);
  require(c10::isFloatingType(result[0].dtype));
  return result;
}

// ---- convolutions and windows -------------------------------------------------------------------

// The number of spatial dims, from a name such as "max_pool2d". Kernels rely on it.
std::size_t spatial_of(std::string_view name) { return std::size_t(name[name.size() - 2] - '0'); }

// Images with that many spatial dims, with N or without. Only N may be 0.
bool are_images(const Meta& meta, std::size_t spatial) {
  const std::size_t rank = meta.dims.size();
  return (rank == 1 + spatial || rank == 2 + spatial) &&
         std::all_of(meta.dims.end() - std::ssize(meta.dims) + (rank == 2 + spatial),
                     meta.dims.end(), [](std::int64_t size) { return size > 0; });
}

// A bias of `count` values, or none.
void check_bias(const Call& call, std::size_t i, std::int64_t count, at::ScalarType dtype) {
  if (call.is_none(i)) return;
  require(call.tensor(i).dims == Dims{count} && call.tensor(i).dtype == dtype);
}

// Weights are [OC, IC / groups, *kernel], and [IC, OC / groups, *kernel] if transposed.
Metas convolution(const Call& call) {
  const ConvolutionOp& op = *convolution_op(call.name());
  const Meta &src = call.floating(0), &weight = call.tensor(1);
  const std::size_t rank = 2 + spatial_of(call.name());
  require(src.dims.size() == rank && weight.dims.size() == rank && weight.dtype == src.dtype);
  const auto list = [&](std::int64_t i) {
    return i < 0 ? Dims(rank - 2, 0) : call.list(static_cast<std::size_t>(i), rank - 2);
  };
  const Dims stride = list(op.stride), padding = list(op.padding), dilation = list(op.dilation),
             output_padding = list(op.output_padding);
  const std::int64_t groups = call.integer(static_cast<std::size_t>(op.groups));
  require(groups > 0 && weight.dims[0] > 0 && weight.dims[0] % groups == 0);
  std::int64_t inputs = weight.dims[1] * groups, outputs = weight.dims[0];
  if (op.transposed) std::swap(inputs, outputs);
  require(src.dims[1] == inputs && outputs > 0);
  check_bias(call, 2, outputs, src.dtype);
  if (inputs == 0) outputs = 0;  // ATen's result for no channels, whatever the weight
  Meta dst = src;
  dst.dims[1] = outputs;
  for (std::size_t i = 0; i + 2 < rank; ++i) {
    std::int64_t& size = dst.dims[2 + i];
    const Window window{weight.dims[2 + i], stride[i], padding[i], dilation[i]};
    require(window.kernel > 0 && stride[i] > 0 && padding[i] >= 0 && dilation[i] > 0);
    require(0 <= output_padding[i]);
    require(!op.transposed || output_padding[i] < std::max(stride[i], dilation[i]));
    size = op.transposed ? window.transposed(size, output_padding[i]) : window.count(size);
    require(size > 0);
  }
  return {dst};
}

// (input, kernel, stride, padding, ...). Channels stand before the spatial dims, and perhaps N.
Metas pooling(const Call& call) {
  const PoolingOp& op = *pooling_op(call.name());
  const std::size_t spatial = spatial_of(op.name);
  Meta dst = call.floating(0);
  require(are_images(dst, spatial));
  const auto list = [&](std::int64_t i) { return call.list(static_cast<std::size_t>(i), spatial); };
  const Dims kernel = list(1), padding = list(3),
             dilation = op.dilation < 0 ? Dims(spatial, 1) : list(op.dilation);
  const Dims stride = call.list(2).empty() ? kernel : list(2);
  const bool ceil_mode = call.flag(static_cast<std::size_t>(op.ceil_mode));
  for (std::size_t i = 0; i < spatial; ++i) {
    std::int64_t& size = dst.dims[dst.dims.size() - spatial + i];
    const Window window{kernel[i], stride[i], padding[i], dilation[i]};
    require(kernel[i] > 0 && stride[i] > 0 && padding[i] >= 0 && dilation[i] > 0);
    require(2 * padding[i] <= window.reach() && kernel[i] <= size);  // ATen's 3-D means need this
    size = ceil_mode ? window.count_cut(size) : window.count(size);
    require(size > 0);
  }
  return {dst};
}

Metas with_spatial(Meta dst, const Dims& spatial) {
  require(are_images(dst, spatial.size()));
  require(std::ranges::all_of(spatial, [](std::int64_t size) { return size > 0; }));
  std::ranges::copy(spatial, dst.dims.end() - std::ssize(spatial));
  return {dst};
}

Metas adaptive_pooling(const Call& call) {
  require(call.list(1).size() == spatial_of(call.name()));
  return with_spatial(call.floating(0), call.list(1));
}

// (input, output_size or none, ..., scale factors or none).
Metas resampling(const Call& call) {
  const Meta& src = call.floating(0);
  const std::size_t spatial = spatial_of(call.name());
  require(src.dims.size() == 2 + spatial);
  const std::size_t factors = call.count() - 1;
  if (!call.is_none(1)) {
    require(call.is_none(factors) && call.list(1).size() == spatial);
    return with_spatial(src, call.list(1));
  }
  const std::vector<double> scales = call.numbers(factors);
  require(scales.size() == spatial);
  Dims dims(spatial);
  for (std::size_t i = 0; i < spatial; ++i) {
    const double size = static_cast<double>(src.dims[2 + i]) * scales[i];
    require(0 <= size && size <= static_cast<double>(kMost));
    dims[i] = static_cast<std::int64_t>(size);
  }
  return with_spatial(src, dims);
}

// (input, pads of the last dim first, mode if it is "pad", value). Modes other than "constant" need
// images, and read each pixel once at most for a pad.
Metas padding(const Call& call) {
  Meta dst = call.floating(0);
  const Dims pads = call.list(1);
  require(pads.size() % 2 == 0 && pads.size() / 2 <= dst.dims.size());
  const bool constant = call.name().ends_with("constant_pad_nd") || call.text(2) == "constant";
  require(constant || (call.is_none(3) && are_images(dst, pads.size() / 2)));
  for (std::size_t i = 0; i < pads.size() / 2; ++i) {
    std::int64_t& size = dst.dims[dst.dims.size() - 1 - i];
    for (const std::int64_t pad : {pads[2 * i], pads[2 * i + 1]}) {
      require(constant ? pad > -size : 0 <= pad && pad < size);
    }
    size += pads[2 * i] + pads[2 * i + 1];
    require(size > 0);
  }
  return {dst};
}

// (input, factor): [N, C f^2, H, W] -> [N, C, H f, W f].
Metas pixel_shuffle(const Call& call) {
  Meta dst = call.floating(0);
  const std::int64_t factor = call.integer(1);
  require(dst.dims.size() == 4 && factor > 0 && factor <= dst.dims[1]);
  require(dst.dims[1] % factor == 0 && dst.dims[1] / factor % factor == 0);  // no square overflows
  Dims& dims = dst.dims;
  dims = {dims[0], dims[1] / factor / factor, dims[2] * factor, dims[3] * factor};
  return {dst};
}

// (input [..., I], weight [O, I], bias).
Metas linear(const Call& call) {
  Meta dst = call.floating(0);
  const Meta& weight = call.tensor(1);
  require(weight.dims.size() == 2 && weight.dtype == dst.dtype && !dst.dims.empty());
  require(dst.dims.back() == weight.dims[1]);
  check_bias(call, 2, weight.dims[0], dst.dtype);
  dst.dims.back() = weight.dims[0];
  return {dst};
}

// [..., M, K] x [..., K, N] -> [..., M, N].
Metas matmul(const Call& call) {
  const Meta &a = call.floating(0), &b = call.tensor(1);
  const std::size_t rank_a = a.dims.size(), rank_b = b.dims.size();
  require(rank_a >= 2 && rank_b >= 2 && a.dtype == b.dtype);
  require(a.dims[rank_a - 1] == b.dims[rank_b - 2]);
  Dims dims = broadcast({a.dims.begin(), a.dims.end() - 2}, {b.dims.begin(), b.dims.end() - 2});
  dims.insert(dims.end(), {a.dims[rank_a - 2], b.dims[rank_b - 1]});
  return {{dims, a.dtype}};
}

// (query [..., L, E], key [..., S, E], value [..., S, V], ...) -> [..., L, V].
Metas attention(const Call& call) {
  Meta dst = call.floating(0);
  const Meta &key = call.tensor(1), &value = call.tensor(2);
  const std::size_t rank = dst.dims.size();
  require(rank >= 3 && key.dims.size() == rank && value.dims.size() == rank);
  require(key.dtype == dst.dtype && value.dtype == dst.dtype);
  require(std::equal(dst.dims.begin(), dst.dims.end() - 2, key.dims.begin()));
  require(std::equal(key.dims.begin(), key.dims.end() - 1, value.dims.begin()));
  require(key.dims.back() == dst.dims.back());
  dst.dims.back() = value.dims.back();
  return {dst};
}

Metas concat(const Call& call) {
  const Metas srcs = call.tensors(0);
  Meta dst = srcs[0];
  const std::size_t dim = wrap(call.integer(1), dst.dims.size());
  dst.dims[dim] = 0;
  for (const Meta& src : srcs) {
    require(src.dtype == dst.dtype && src.dims.size() == dst.dims.size());
    for (std::size_t i = 0; i < dst.dims.size(); ++i) {
      require(i == dim || src.dims[i] == dst.dims[i]);
    }
    dst.dims[dim] += src.dims[dim];
  }
  return {dst};
}

Metas stack(const Call& call) {
  const Metas srcs = call.tensors(0);
  Meta dst = srcs[0];
  for (const Meta& src : srcs) require(src.dtype == dst.dtype && src.dims == dst.dims);
  const std::size_t dim = wrap(call.integer(1), dst.dims.size() + 1);
  dst.dims.insert(dst.dims.begin() + static_cast<std::ptrdiff_t>(dim), std::ssize(srcs));
  return {dst};
}

// Whether each dim is named; none may be named twice.
std::vector<bool> named_once(const Dims& dims, std::size_t rank) {
  std::vector<bool> named(rank, false);
  for (const std::int64_t dim : dims) {
    require(!named[wrap(dim, rank)]);
    named[wrap(dim, rank)] = true;
  }
  return named;
}

// (input, dims or none for all, keepdim, ...).
Metas reduction(const Call& call) {
  const Meta& src = call.floating(0);
  const std::size_t rank = src.dims.size();
  std::vector<bool> reduced(rank, true);
  const Dims given = call.is_none(1) ? Dims{} : call.list(1);
  if (!given.empty()) reduced = named_once(given, rank);
  Meta dst{{}, src.dtype};
  for (std::size_t i = 0; i < rank; ++i) {
    if (!reduced[i]) dst.dims.push_back(src.dims[i]);
    if (reduced[i] && call.flag(2)) dst.dims.push_back(1);
  }
  return {dst};
}

// The same for ops with the result's dtype as the next argument, which must be none.
Metas reduction_with_dtype(const Call& call) {
  require(call.is_none(3));
  return reduction(call);
}

// No values have no extreme.
Metas extremes(const Call& call) {
  require(std::ranges::find(call.tensor(0).dims, 0) == call.tensor(0).dims.end());
  return reduction(call);
}

// ---- views --------------------------------------------------------------------------------------

// (input, dims with at most one -1).
Metas view(const Call& call) {
  Meta dst = call.tensor(0);
  const std::int64_t count = c10::multiply_integers(dst.dims);
  dst.dims = call.list(1);
  const auto free = std::ranges::find(dst.dims, -1);
  if (free != dst.dims.end()) {
    *free = 1;
    require_small(dst.dims);
    const std::int64_t others = c10::multiply_integers(dst.dims);
    require(others > 0 && count % others == 0);
    *free = count / others;
  }
  require_small(dst.dims);
  require(c10::multiply_integers(dst.dims) == count);
  return {dst};
}

// (input, first, last).
Metas flatten(const Call& call) {
  Meta dst = call.tensor(0);
  require(!dst.dims.empty());
  const auto first = static_cast<std::ptrdiff_t>(wrap(call.integer(1), dst.dims.size()));
  const auto last = static_cast<std::ptrdiff_t>(wrap(call.integer(2), dst.dims.size()));
  require(first <= last);
  const auto begin = dst.dims.begin() + first, end = dst.dims.begin() + last + 1;
  *begin = std::accumulate(begin, end, std::int64_t{1}, std::multiplies{});
  dst.dims.erase(begin + 1, end);
  return {dst};
}

Metas permute(const Call& call) {
  const Meta& src = call.tensor(0);
  const Dims order = call.list(1, src.dims.size());
  Meta dst{{}, src.dtype};
  std::set<std::size_t> taken;
  for (const std::int64_t dim : order) {
    require(taken.insert(wrap(dim, src.dims.size())).second);
    dst.dims.push_back(src.dims[wrap(dim, src.dims.size())]);
  }
  return {dst};
}

Metas transpose(const Call& call) {
  Meta dst = call.tensor(0);
  const std::size_t rank = dst.dims.size();
  std::swap(dst.dims[wrap(call.integer(1), rank)], dst.dims[wrap(call.integer(2), rank)]);
  return {dst};
}

Metas unsqueeze(const Call& call) {
  Meta dst = call.tensor(0);
  const std::size_t dim = wrap(call.integer(1), dst.dims.size() + 1);
  dst.dims.insert(dst.dims.begin() + static_cast<std::ptrdiff_t>(dim), 1);
  return {dst};
}

// (input, a dim or several): removes those of size 1.
Metas squeeze(const Call& call) {
  const Meta& src = call.tensor(0);
  const std::vector<bool> named = named_once(call.list(1), src.dims.size());
  Meta dst{{}, src.dtype};
  for (std::size_t i = 0; i < named.size(); ++i) {
    if (!named[i] || src.dims[i] != 1) dst.dims.push_back(src.dims[i]);
  }
  return {dst};
}

// (input, dims): -1 keeps a size. Other sizes must be equal, or expand a dim of size 1.
Metas expand(const Call& call) {
  Meta dst = call.tensor(0);
  const Dims wanted = call.list(1);
  require(wanted.size() >= dst.dims.size());
  const std::size_t added = wanted.size() - dst.dims.size();
  dst.dims.insert(dst.dims.begin(), added, 1);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] == -1 && i >= added) continue;
    require(wanted[i] >= 0 && (dst.dims[i] == wanted[i] || dst.dims[i] == 1));
    dst.dims[i] = wanted[i];
  }
  return {dst};
}

// (input, dim, index).
Metas select(const Call& call) {
  Meta dst = call.tensor(0);
  const std::size_t dim = wrap(call.integer(1), dst.dims.size());
  wrap(call.integer(2), static_cast<std::size_t>(dst.dims[dim]));
  dst.dims.erase(dst.dims.begin() + static_cast<std::ptrdiff_t>(dim));
  return {dst};
}

// (input, dim, begin or none, end or none, step).
Metas slice(const Call& call) {
  Meta dst = call.tensor(0);
  std::int64_t& size = dst.dims[wrap(call.integer(1), dst.dims.size())];
  const auto bound = [&](std::size_t i, std::int64_t missing) {
    const std::int64_t given = call.is_none(i) ? missing : call.unbounded(i);
    return std::clamp(given < 0 ? given + size : given, std::int64_t{0}, size);
  };
  const std::int64_t begin = bound(2, 0), end = bound(3, size), step = call.integer(4);
  require(step > 0);
  size = (std::max(end - begin, std::int64_t{0}) + step - 1) / step;
  return {dst};
}

// Parts of at most `length` along a dim.
Metas parts(const Call& call, std::size_t dim, std::int64_t length) {
  const Meta& src = call.tensor(0);
  require(length > 0 && src.dims[dim] > 0);
  require((src.dims[dim] + length - 1) / length == call.results());  // a file may want 2^31
  Metas result;
  for (std::int64_t left = src.dims[dim]; left > 0; left -= length) {
    result.push_back(src);
    result.back().dims[dim] = std::min(left, length);
  }
  return result;
}

// (input, how many, dim).
Metas chunk(const Call& call) {
  const Meta& src = call.tensor(0);
  const std::size_t dim = wrap(call.integer(2), src.dims.size());
  const std::int64_t count = call.integer(1);
  require(count > 0);
  return parts(call, dim, (src.dims[dim] + count - 1) / count);
}

// (input, length, dim).
Metas split(const Call& call) {
  return parts(call, wrap(call.integer(2), call.tensor(0).dims.size()), call.integer(1));
}

// (input, lengths, dim).
Metas split_with_sizes(const Call& call) {
  const Meta& src = call.tensor(0);
  const std::size_t dim = wrap(call.integer(2), src.dims.size());
  const Dims lengths = call.list(1);
  require(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) == src.dims[dim]);
  Metas result;
  for (const std::int64_t length : lengths) {
    require(length >= 0);
    result.push_back(src);
    result.back().dims[dim] = length;
  }
  return result;
}

// Quantized meta tensors do not exist: their kernels raise errors or return floats.
template <std::size_t dtype>
Metas quantize(const Call& call) {
  const std::int64_t type = call.integer(dtype);
  require(0 <= type && type < std::int64_t(at::ScalarType::NumOptions));
  require(c10::isQIntType(static_cast<at::ScalarType>(type)));
  return {{call.floating(0).dims, static_cast<at::ScalarType>(type)}};
}

Metas dequantize(const Call& call) {
  require(c10::isQIntType(call.tensor(0).dtype));
  return {{call.tensor(0).dims, at::kFloat}};
}

// ---- the table ----------------------------------------------------------------------------------

using Rule = Metas (*)(const Call& call);

// Ops without overload, other than pointwise ones, whose result is like their first argument.
constexpr auto kSame = std::to_array<std::string_view>(
    {"log", "rsqrt", "clamp_max", "dropout", "feature_dropout", "alpha_dropout", "detach",
     "contiguous", "clone", "batch_norm", "instance_norm", "group_norm", "layer_norm", "prelu",
     "_prelu_kernel"});

// All other ops, as "op.overload".
struct Row {
  Rule rule;
  std::vector<std::string_view> ops;
};
const std::vector<Row>& rows() {
  static const std::vector<Row> rows{
      {softmax, {"softmax.int", "log_softmax.int"}},
      {pointwise,
       {"add.Tensor", "sub.Tensor", "mul.Tensor", "add.Scalar", "sub.Scalar", "mul.Scalar",
        "maximum.", "minimum."}},
      {true_divide, {"div.Tensor", "div.Scalar"}},
      {convolution,
       {"conv1d.", "conv2d.", "conv3d.", "conv_transpose1d.", "conv_transpose2d.input",
        "conv_transpose3d.input"}},
      {pooling,
       {"max_pool1d.", "max_pool2d.", "max_pool3d.", "avg_pool1d.", "avg_pool2d.", "avg_pool3d."}},
      {adaptive_pooling, {"adaptive_avg_pool1d.", "adaptive_avg_pool2d.", "adaptive_avg_pool3d."}},
      {resampling,
       {"upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec",
        "_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec",
        "_upsample_nearest_exact3d.vec", "upsample_linear1d.vec", "upsample_bilinear2d.vec",
        "upsample_trilinear3d.vec", "upsample_bicubic2d.vec"}},
      {padding, {"pad.", "constant_pad_nd."}},
      {pixel_shuffle, {"pixel_shuffle."}},
      {linear, {"linear."}},
      {matmul, {"matmul."}},
      {attention, {"scaled_dot_product_attention."}},
      {concat, {"cat."}},
      {stack, {"stack."}},
      {reduction_with_dtype, {"mean.dim", "sum.dim_IntList"}},
      {extremes, {"amax.", "amin."}},
      {view, {"view.", "reshape."}},
      {flatten, {"flatten.using_ints"}},
      {permute, {"permute."}},
      {transpose, {"transpose.int"}},
      {unsqueeze, {"unsqueeze."}},
      {squeeze, {"squeeze.dim", "squeeze.dims"}},
      {expand, {"expand."}},
      {select, {"select.int"}},
      {slice, {"slice.Tensor"}},
      {chunk, {"chunk."}},
      {split, {"split.Tensor"}},
      {split_with_sizes, {"split_with_sizes."}},
      {quantize<1>, {"quantize_per_tensor_dynamic."}},
      {quantize<3>, {"quantize_per_tensor.", "quantize_per_tensor.tensor_qparams"}},
      {quantize<4>, {"quantize_per_channel."}},
      {dequantize, {"dequantize.self"}},
  };
  return rows;
}

// The rule of an op, such as "relu" with overload "".
Rule rule_of(std::string_view name, std::string_view overload) {
  const bool is_same = is_pointwise(name) || std::ranges::find(kSame, name) != kSame.end();
  if (overload.empty() && is_same) return same;
  const std::string op = std::string(name) + "." + std::string(overload);
  for (const Row& row : rows()) {
    if (std::ranges::find(row.ops, op) != row.ops.end()) return row.rule;
  }
  return nullptr;
}

}  // namespace

std::optional<std::vector<Meta>> known_results(const Node& node, const std::vector<Meta>& metas) {
  constexpr std::string_view kAten = "aten::";
  if (!node.name.starts_with(kAten)) return results_of_quantizer(node, metas);
  const Rule rule = rule_of(std::string_view(node.name).substr(kAten.size()), node.overload);
  if (!rule) {
    Node other = node;
    return respell(other, metas) ? known_results(other, metas) : std::nullopt;
  }
  try {
    Metas results = rule(Call(node, metas));
    for (const Meta& result : results) require_small(result.dims);
    return results.size() == node.outputs.size() ? std::optional(results) : std::nullopt;
  } catch (const NotKnown&) {
    return std::nullopt;
  }
}

}  // namespace torch_blocked::graph
