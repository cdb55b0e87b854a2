// Linear layers on plain tensors, with the activation and the sum that follow them.
#include "format/errors.h"
#include "graph/nodes/layers.h"
#include "graph/planning/planner.h"
#include "graph/report.h"
#include "graph/running/run.h"
#include "runtime/memory/memory_pool.h"

namespace torch_blocked::graph {
namespace {

LinearProblem problem_of(const Dims& dims, const at::Tensor& weight, bool has_bias,
                         const kernels::Epilogue& epilogue = {}) {
  return {.rows = c10::multiply_integers(dims) / std::max<std::int64_t>(dims.back(), 1),
          .inputs = dims.back(),
          .outputs = weight.size(0),
          .has_bias = has_bias,
          .epilogue = epilogue,
          .dtype = weight.scalar_type()};
}

void find_one(const Rewrite& rewrite, Node& node) {
  const Graph& graph = rewrite.graph;
  if (node.name != "aten::linear" || node.held.has_value()) return;  // a layer of bytes has one
  const at::Tensor* weight = constant_of(graph, node.arguments[1]);
  const at::Tensor* bias = constant_of(graph, node.arguments[2]);
  const Value src = node.arguments[0].value();
  if (!weight || weight->dim() != 2 || src == kNone || graph.constants.contains(src)) return;
  if (!bias && !is_none(node.arguments[2])) return;
  const Meta& meta = rewrite.meta(src);
  if (meta.dims.size() < 2 || meta.dims.back() != weight->size(1)) return;
  if (weight->scalar_type() != meta.dtype || !bias_fits(bias, meta.dtype, weight->size(0))) return;
  if (!takes_linear(problem_of(meta.dims, *weight, bias))) return;
  node.become(nodes::linear, {{ValueRef{src}}}, Linear{{*weight}, bias ? *bias : at::Tensor()});
}

void find(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) find_one(rewrite, node);
}

// Adds the only reader of `node` to its epilogue; false if it cannot. The layer then runs in the
// reader's place, because the residual may not exist before.
bool fuse_reader(const Rewrite& rewrite, Node& node, const Uses& uses) {
  Node* reader = node.as<Linear>() ? uses.only_reader(node.output()) : nullptr;
  if (!reader || reader->held.has_value()) return false;
  Linear fused = *node.as<Linear>();
  Value residual = node.read(1);
  if (!join_epilogue(rewrite.graph, *reader, node.output(), rewrite.metas, fused.epilogue,
                     residual)) {
    return false;
  }
  const bool adds = fused.epilogue.residual;
  if (adds && fused.epilogue.before.kind != Activated::kNone) return false;
  if (adds && rewrite.meta(residual).dtype != at::kFloat) return false;
  reader->name = joined_name(node.name, *reader);
  reader->origin = node.origin;
  reader->become(nodes::linear, with_residual(node.read(0), residual), std::move(fused));
  node.outputs.clear();
  return true;
}

void fuse(Rewrite& rewrite) { join_from_end(rewrite, fuse_reader); }

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

// Memory for one problem. Implementations with the same format of weights share the packed weights.
struct Probe {
  at::Tensor src, dst, weight, bias;
  std::map<std::string, at::Tensor> packed = {};

  explicit Probe(const LinearProblem& p) {
    const auto filled = [&](const Dims& dims) { return empty_pooled(dims, p.dtype).fill_(0.01); };
    src = filled({p.rows, p.inputs});
    dst = filled({p.rows, p.outputs});
    weight = filled({p.outputs, p.inputs});
    bias = p.has_bias ? filled({p.outputs}) : at::Tensor();
  }

