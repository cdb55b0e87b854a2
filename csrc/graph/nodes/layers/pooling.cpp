// Pooling and resampling. These ops treat all channels alike, so a blocked tensor is to them a
// batch of images of b channels. Means over the spatial dims become poolings.
#include "graph/nodes/layers/pooling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_trilinear3d.h>

#include <array>
#include <numeric>

#include "format/errors.h"
#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"
#include "graph/planning/planner.h"
#include "ops/images/resampling.h"
#include "runtime/estimated_threads.h"
#include "runtime/isa.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

// The arguments of ATen's resampling. A scale is none if it follows from the sizes.
struct Resampling {
  Dims sizes;  // of dst
  bool align_corners;
  std::array<std::optional<double>, 3> scales;
};

// Ops besides those with windows, which pooling_op() knows. `into`: ATen's op, writing into given
// memory.
struct Resampler {
  std::string_view name;
  std::optional<Interpolation> interpolation;  // our kernel's; none: we have no kernel
  void (*into)(const at::Tensor& src, const Resampling& r, at::Tensor& dst);
};
constexpr auto kResamplers = std::to_array<Resampler>(
    {{"aten::adaptive_avg_pool2d", std::nullopt, nullptr},
     {"aten::adaptive_avg_pool3d", std::nullopt, nullptr},
     {"aten::upsample_nearest1d", Interpolation::kNearest, nullptr},
     {"aten::upsample_linear1d", Interpolation::kLinear, nullptr},
     {"aten::_upsample_nearest_exact1d", Interpolation::kNearestExact, nullptr},
     {"aten::_upsample_nearest_exact2d", Interpolation::kNearestExact, nullptr},
     {"aten::_upsample_nearest_exact3d", Interpolation::kNearestExact, nullptr},
     {"aten::upsample_nearest2d", Interpolation::kNearest, nullptr},
     {"aten::upsample_bilinear2d", Interpolation::kLinear,
      [](const at::Tensor& src, const Resampling& r, at::Tensor& dst) {
        at::upsample_bilinear2d_out(dst, src, r.sizes, r.align_corners, r.scales[0], r.scales[1]);
      }},
     {"aten::upsample_bicubic2d", Interpolation::kCubic,
      [](const at::Tensor& src, const Resampling& r, at::Tensor& dst) {
        at::upsample_bicubic2d_out(dst, src, r.sizes, r.align_corners, r.scales[0], r.scales[1]);
      }},
     {"aten::upsample_nearest3d", Interpolation::kNearest, nullptr},
     {"aten::upsample_trilinear3d", Interpolation::kLinear,
      [](const at::Tensor& src, const Resampling& r, at::Tensor& dst) {
        at::upsample_trilinear3d_out(dst, src, r.sizes, r.align_corners, r.scales[0], r.scales[1],
                                     r.scales[2]);
      }}});

const Resampler* resampler(const Node& node) {
  const auto* found = std::ranges::find(kResamplers, node.name, &Resampler::name);
  return found == kResamplers.end() ? nullptr : found;
}

// (input, sizes or none, [align corners,] scales or none); nothing for another overload.
std::optional<Resampling> resampling_of(const Node& node, const Dims& dst) {
  const Resampler* row = resampler(node);
  if (!row || node.overload != "vec") return std::nullopt;
  Resampling r{.sizes = Dims(dst.begin() + 2, dst.end()), .align_corners = false, .scales = {}};
  const Argument& scales = node.arguments.back();
  if (node.arguments.size() == 4) r.align_corners = node.arguments[2].constant().toBool();
  if (is_none(scales)) return r;
  const auto list = reals(scales);
  if (!list || list->size() != r.sizes.size()) return std::nullopt;
  std::ranges::copy(*list, r.scales.begin());
  return r;
}

// A resampling as a problem for our kernel; nothing if the kernel does not take it in that format.
std::optional<ResamplingProblem> resampling_problem(const Node& node,
                                                    const std::vector<Meta>& metas, Format format) {
  const Resampler* row = resampler(node);
  if (!row || !row->interpolation || format == kPlain) return std::nullopt;
  const Meta &src = metas[Uses::at(node.read(0))], &dst = metas[Uses::at(node.output())];
  const auto r = resampling_of(node, dst.dims);
  const bool sums = dst.dtype == at::kFloat || (dst.dtype == at::kBFloat16 && multiplies_bfloats());
  if (!r || !(sums || is_nearest(*row->interpolation)) || c10::multiply_integers(dst.dims) == 0) {
    return std::nullopt;
  }
  return ResamplingProblem{.interpolation = *row->interpolation,
                           .src_dims = src.dims,
                           .dst_dims = dst.dims,
                           .format = format,
                           .align_corners = r->align_corners,
                           .scales = r->scales,
                           .dtype = dst.dtype};
}

