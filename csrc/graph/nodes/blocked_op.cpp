// Ops that keep a blocked tensor blocked, run as BlockedTensor runs them. In plain formats ATen's
// op runs. ATen has no op for local response norms: they are found as the ops that they consist of,
// and work on a blocked copy of a plain image.
//
// Softmax and reductions over the channels are not here: ATen's plain kernels are faster than the
// blocked ones by more than the reorders around them cost.
#include <ATen/ops/_prelu_kernel.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/sum.h>

#include <array>

#include "graph/nodes/boxed.h"
#include "graph/nodes/form.h"
#include "graph/passes/rules.h"
#include "graph/planning/planner.h"
#include "ops/blocked_forms.h"
#include "ops/normalization/channel_sums.h"
#include "ops/normalization/group_norm.h"
#include "ops/normalization/normalization.h"
#include "ops/registered.h"
#include "runtime/isa.h"

namespace torch_blocked::graph {
namespace {

// What an op reads in a run: its first argument in a blocked format, the others as they are.
struct Arguments {
  const Step& step;
  const std::vector<at::Tensor>& tensors;
  const at::Tensor& physical;
  std::int64_t channels;  // of the first argument

  const Argument& argument(std::size_t i) const { return step.node->arguments[i]; }
  std::int64_t block() const { return physical.size(-1); }
  // A parameter, which may be none.
  std::optional<at::Tensor> tensor(std::size_t i) const {
    const Value value = step.node->read(i);
    if (value == kNone) return std::nullopt;
    return tensors[step.reads.at(value)].resolve_neg();
  }
  std::int64_t integer(std::size_t i) const { return argument(i).constant().toInt(); }
  bool flag(std::size_t i) const { return argument(i).constant().toBool(); }
};

// Computes physical dst from physical src. Threads go through it together.
using Ready = std::function<void(const void* src, void* dst)>;

bool is_integer(const Argument& argument) {
  return argument.is_constant() && argument.constant().isInt();
}

const Dims& src_dims(const Candidate& candidate) {
  return candidate.meta(candidate.node.read(0)).dims;
}

// Whether an argument is none, or a tensor of float32 and these dims.
bool is_parameter(const Candidate& candidate, std::size_t i, const Dims& dims) {
  const Argument& argument = candidate.node.arguments[i];
  if (argument.value() == kNone) return is_none(argument);
  const Meta& meta = candidate.meta(argument.value());
  return meta.dims == dims && (meta.dtype == at::kFloat || meta.dtype == candidate.result().dtype);
}

// ---- norms --------------------------------------------------------------------------------------

// (input, groups, weight, bias, eps, ...)
bool group_norm_fits(const Candidate& candidate) {
  const Argument& groups = candidate.node.arguments[1];
  const std::int64_t channels = src_dims(candidate)[1];
  return is_integer(groups) && groups.constant().toInt() > 0 &&
         channels % groups.constant().toInt() == 0 && is_parameter(candidate, 2, {channels}) &&
         is_parameter(candidate, 3, {channels});
}

Ready ready_group_norm(const Arguments& a, const SlotPlan& src) {
  const double eps = number(a.argument(4), 1e-5);
  return GroupNorm({src.dims, src.format.block, src.dtype, a.integer(1), eps}, a.tensor(2),
                   a.tensor(3));
}

at::Tensor run_group_norm(const Arguments& a) {
  return std::get<0>(group_norm(a.physical, a.channels, a.tensor(2), a.tensor(3), a.integer(1),
                                number(a.argument(4), 1e-5)));
}

// (input, weight, bias, running mean, running variance, use input stats, momentum, eps, ...): each
// channel is a group.
bool instance_norm_fits(const Candidate& candidate) {
  const auto& arguments = candidate.node.arguments;
  const Dims channels{src_dims(candidate)[1]};
  return arguments[5].constant().toBool() && is_none(arguments[3]) && is_none(arguments[4]) &&
         is_parameter(candidate, 1, channels) && is_parameter(candidate, 2, channels);
}

Ready ready_instance_norm(const Arguments& a, const SlotPlan& src) {
  const double eps = number(a.argument(7), 1e-5);
  return GroupNorm({src.dims, src.format.block, src.dtype, src.dims[1], eps}, a.tensor(1),
                   a.tensor(2));
}

at::Tensor run_instance_norm(const Arguments& a) {
  return std::get<0>(group_norm(a.physical, a.channels, a.tensor(1), a.tensor(2), a.channels,
                                number(a.argument(7), 1e-5)));
}

// (input, normalized dims, weight, bias, eps, ...): over C and all pixels, as one group.
bool layer_norm_fits(const Candidate& candidate) {
  const Dims& dims = src_dims(candidate);
  const Dims of_image(dims.begin() + 1, dims.end());
  return integers(candidate.node.arguments[1], 1) == of_image &&
         is_parameter(candidate, 2, of_image) && is_parameter(candidate, 3, of_image);
}

at::Tensor run_layer_norm(const Arguments& a) {
  at::Tensor dst = std::get<0>(group_norm(a.physical, a.channels, std::nullopt, std::nullopt, 1,
                                          number(a.argument(4), 1e-5)));
  const auto blocked = [&](const at::Tensor& parameter) {
    return to_blocked(parameter.unsqueeze(0), a.block(), std::nullopt);
  };
  if (const auto weight = a.tensor(2)) dst.mul_(blocked(*weight));
  if (const auto bias = a.tensor(3)) dst.add_(blocked(*bias));
  return dst;
}

// ---- local response norms -----------------------------------------------------------------------

// src / (k + alpha * the mean of squares over `size` channels)^beta.
struct ResponseNorm {
  Value src;
  std::int64_t size;
  double alpha, beta, k;
};

// Walks from a quotient back to the tensor that it normalizes, node by node.
class ResponseNormWalk {
 public:
  ResponseNormWalk(const Uses& uses, const std::vector<Meta>& metas) : uses_(uses), metas_(metas) {}