  Contest::Entry entry(LayerPlan plan, bool residual) {
    at::Tensor& weights = packed[plan.weights_format];
    if (!weights.defined()) weights = plan.pack(weight);
    const auto run = [run = std::move(plan.run), &probe = *this, weights, residual] {
      run({probe.src.const_data_ptr(), weights.const_data_ptr(),
           probe.bias.defined() ? probe.bias.const_data_ptr() : nullptr,
           residual ? probe.dst.const_data_ptr() : nullptr, probe.dst.mutable_data_ptr()});
    };
    return {run, weights, plan.loops_only, plan.handicap};
  }
};

// Larger weights always come from memory, at the bandwidths that the estimates know. To time the
// first layer of VGG-16's head took 3 s.
constexpr std::int64_t kMostTimedWeights = 8'000'000;

bool is_timed(const Tuner& tuner, const LinearProblem& p) {
  return tuner.enabled() && p.inputs * p.outputs <= kMostTimedWeights;
}

// `names`: the implementations that take the problem.
Contest contest_of(const Tuner& tuner, const LinearProblem& p,
                   const std::vector<const char*>& names, std::optional<Probe>& probe) {
  const std::string words = text("linear ", p.rows, " x ", p.inputs, " -> ", p.outputs);
  const char* dtype = p.dtype == at::kFloat ? "" : " bfloat16";
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
            if (!probe) probe.emplace(p);
            return probe->entry(plan_linear(p, name), p.epilogue.residual);
          }};
}

Choice choose(Tuner& tuner, const LinearProblem& p) {
  const std::vector<const char*> names = linear_implementations_for(p);
  if (names.size() == 1 || !is_timed(tuner, p)) return {p, names[0]};
  std::optional<Probe> probe;
  const auto best = tuner.best(contest_of(tuner, p, names, probe));
  const auto is_best = [&](const char* name) { return best->implementation == name; };
  return {p, *std::ranges::find_if(names, is_best), best->microseconds};
}

void plan(Planner& planner, const Node& node, Step& step) {
  const Linear& linear = *node.as<Linear>();
  const Dims& dims = planner.metas()[Uses::at(node.read(0))].dims;
  const LinearProblem problem =
      problem_of(dims, linear.weight.source, linear.bias.defined(), linear.epilogue);
  step.choice = choose(planner.tuner(), problem);
}

const Choice& choice_of(const Step& step) { return *std::any_cast<Choice>(&step.choice); }

Prepared prepare(const Step& step, const Running& running) {
  const Linear& linear = *step.node->as<Linear>();
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  LayerPlan plan = plan_linear(choice_of(step).problem, choice_of(step).implementation);
  const at::Tensor packed =
      running.weights.get(*step.node, linear.weight.parts(), plan.weights_format,
                          [&] { return plan.pack(linear.weight.values().contiguous()); });
  const at::Tensor bias = linear.bias.defined() ? linear.bias.contiguous() : linear.bias;
  const bool loops_only = plan.loops_only;
  const Value added = step.node->read(1);
  const auto residual = added == kNone ? std::nullopt : std::optional<Slot>(step.reads.at(added));
  const auto run = [&tensors = running.tensors, plan = std::move(plan), packed, bias, src, residual,
                    dst] {
    plan.run({tensors[src].const_data_ptr(), packed.const_data_ptr(),
              bias.defined() ? bias.const_data_ptr() : nullptr,
              residual ? tensors[*residual].const_data_ptr() : nullptr,
              tensors[dst].mutable_data_ptr()});
  };
  return {run, loops_only};
}

// A sum may overwrite its residual, but not src, from which all outputs of a row are computed.
Value stored_over(const Step& step) {
  const Value residual = step.node->read(1);
  if (residual == kNone || residual == step.node->read(0)) return kNone;
  return linear_sums_in_place(choice_of(step).implementation) ? residual : kNone;
}

double flops(const Plan&, const Step& step) {
  const LinearProblem& p = choice_of(step).problem;
  return 2.0 * static_cast<double>(p.rows * p.inputs * p.outputs);
}

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
    std::optional<Probe> probe;
    for (const auto& [name, microseconds] :
         planner.tuner().all(contest_of(planner.tuner(), p, names, probe))) {
      all.push_back({name, format, microseconds, ""});
    }
  }
  for (const auto& [name, why] : linear_refusals(p)) all.push_back({name, format, 0, why});
  return all;
}

void own(Node& node, Weights& weights) {
  at::Tensor& bias = node.as<Linear>()->bias;
  if (bias.defined()) bias = weights.own(bias);
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
  return {.weight = {with_taps(linear.weight.source), with_taps(linear.weight.factors)},
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
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .plan = plan,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = stored_over,
    .prepare = prepare,
    .flops = flops,
    .implementation = implementation,
    .why = why,
    .rivals = rivals,
    .own = own,
    .release = [](Node& node) { node.as<Linear>()->weight = {}; },
};

}  // namespace torch_blocked::graph