bool flag(const Node& node, std::int64_t index) {
  return index >= 0 && node.arguments[static_cast<std::size_t>(index)].constant().toBool();
}

// Adaptive pooling as windows of equal size; nothing unless the input is a multiple of the output.
std::optional<PoolingProblem> adaptive(PoolingProblem p) {
  const std::size_t spatial = p.src_dims.size() - 2;
  for (std::size_t i = 0; i < spatial; ++i) {
    const std::int64_t src = p.src_dims[2 + i], dst = p.dst_dims[2 + i];
    if (dst == 0 || src % dst != 0) return std::nullopt;
    p.kernel.push_back(src / dst);
  }
  p.kind = Pooling::kAverageOfWindow;
  p.stride = p.kernel;
  p.padding.resize(spatial, 0);
  p.dilation.resize(spatial, 1);
  return p;
}

// Whether a node is the mean over exactly the spatial dims of an image.
bool is_global_mean(const Node& node, const std::vector<Meta>& metas) {
  if (node.name != "aten::mean" || node.overload != "dim" || node.arguments[0].value() == kNone) {
    return false;
  }
  const auto& [dims, dtype] = metas[static_cast<std::size_t>(node.arguments[0].value())];
  auto reduced = integers(node.arguments[1], 1);
  const auto rank = static_cast<std::int64_t>(dims.size());
  const Argument& wanted = node.arguments[3];
  if (!reduced || rank < 4 || rank > 5) return false;
  if (dtype != at::kFloat && dtype != at::kBFloat16) return false;
  if (!wanted.is_constant() || !wanted.constant().isNone()) return false;
  for (std::int64_t& dim : *reduced) dim = (dim + rank) % rank;
  std::ranges::sort(*reduced);
  Dims spatial(static_cast<std::size_t>(rank - 2));
  std::iota(spatial.begin(), spatial.end(), 2);
  return *reduced == spatial;
}

// If a reshape has joined the spatial dims of an image, turns the mean over the joined dim into one
// over the spatial dims.
void find_flat_means(Rewrite& rewrite) {
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (node.name != "aten::mean" || node.overload != "dim" || node.read(0) == kNone) continue;
    const Node* view = uses.maker[Uses::at(node.read(0))];
    if (!view || !is_reshape(*view)) continue;
    const Dims &flat = rewrite.meta(node.read(0)).dims, &dims = rewrite.meta(view->read(0)).dims;
    const auto reduced = integers(node.arguments[1], 1);
    const bool last = reduced == Dims{-1} || reduced == Dims{2};
    const bool keeps_dims = node.arguments[2].constant().toBool();
    if (flat.size() != 3 || dims.size() < 4 || dims.size() > 5 || !last || keeps_dims) continue;
    if (dims[0] != flat[0] || dims[1] != flat[1]) continue;
    std::vector<Argument> spatial;
    for (std::int64_t dim = 2; dim < std::ssize(dims); ++dim) spatial.push_back({c10::IValue(dim)});
    node.arguments[0] = view->arguments[0];
    node.arguments[1] = {std::move(spatial)};
  }
}

// Turns an average whose one window covers the whole image into a mean.
void find_whole_windows(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    if (!is_any(node, {"aten::avg_pool2d", "aten::avg_pool3d"}) || node.read(0) == kNone) continue;
    const PoolingOp* row = pooling_op(node.name);
    const Dims& dims = rewrite.meta(node.read(0)).dims;
    const std::size_t spatial = row->name.ends_with("2d") ? 2 : 3;
    const auto kernel = integers(node.arguments[1], spatial);
    const auto padding = integers(node.arguments[3], spatial);
    if (dims.size() != spatial + 2 || kernel != Dims(dims.begin() + 2, dims.end())) continue;
    if (padding != Dims(spatial, 0) ||
        !is_none(node.arguments[static_cast<std::size_t>(row->divisor)])) {
      continue;
    }
    node.name = spatial == 2 ? "aten::adaptive_avg_pool2d" : "aten::adaptive_avg_pool3d";
    node.overload.clear();
    node.arguments.resize(2);
    node.arguments[1] = {std::vector<Argument>(spatial, Argument{c10::IValue(1)})};
  }
}