  // The response norm that a quotient or a product computes; nothing if it computes something else.
  std::optional<ResponseNorm> find(const Node& node) {
    if (node.name == "aten::div") return find(node.read(0), node.read(1), 1);
    const auto found = find(node.read(0), node.read(1), -1);
    return found ? found : find(node.read(1), node.read(0), -1);
  }

 private:
  // src / divisor^sign.
  std::optional<ResponseNorm> find(Value src, Value divisor, double sign) {
    if (src == kNone || divisor == kNone) return std::nullopt;
    at_ = divisor;
    ResponseNorm found{.src = src, .size = 0, .alpha = 1, .beta = sign, .k = 0};
    if (const Node* node = maker(); node && exponent_of(*node)) {
      found.beta *= *exponent_of(*node);
      at_ = node->read(0);
    }
    skip_scaling(found);
    if (!take_windows(found, dims_of(src)) || !take_square()) return std::nullopt;
    skip_views();
    return at_ == src ? std::optional(found) : std::nullopt;
  }

  const Node* maker() const { return at_ == kNone ? nullptr : uses_.maker[Uses::at(at_)]; }
  const Dims& dims_of(Value value) const { return metas_[Uses::at(value)].dims; }

  static std::optional<double> exponent_of(const Node& node) {
    if (node.name == "aten::sqrt") return 0.5;
    if (node.name == "aten::rsqrt") return -0.5;
    if (node.name != "aten::pow" || node.overload != "Tensor_Scalar") return std::nullopt;
    return number(node.arguments[1], 1);
  }

  // Whether the node's result has the elements of its argument in the same order.
  bool is_view(const Node& node) const {
    const bool drops_dims = is_any(node, {"aten::unsqueeze", "aten::squeeze", "aten::select"});
    return node.read(0) != kNone && (is_reshape(node) || drops_dims) &&
           c10::multiply_integers(dims_of(node.output())) ==
               c10::multiply_integers(dims_of(node.read(0)));
  }

