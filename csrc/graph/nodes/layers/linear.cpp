// Linear layers on plain tensors, with the activation and the sum that follow them.
#include "kernels/matrix/linear.h"

#include <ATen/ops/ones.h>

#include "format/errors.h"
#include "graph/nodes/layers/contest.h"
#include "graph/nodes/layers/layer_step.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/planning/planner.h"
#include "graph/report.h"

namespace torch_blocked::graph {
namespace {

// Whether a weight is signed bytes with at most one factor for each output.
bool has_bytes(const Weight& weight) {
  const bool per_output =
      !weight.factors.defined() || (weight.factors.dim() == 2 && weight.factors.size(1) == 1);
  return weight.source.scalar_type() == at::kChar && per_output;
}

LinearProblem problem_of(const Dims& dims, const Linear& linear) {
  return {.rows = c10::multiply_integers(dims) / std::max<std::int64_t>(dims.back(), 1),
          .inputs = dims.back(),
          .outputs = linear.weight.sizes()[0],
          .has_bias = linear.bias.defined(),
          .epilogue = linear.epilogue,
          .dtype = linear.weight.dtype(),
          .has_bytes = has_bytes(linear.weight)};
}

// Signed bytes that a node makes numbers of, as a weight; nothing if it does something else.
std::optional<Weight> bytes_of(const Graph& graph, const Node* maker) {
  if (const auto constant = quantized_constant(graph, maker)) {
    const bool fits = constant->values.dim() == 2 && constant->axis <= 0;
    if (!fits) return std::nullopt;
    const at::Tensor scales = constant->scales.to(at::kDouble).view({-1, 1});
    return Weight{constant->values, scales.expand({constant->values.size(0), 1}), at::kFloat};
  }
  if (!maker || maker->name != "aten::to") return std::nullopt;
  const at::Tensor* bytes = constant_of(graph, maker->arguments[0]);
  const bool fits = bytes && bytes->scalar_type() == at::kChar && bytes->dim() == 2;
  return fits ? std::optional(Weight{*bytes, {}, at::kFloat}) : std::nullopt;
}

void find_one(const Rewrite& rewrite, const Uses& uses, Node& node) {
  const Graph& graph = rewrite.graph;
  if (node.name != "aten::linear" || node.held.has_value()) return;  // a layer of bytes has one
  const at::Tensor* constant = constant_of(graph, node.arguments[1]);
  const auto weight = constant                ? std::optional(Weight{*constant})
                      : node.read(1) == kNone ? std::nullopt
                                              : bytes_of(graph, uses.maker[Uses::at(node.read(1))]);
  const at::Tensor* bias = constant_of(graph, node.arguments[2]);
  const Value src = node.arguments[0].value();
  if (!weight || weight->source.dim() != 2 || src == kNone || graph.constants.contains(src)) return;
  if (!bias && !is_none(node.arguments[2])) return;
  const Meta& meta = rewrite.meta(src);
  if (meta.dims.size() < 2 || meta.dims.back() != weight->sizes()[1]) return;
  if (weight->dtype() != meta.dtype || !bias_fits(bias, meta.dtype, weight->sizes()[0])) return;
  Linear linear{*weight, bias ? *bias : at::Tensor()};
  if (!takes_linear(problem_of(meta.dims, linear))) return;
  node.become(nodes::linear, {{ValueRef{src}}}, std::move(linear));
}

void find(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) find_one(rewrite, uses, node);
}

// Kernels in float32 add a residual before the only activation. Those in bfloat16 add nothing.
bool takes(const Rewrite& rewrite, const Linear& fused, Value residual) {
  const Epilogue& epilogue = fused.epilogue;
  return !epilogue.residual || (!rewrite.narrows && epilogue.before.kind == Activated::kNone &&
                                rewrite.meta(residual).dtype == at::kFloat);
}

bool fuse_reader(const Rewrite& rewrite, Node& node, const Uses& uses) {
  return join_reader<Linear>(rewrite, node, uses, takes);
}

void fuse(Rewrite& rewrite) { join_from_end(rewrite, fuse_reader); }

Types types(const Rewrite& rewrite, const Node& node) {
  Linear narrow = *node.as<Linear>();
  // Bytes are fewer to read than bfloat16.
  const Dims& dims = rewrite.meta(node.read(0)).dims;
  if (has_bytes(narrow.weight) && problem_of(dims, narrow).rows <= kernels::LinearRows::kMostRows) {
    return Types::kFloat32;
  }
  narrow.weight.narrowed = at::kBFloat16;
  const bool takes = takes_linear(problem_of(dims, narrow));
  return takes ? Types::kProduct : Types::kFloat32;
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  Meta dst = metas[Uses::at(node.read(0))];
  dst.dims.back() = node.as<Linear>()->weight.sizes()[0];
  return {dst};
}

// How a linear layer runs: the step's choice.
struct Choice {
  LinearProblem problem;
  const char* implementation;
  double microseconds = 0;  // 0: not measured
};

// Larger weights always come from memory, at the bandwidths that the estimates know. To time the
// first layer of VGG-16's head took 3 s.
constexpr std::int64_t kMostTimedWeights = 8'000'000;

bool is_timed(const Tuner& tuner, const LinearProblem& p) {
  return tuner.enabled() && p.inputs * p.outputs <= kMostTimedWeights;
}

// `names`: the implementations that take the problem.
Contest contest_of(const Tuner& tuner, const LinearProblem& p,
                   const std::vector<const char*>& names, std::optional<LayerProbe>& probe) {
  const std::string words = text("linear ", p.rows, " x ", p.inputs, " -> ", p.outputs);
  const char* dtype = p.has_bytes ? " bytes" : p.dtype == at::kFloat ? "" : " bfloat16";
  std::vector<const char*> likely = names;
  const auto others = std::ranges::stable_partition(likely, [&](const char* name) {
    return tuner.times_all() || linear_may_be_fastest(p, name);
  });
  return {.name = text(words, dtype, p.has_bias ? " bias" : "", " e",
                       static_cast<std::int64_t>(p.activation().kind),
                       p.epilogue.residual ? " sum" : ""),
          .layer = text("linear ", p.inputs, " -> ", p.outputs, dtype),
          .words = words,
          .implementations = {likely.begin(), others.begin()},
          .others = {others.begin(), likely.end()},
          .expected = kImpossible,
          .estimated =
              [&](const char* preferred) {
                const auto like =
                    std::ranges::find(names, std::string_view(preferred ? preferred : ""));
                return like == names.end() ? names[0] : *like;
              },
          .entry = [&](const char* name, bool) -> std::optional<Contest::Entry> {
            if (!probe) probe.emplace(pixels_of(p), Dims{p.outputs, p.inputs});
            return probe->entry(plan_linear(p, name));
          }};
}

Choice choose(Tuner& tuner, const LinearProblem& p) {
  const std::vector<const char*> names = linear_implementations_for(p);
  if (names.size() == 1 || !is_timed(tuner, p)) return {p, names[0]};
  std::optional<LayerProbe> probe;
  const auto best = tuner.best(contest_of(tuner, p, names, probe));
  const auto is_best = [&](const char* name) { return best->implementation == name; };
  return {p, *std::ranges::find_if(names, is_best), best->microseconds};
}

void plan(Planner& planner, const Node& node, Step& step) {
  const Linear& linear = *node.as<Linear>();
  const Dims& dims = planner.metas()[Uses::at(node.read(0))].dims;
  step.choice = choose(planner.tuner(), problem_of(dims, linear));
}

const Choice& choice_of(const Step& step) { return *std::any_cast<Choice>(&step.choice); }

at::Tensor packed_weights(const LayerPlan& plan, const Weight& weight) {
  if (!plan.pack_bytes) return pack_weights(plan, weight.values().contiguous());
  const std::int64_t outputs = weight.sizes()[0];
  const at::Tensor scales = weight.factors.defined()
                                ? weight.factors.to(at::kFloat).flatten().expand({outputs})
                                : at::ones({outputs}, at::kFloat);
  return plan.pack_bytes(weight.source, scales);
}

Prepared prepare(const Step& step, const Running& running) {
  const Linear& linear = *step.node->as<Linear>();
  LayerPlan plan = plan_linear(choice_of(step).problem, choice_of(step).implementation);
  const LayerTensors tensors =
      tensors_of(step, running, linear.weight, linear.bias, plan.weights_format,
                 [&] { return packed_weights(plan, linear.weight); });
  const bool loops_only = plan.loops_only;
  return {[run = std::move(plan.run), tensors] { run(tensors.buffers()); }, loops_only};
}

// A sum may overwrite its residual, but not src, from which all outputs of a row are computed.
Value stored_over(const Step& step) {
  const Value residual = step.node->read(1);
  if (residual == kNone || residual == step.node->read(0)) return kNone;
  return linear_sums_in_place(choice_of(step).implementation) ? residual : kNone;
}

double flops(const Plan&, const Step& step) { return flops_of(pixels_of(choice_of(step).problem)); }

std::string implementation(const Plan&, const Step& step) { return choice_of(step).implementation; }

std::string why(const Step& step) {
  const double microseconds = choice_of(step).microseconds;
  return microseconds > 0 ? text("fastest alone: ", microseconds, " us") : "";
}

std::vector<Rival> rivals(Planner& planner, const Step& step) {
  const LinearProblem& p = choice_of(step).problem;
  const Meta& dst = planner.metas()[Uses::at(step.node->output())];
  const std::string format = format_name({dst, kPlain});
  std::vector<Rival> all;
  if (is_timed(planner.tuner(), p)) {
    const std::vector<const char*> names = linear_implementations_for(p);
    std::optional<LayerProbe> probe;
    for (const auto& [name, microseconds] :
         planner.tuner().all(contest_of(planner.tuner(), p, names, probe))) {
      all.push_back({name, format, microseconds, ""});
    }
  }
  for (const auto& [name, why] : linear_refusals(p)) all.push_back({name, format, 0, why});
  return all;
}

}  // namespace

Convolution as_convolution(const Linear& linear, std::size_t rank) {
  const Dims none(rank - 2, 0), ones(rank - 2, 1);
  const auto with_taps = [&](const at::Tensor& x) {
    if (!x.defined()) return x;
    Dims sizes = x.sizes().vec(), strides = x.strides().vec();
    sizes.resize(rank, 1);
    strides.resize(rank, 1);
    return x.as_strided(sizes, strides);
  };
  return {.weight = {with_taps(linear.weight.source), with_taps(linear.weight.factors),
                     linear.weight.narrowed},
          .bias = linear.bias,
          .stride = ones,
          .padding = none,
          .dilation = ones,
          .output_padding = none,
          .padding_end = {},
          .transposed = false,
          .groups = 1,
          .epilogue = linear.epilogue};
}

constinit const NodeKind nodes::linear = {
    .name = "linear",
    .find = find,
    .fuse = fuse,
    .results = results,
    .types = types,
    .narrow = narrow_layer<Linear>,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .plan = plan,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = stored_over,
    .prepare = prepare,
    .flops = flops,
    .implementation = implementation,
    .why = why,
    .rivals = rivals,
    .own = own_bias<Linear>,
    .release = release_weight<Linear>,
};

}  // namespace torch_blocked::graph