void find_means(Rewrite& rewrite) {
  find_flat_means(rewrite);
  find_whole_windows(rewrite);
  Graph& graph = rewrite.graph;
  std::vector<Meta>& metas = rewrite.metas;
  std::vector<Node> nodes;
  for (Node& node : graph.nodes) {
    if (!is_global_mean(node, metas)) {
      nodes.push_back(std::move(node));
      continue;
    }
    const Argument& src = node.arguments[0];
    Meta pooled = metas[static_cast<std::size_t>(src.value())];
    std::fill(pooled.dims.begin() + 2, pooled.dims.end(), 1);
    const std::vector<Argument> ones(pooled.dims.size() - 2, Argument{c10::IValue(1)});
    Node pool{
        .name = pooled.dims.size() == 4 ? "aten::adaptive_avg_pool2d" : "aten::adaptive_avg_pool3d",
        .overload = {},
        .arguments = {src, {ones}},
        .outputs = node.outputs,
        .origin = node.origin};
    const bool keeps_dims = node.arguments[2].constant().toBool();
    if (!keeps_dims) {
      pool.outputs = {add_value(rewrite, pooled)};
      node.name = "aten::flatten";
      node.overload = "using_ints";
      node.arguments = {{ValueRef{pool.output()}}, {c10::IValue(1)}, {c10::IValue(-1)}};
    }
    nodes.push_back(std::move(pool));
    if (!keeps_dims) nodes.push_back(std::move(node));
  }
  graph.nodes = std::move(nodes);
}

}  // namespace

bool is_average(const Node& node) {
  const PoolingOp* row = pooling_op(node.name);
  return node.name.starts_with("aten::adaptive_avg_pool") || (row && row->kind != Pooling::kMax);
}

std::optional<PoolingProblem> pooling_problem(const Node& node, const std::vector<Meta>& metas,
                                              Format format) {
  const Meta& src = metas[static_cast<std::size_t>(node.arguments[0].value())];
  const Meta& dst = metas[static_cast<std::size_t>(node.output())];
  const bool is_known =
      src.dtype == at::kFloat || src.dtype == at::kBFloat16 || src.dtype == at::kByte;
  if (!is_known || c10::multiply_integers(dst.dims) == 0) return std::nullopt;
  PoolingProblem p{.kind = Pooling::kMax,
                   .src_dims = src.dims,
                   .dst_dims = dst.dims,
                   .kernel = {},
                   .stride = {},
                   .padding = {},
                   .dilation = {},
                   .format = format,
                   .dtype = src.dtype};
  const std::string_view name = node.name;
  if (name.starts_with("aten::adaptive_avg_pool")) return adaptive(std::move(p));
  const PoolingOp* row = pooling_op(name);
  if (!row) return std::nullopt;
  const std::size_t spatial = src.dims.size() - 2;
  const auto list = [&](std::int64_t index) {
    return integers(node.arguments[Dims::size_type(index)], spatial);
  };
  const auto kernel = list(1), stride = list(2), padding = list(3),
             dilation = row->dilation < 0 ? Dims(spatial, 1) : list(row->dilation);
  if (!kernel || !stride || !padding || !dilation) return std::nullopt;
  const bool average = row->kind != Pooling::kMax;
  if (row->divisor >= 0) {
    const Argument& divisor = node.arguments[static_cast<std::size_t>(row->divisor)];
    if (!divisor.is_constant()) return std::nullopt;
    if (!divisor.constant().isNone()) p.divisor = divisor.constant().toInt();
  }
  p.kind = average && !flag(node, row->include_pad) ? Pooling::kAverageOfInput : row->kind;
  p.kernel = *kernel;
  p.stride = stride->empty() ? *kernel : *stride;
  p.padding = *padding;
  p.dilation = *dilation;
  return p;
}