  void skip_views() {
    for (const Node* node = maker(); node && is_view(*node); node = maker()) at_ = node->read(0);
  }

  // Takes numbers that multiply the mean or are added to it.
  void skip_scaling(ResponseNorm& found) {
    for (skip_views(); const Node* node = maker(); skip_views()) {
      if (!is_any(*node, {"aten::mul", "aten::div", "aten::add"}) || node->arguments.size() < 2 ||
          !is_real(node->arguments[1]) || node->overload == "Tensor_mode") {
        return;
      }
      const double by = number(node->arguments[1], 1);
      if (node->name == "aten::mul") found.alpha *= by;
      if (node->name == "aten::div") found.alpha /= by;
      if (node->name == "aten::add") found.k += found.alpha * by * number(node->arguments[2], 1);
      at_ = node->read(0);
    }
  }

  // Takes the mean over a window of channels of [N, 1, C, ...]. A pad may stand before it.
  bool take_windows(ResponseNorm& found, const Dims& image) {
    const Node* pool = maker();
    const PoolingOp* row = pool ? pooling_op(pool->name) : nullptr;
    if (!row || row->kind != Pooling::kAverageOfWindow || row->divisor < 0) return false;
    const Dims& to = dims_of(pool->output());
    const std::size_t spatial = to.size() - 2;
    if (to.size() < 4 || image.size() < 3) return false;
    if (to[0] != image[0] || to[1] != 1 || to[2] != image[1]) return false;
    const auto list = [&](std::size_t i) { return integers(pool->arguments[i], spatial); };
    const auto constant = [&](std::int64_t i) {
      return pool->arguments[static_cast<std::size_t>(i)].constant();
    };
    const auto kernel = list(1), stride = list(2), padding = list(3);
    if (!kernel || !stride || !padding || kernel->size() != spatial) return false;
    Dims wanted(spatial, 1);
    wanted[0] = found.size = (*kernel)[0];
    if (*kernel != wanted || (stride->empty() ? *kernel : *stride) != Dims(spatial, 1))
      return false;
    const bool zeros_count = constant(row->include_pad).toBool() || (*padding)[0] == 0;
    if (!zeros_count || !constant(row->divisor).isNone()) return false;
    at_ = pool->read(0);
    Dims around = taken_pads(2 * spatial);
    if (around.empty()) return false;
    // A list of pads begins with the last dim's.
    for (std::size_t i = 0; i < 2 * spatial; ++i) around[i] += (*padding)[spatial - 1 - i / 2];
    wanted.assign(2 * spatial, 0);
    wanted[2 * spatial - 2] = found.size / 2;
    wanted[2 * spatial - 1] = (found.size - 1) / 2;
    return around == wanted;
  }

  // The zeros that a pad puts around spatial dims, in ATen's order; empty for any other pad.
  Dims taken_pads(std::size_t count) {
    const Node* node = maker();
    if (!node || !is_any(*node, {"aten::pad", "aten::constant_pad_nd"})) return Dims(count, 0);
    const auto& arguments = node->arguments;
    const bool is_general = node->name == "aten::pad";
    const Argument& value = arguments[is_general ? 3 : 2];
    auto pads = integers(arguments[1], 1);
    if (!pads || pads->size() > count || (!is_none(value) && number(value, 1) != 0)) return {};
    if (is_general && arguments[2].constant().toStringView() != "constant") return {};
    pads->resize(count, 0);
    at_ = node->read(0);
    return *pads;
  }

  bool take_square() {
    skip_views();
    const Node* node = maker();
    if (!node) return false;
    const bool is_product = node->name == "aten::mul" && node->read(0) == node->read(1);
    const bool is_power = node->name == "aten::pow" && exponent_of(*node) == 2;
    if (!is_product && !is_power && node->name != "aten::square") return false;
    at_ = node->read(0);
    return at_ != kNone;
  }