namespace {

// "aten::max_pool2d" on three dims pools one image without a batch, so the rank is checked by the
// op's name.
bool takes(const Candidate& candidate) {
  const std::string& name = candidate.node.name;
  const PoolingOp* row = pooling_op(name);
  const bool known = row || resampler(candidate.node);
  if (candidate.result().dtype == at::kByte && (!row || row->kind != Pooling::kMax)) return false;
  if (!known || !candidate.reads_images()) return false;
  const std::int64_t spatial = name[name.size() - 2] - '0';
  return std::ssize(candidate.result().dims) == spatial + 2;
}

// In nchw ATen computes one output after the other: 15 to 44 ns each with a window, 1 to 5 ns
// without (Sapphire Rapids, one thread). Other formats take a tenth of that or less.
double cost(Planner& planner, const Node& node, Format format) {
  if (format != kPlain) return 0;
  const double microseconds = pooling_op(node.name) ? 30e-3 : 2.5e-3;
  const Dims& dims = planner.metas()[Uses::at(node.output())].dims;
  const EstimatedThreads fixed;
  return static_cast<double>(c10::multiply_integers(dims)) * microseconds / threads();
}

// How a pooling runs: the step's choice.
struct Choice {
  PoolingProblem problem;
  const char* implementation;
};

void plan(Planner& planner, const Node& node, Step& step) {
  const Format format = planner.home(node.output());
  if (format == kPlain) return;
  if (auto resampling = resampling_problem(node, planner.metas(), format)) {
    step.choice = *std::move(resampling);
    return;
  }
  const auto problem = pooling_problem(node, planner.metas(), format);
  const char* name = problem ? choose_pooling(*problem) : nullptr;
  if (name) step.choice = Choice{*problem, name};
}

// In plain formats ATen makes the result of a resampling.
bool fills(const Step& step, const SlotPlan& dst) {
  if (step.choice.has_value()) return true;
  const Resampler* row = resampler(*step.node);
  return dst.format != kPlain && row && row->into &&
         resampling_of(*step.node, dst.dims).has_value();
}

Prepared prepare(const Step& step, const Running& running) {
  const Slot dst = step.writes[0];
  if (const auto* choice = std::any_cast<Choice>(&step.choice)) {
    PoolingPlan plan = plan_pooling(choice->problem, choice->implementation);
    const bool loops_only = plan.loops_only;
    const auto run = [run = std::move(plan.run), &tensors = running.tensors,
                      src = step.reads.begin()->second,
                      dst] { run(tensors[src].const_data_ptr(), tensors[dst].mutable_data_ptr()); };
    return {run, loops_only};
  }
  if (const auto* problem = std::any_cast<ResamplingProblem>(&step.choice)) {
    return {[run = plan_resampling(*problem), &tensors = running.tensors,
             src = step.reads.begin()->second,
             dst] { run(tensors[src].const_data_ptr(), tensors[dst].mutable_data_ptr()); },
            true};
  }
  const SlotPlan& slot = running.plan.slots[dst];
  if (fills(step, slot)) {
    return {[&tensors = running.tensors, src = step.reads.begin()->second, dst,
             r = *resampling_of(*step.node, slot.dims), blocked = slot.is_blocked(),
             into = resampler(*step.node)->into] {
      at::Tensor to = blocked ? as_images(tensors[dst]) : tensors[dst];
      into(blocked ? as_images(tensors[src]) : tensors[src], r, to);
    }};
  }
  if (!slot.is_blocked()) return prepare_call(step, running, {});
  const auto result = [](const at::Tensor& images, const SlotPlan& slot) {
    return from_images(images, slot.dims[0]);
  };
  return prepare_call(step, running,
                      {.argument = as_images, .result = result, .is_physical = false});
}

// A contest of the implementations, on memory of its own.
Contest contest_of(const PoolingProblem& p, const char* implementation) {
  const auto filled = [&](const Dims& dims) {
    return at::full(p.format.physical_shape(dims), 0, p.dtype);
  };
  const auto entry = [&p, filled](const char* name, bool) -> std::optional<Contest::Entry> {
    PoolingPlan plan = plan_pooling(p, name);
    const auto run = [run = std::move(plan.run), src = filled(p.src_dims),
                      dst = filled(p.dst_dims)] {
      run(src.const_data_ptr(), dst.mutable_data_ptr());
    };
    return Contest::Entry{
        .run = run, .weights = at::full({0}, 0, at::kFloat), .loops_only = plan.loops_only};
  };
  return {.name = text("pooling ", c10::toString(p.dtype), static_cast<int>(p.kind), p.src_dims,
                       p.dst_dims, p.kernel, p.stride, p.padding, p.dilation, p.divisor,
                       p.format.name(p.src_dims.size())),
          .layer = "",
          .words = text("pooling ", p.src_dims, " -> ", p.dst_dims),
          .implementations = {implementation},
          .estimated = [implementation](const char*) { return implementation; },
          .entry = entry};
}

std::vector<Rival> rivals(Planner& planner, const Step& step) {
  std::vector<Rival> all;
  for (const Format format : {planner.blocked(), kChannelsLast}) {
    const auto problem = pooling_problem(*step.node, planner.metas(), format);
    if (!problem) return all;
    const std::string name(format.name(problem->dst_dims.size()));
    if (const char* taken = choose_pooling(*problem)) {
      for (const auto& [each, microseconds] : planner.tuner().all(contest_of(*problem, taken))) {
        all.push_back({each, name, microseconds, ""});
      }
    }
    for (const auto& [each, why] : pooling_refusals(*problem)) all.push_back({each, name, 0, why});
  }
  return all;
}

std::string implementation(const Plan&, const Step& step) {
  if (std::any_cast<ResamplingProblem>(&step.choice)) return "torch_blocked";
  const auto* choice = std::any_cast<Choice>(&step.choice);
  return choice ? choice->implementation : "aten";
}

}  // namespace

constinit const NodeKind nodes::pooling = {
    .name = "pooling",
    .find = find_means,
    .takes = takes,
    .takes_bytes = true,
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .cost = cost,
    .plan = plan,
    .fills = fills,
    .prepare = prepare,
    .implementation = implementation,
    .rivals = rivals,
};

}  // namespace torch_blocked::graph