  const Uses& uses_;
  const std::vector<Meta>& metas_;
  Value at_ = kNone;
};

// The name of a node with arguments (input, size, alpha, beta, k). No op has it: ops have a
// namespace.
constexpr std::string_view kResponseNorm = "local_response_norm";

void find_response_norms(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  ResponseNormWalk walk(uses, rewrite.metas);
  for (Node& node : rewrite.graph.nodes) {
    if (!is_any(node, {"aten::div", "aten::mul"}) || node.overload != "Tensor") continue;
    const Meta& meta = rewrite.meta(node.output());
    if (meta.dims.size() < 3 || meta.dims.size() > 5 || meta.dtype != at::kFloat) continue;
    const auto found = walk.find(node);
    if (!found || rewrite.meta(found->src) != meta) continue;
    node.name = kResponseNorm;
    node.overload.clear();
    node.become(nodes::blocked_op,
                {{ValueRef{found->src}},
                 {c10::IValue(found->size)},
                 {c10::IValue(found->alpha)},
                 {c10::IValue(found->beta)},
                 {c10::IValue(found->k)}},
                {});
  }
}

at::Tensor run_response_norm(const Arguments& a) {
  return local_response_norm(a.physical, a.channels, a.integer(1), number(a.argument(2), 0),
                             number(a.argument(3), 0), number(a.argument(4), 0));
}

// ---- ops that move pixels -----------------------------------------------------------------------

// (input, factor)
bool shuffle_fits(const Candidate& candidate) {
  return src_dims(candidate).size() == 4 && is_integer(candidate.node.arguments[1]);
}

at::Tensor run_pixel_shuffle(const Arguments& a) {
  return pixel_shuffle(a.physical, a.channels, a.integer(1));
}

at::Tensor run_pixel_unshuffle(const Arguments& a) {
  return pixel_unshuffle(a.physical, a.channels, a.integer(1));
}

// (input, grid [N, *out, dims], mode, padding mode, align corners). To find a point's pixels and
// their weights takes as long as to read the pixels of 40 channels.
bool grid_sampler_fits(const Candidate& candidate) {
  constexpr std::int64_t kLeastChannels = 48;
  const Dims& dims = src_dims(candidate);
  const Value grid = candidate.node.read(1);
  if (dims.size() < 4 || dims[1] < kLeastChannels || grid == kNone) return false;
  Dims of_grid = candidate.result().dims;
  of_grid.erase(of_grid.begin() + 1);
  of_grid.push_back(std::ssize(dims) - 2);
  return candidate.meta(grid) == Meta{of_grid, at::kFloat};
}

at::Tensor run_grid_sampler(const Arguments& a) {
  return grid_sampler(a.physical, a.channels, *a.tensor(1), a.integer(2), a.integer(3), a.flag(4));
}

// (input, pads, ...): whether only spatial dims are padded. Zeros and copied pixels then keep a
// zero tail zero.
bool pads_pixels(const Candidate& candidate) {
  const auto pads = integers(candidate.node.arguments[1], 1);
  return pads && pads->size() % 2 == 0 && pads->size() <= 2 * (src_dims(candidate).size() - 2);
}

// (input, pads, mode, value or none)
bool pad_fits(const Candidate& candidate) {
  const auto& arguments = candidate.node.arguments;
  const bool constant = arguments[2].constant().toStringView() == "constant";
  return pads_pixels(candidate) && (!constant || number(arguments[3], 0) == 0);
}

at::Tensor run_pad(const Arguments& a) {
  const Dims pads = integers(a.argument(1), 1).value();
  return from_images(at::pad(as_images(a.physical), pads, a.argument(2).constant().toStringView()),
                     a.physical.size(0));
}

// (input, pads, value)
bool constant_pad_fits(const Candidate& candidate) {
  return pads_pixels(candidate) && number(candidate.node.arguments[2], 1) == 0;
}

at::Tensor run_constant_pad(const Arguments& a) {
  return from_images(at::pad(as_images(a.physical), integers(a.argument(1), 1).value()),
                     a.physical.size(0));
}

// ---- ATen's ops on the physical tensor ----------------------------------------------------------

// (input, weight): one weight for all channels, or one per channel.
bool prelu_fits(const Candidate& candidate) {
  const Value weight = candidate.node.read(1);
  if (weight == kNone) return false;
  const auto& [dims, dtype] = candidate.meta(weight);
  return dtype == candidate.result().dtype && dims.size() == 1 &&
         (dims[0] == 1 || dims[0] == src_dims(candidate)[1]);
}

at::Tensor run_prelu(const Arguments& a) {
  const at::Tensor& src = a.physical;
  const at::Tensor weight = *a.tensor(1);
  if (weight.numel() == 1) return at::_prelu_kernel(src, weight);
  Dims shape(static_cast<std::size_t>(src.dim() - 1), 1);
  shape[1] = a.channels;
  return at::_prelu_kernel(src, to_blocked(weight.reshape(shape), a.block(), std::nullopt));
}

// (input, dims, keepdim, ...), with dims at argument `first`: the reduced dims, counted in the
// physical tensor. Nothing unless all are spatial and stay with size 1.
std::optional<Dims> reduced_pixels(const Node& node, std::size_t rank, std::size_t first = 1) {
  auto dims = integers(node.arguments[first], 1);
  if (!dims || dims->empty() || !node.arguments[first + 1].constant().toBool()) return std::nullopt;
  for (std::int64_t& dim : *dims) {
    if (dim < 0) dim += static_cast<std::int64_t>(rank);
    if (dim < 2) return std::nullopt;
  }
  return dims;
}

bool reduction_fits(const Candidate& candidate) {
  return reduced_pixels(candidate.node, src_dims(candidate).size()).has_value();
}

// As reduction_fits, and the result keeps the type.
bool sum_fits(const Candidate& candidate) {
  return reduction_fits(candidate) && is_none(candidate.node.arguments[3]);
}

template <at::Tensor (*kReduce)(const at::Tensor& physical, at::IntArrayRef dims)>
at::Tensor run_reduction(const Arguments& a) {
  const auto rank = static_cast<std::size_t>(a.physical.dim() - 1);
  return kReduce(a.physical, reduced_pixels(*a.step.node, rank).value());
}

at::Tensor mean(const at::Tensor& src, at::IntArrayRef dims) { return at::mean(src, dims, true); }
at::Tensor sum(const at::Tensor& src, at::IntArrayRef dims) { return at::sum(src, dims, true); }
at::Tensor amax(const at::Tensor& src, at::IntArrayRef dims) { return at::amax(src, dims, true); }
at::Tensor amin(const at::Tensor& src, at::IntArrayRef dims) { return at::amin(src, dims, true); }

// (input, ord, dims, keepdim, dtype): the Euclidean norm of whole planes.
bool vector_norm_fits(const Candidate& candidate) {
  const auto& arguments = candidate.node.arguments;
  const std::size_t rank = src_dims(candidate).size();
  const auto dims = reduced_pixels(candidate.node, rank, 2);
  return dims && dims->size() == rank - 2 && number(arguments[1], 0) == 2 && is_none(arguments[4]);
}

at::Tensor run_vector_norm(const Arguments& a) { return image_norms({a.physical, a.channels}); }

Ready ready_vector_norm(const Arguments&, const SlotPlan& src) {
  return [norms = ImageNorms(src.dims, src.format.block)](const void* from, void* to) mutable {
    norms(static_cast<const float*>(from), static_cast<float*>(to));
  };
}

// ---- ops of other libraries ---------------------------------------------------------------------

bool keeps_channels(const Candidate& candidate) {
  return candidate.result().dims[1] == src_dims(candidate)[1];
}

// ---- the kind -----------------------------------------------------------------------------------

// What ATen's op does with nhwc and ndhwc.
enum class ChannelsLast {
  kCopies,   // it makes a plain copy
  kRuns,     // it has a kernel
  kInexact,  // its kernel loses too many digits, so it is given plain tensors
};
using enum ChannelsLast;

struct Row {
  std::string_view name, overload;
  bool (*fits)(const Candidate& candidate);       // null: not one op, but found as several
  at::Tensor (*run)(const Arguments& arguments);  // null: a form of another library runs
  bool (*has_kernel)(at::ScalarType);  // whether we have one for that type; null: ATen's runs
  ChannelsLast channels_last;
  // run() made ready for src of these sizes, if all other arguments are constants; null: run() is
  // used.
  Ready (*ready)(const Arguments& arguments, const SlotPlan& src) = nullptr;
};

bool is_float32(at::ScalarType dtype) { return dtype == at::kFloat; }
bool moves(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16; }

constexpr std::array kRows{
    // ATen's group norm of nhwc takes the variance as a difference of two sums: where the mean is
    // 100 standard deviations, the results are off by 1e-2; by 1e-5 for nchw, and by 6e-6 here.
    Row{"aten::group_norm", "", group_norm_fits, run_group_norm, norms_take, kInexact,
        ready_group_norm},
    Row{"aten::instance_norm", "", instance_norm_fits, run_instance_norm, norms_take, kCopies,
        ready_instance_norm},
    Row{"aten::layer_norm", "", layer_norm_fits, run_layer_norm, norms_take, kCopies},
    Row{kResponseNorm, "", nullptr, run_response_norm, is_float32, kCopies},
    Row{"aten::pixel_shuffle", "", shuffle_fits, run_pixel_shuffle, moves, kRuns},
    Row{"aten::pixel_unshuffle", "", shuffle_fits, run_pixel_unshuffle, moves, kRuns},
    Row{"aten::grid_sampler", "", grid_sampler_fits, run_grid_sampler, is_float32, kCopies},
    Row{"aten::pad", "", pad_fits, run_pad, nullptr, kRuns},
    Row{"aten::constant_pad_nd", "", constant_pad_fits, run_constant_pad, nullptr, kRuns},
    Row{"aten::prelu", "", prelu_fits, run_prelu, nullptr, kRuns},
    Row{"aten::mean", "dim", sum_fits, run_reduction<mean>, nullptr, kRuns},
    Row{"aten::sum", "dim_IntList", sum_fits, run_reduction<sum>, nullptr, kRuns},
    Row{"aten::amax", "", reduction_fits, run_reduction<amax>, nullptr, kRuns},
    Row{"aten::amin", "", reduction_fits, run_reduction<amin>, nullptr, kRuns},
    Row{"aten::linalg_vector_norm", "", vector_norm_fits, run_vector_norm, is_float32, kRuns,
        ready_vector_norm},
};

// The row of every op that another library has given a blocked form.
constexpr Row kRegistered{"", "", keeps_channels, nullptr, nullptr, kCopies};

// Null if there is none.
const Row* row_of(const Node& node) {
  const auto* row = std::ranges::find_if(kRows, [&](const Row& each) {
    return each.name == node.name && each.overload == node.overload;
  });
  if (row != kRows.end()) return row;
  return blocked_form({node.name, node.overload}) ? &kRegistered : nullptr;
}

// The arguments after the first.
std::span<const Argument> others(const Node& node) { return std::span(node.arguments).subspan(1); }

// Only values that come from images have formats. Others are plain, and ATen's op serves them.
// ATen's op also serves a result that no node reads, because the graph returns it plain.
bool takes(const Candidate& candidate) {
  const Node& node = candidate.node;
  const Row* row = row_of(node);
  const Value src = row ? node.read(0) : kNone;
  if (src == kNone || candidate.uses.readers[Uses::at(node.output())].empty()) return false;
  const auto& [dims, dtype] = candidate.meta(src);
  const bool is_input = std::ranges::count(candidate.graph.inputs, src) > 0;
  if (dims.size() < 3 || dims.size() > 5 || dtype != candidate.result().dtype) return false;
  if (row->has_kernel && !row->has_kernel(dtype)) return false;
  if (!is_input && !candidate.is_from_image(src)) return false;
  bool again = false;  // src is also another argument, so it would be read in two formats
  for_values(others(node), [&](Value value) { again |= value == src; });
  return !again && candidate.result().dims.size() == dims.size() && row->fits(candidate);
}

// A response norm has the sizes and type of its image; those of ATen's ops are inferred.
std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  if (node.name != kResponseNorm) return {};
  return {metas[Uses::at(node.read(0))]};
}

// Reductions are statistics, which stay in float32.
Types types(const Rewrite&, const Node& node) {
  const Row* row = row_of(node);
  const bool takes = row->has_kernel ? row->has_kernel(at::kBFloat16)
                                     : is_any(node, {"aten::pad", "aten::constant_pad_nd"});
  return takes ? Types::kFollows : Types::kFloat32;
}

double cost(Planner& planner, const Node& node, Format format) {
  const Row* row = row_of(node);
  const bool is_last = format == kChannelsLast;
  if (is_last && row->channels_last == kInexact) return kImpossible;
  double total = 0;
  for_values(others(node), [&](Value value) {
    total += planner.reorder_cost(value, planner.home(value), kStrided);
  });
  const std::size_t rank = planner.metas()[Uses::at(node.output())].dims.size();
  const bool copies = (is_last && (row->channels_last == kCopies || rank == 3)) ||
                      (format == kPlain && !row->fits);  // it then runs on a blocked copy
  if (copies) total += 2 * planner.reorder_cost(node.output(), kPlain, kChannelsLast);
  return total;
}

// The choice: whether the op is made ready.
void plan(Planner& planner, const Node& node, Step& step) {
  bool constant = true;
  for_values(others(node), [&](Value value) {
    step.reads[value] = planner.slot(value, kStrided);
    constant &= planner.is_constant(value);
  });
  step.choice = constant && row_of(node)->ready;
}

bool is_ready(const Step& step, const SlotPlan& dst) {
  return dst.is_blocked() && std::any_cast<bool>(step.choice);
}

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  const Row* row = row_of(*step.node);
  const std::int64_t channels = running.plan.slots[src].dims[1];
  if (is_ready(step, slot)) {
    const Ready run = row->ready({step, running.tensors, {}, channels}, running.plan.slots[src]);
    return {[&tensors = running.tensors, run, src, dst] {
              run(tensors[src].const_data_ptr(), tensors[dst].mutable_data_ptr());
            },
            true};
  }
  if (slot.is_blocked() && row == &kRegistered) return prepare_form(step, running);
  if (slot.is_blocked()) {
    return {[&step, &tensors = running.tensors, row, channels, src, dst] {
      tensors[dst] = row->run({step, tensors, tensors[src], channels}).contiguous();
    }};
  }
  if (row->fits) return prepare_call(step, running, {});
  return {[&step, &tensors = running.tensors, row, channels, src, dst,
           channels_last = slot.format == kChannelsLast] {
    const at::Tensor physical = to_blocked(tensors[src], native_blocks()[0], std::nullopt);
    const at::Tensor result = row->run({step, tensors, physical, channels});
    tensors[dst] = to_dense(result, channels, channels_last, std::nullopt);
  }};
}

std::string implementation(const Plan& plan, const Step& step) {
  const Row* row = row_of(*step.node);
  if (!row->fits) return by_torch_blocked(plan, step);
  if (row == &kRegistered && plan.slots[step.writes[0]].is_blocked()) {
    return toString(form_of(*step.node));
  }
  return row->has_kernel ? by_aten_unless_blocked(plan, step) : by_aten(plan, step);
}

}  // namespace

constinit const NodeKind nodes::blocked_op = {
    .name = "blocked_op",
    .find = find_response_norms,
    .takes = takes,
    .results = results,
    .types = types,
    .tied_end = 1,
    .cost = cost,
    .plan = plan,
    .fills = is_ready,
    .prepare = prepare,
    .implementation = implementation,
};

}  // namespace torch_blocked::graph
