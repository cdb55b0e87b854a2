// Convolutions, with the zero padding before them and the activations and the sum after them. src
// may have another format than the result.
#include "ops/convolution/convolution.h"

#include "format/errors.h"
#include "graph/nodes/layers/contest.h"
#include "graph/nodes/layers/layer_step.h"
#include "graph/nodes/moving/gather.h"
#include "graph/planning/planner.h"

namespace torch_blocked::graph {
namespace {

// ---- from ops to nodes --------------------------------------------------------------------------

// Why a convolution stays with ATen; empty if it is for our kernels. Either no kernel has its type,
// or ATen does not take it either: then ATen's own error is the best.
std::string misfit(const Meta& src, const at::Tensor& weight, const at::Tensor* bias,
                   std::int64_t groups, bool transposed) {
  if (src.dtype != at::kFloat && src.dtype != at::kBFloat16) {
    return text("it computes in ", c10::toString(src.dtype),
                ", and kernels in float32 and bfloat16; convert it to float32");
  }
  const bool ranks = std::ssize(src.dims) == weight.dim();
  if (!ranks) return "its input has no batch";
  if (weight.scalar_type() != src.dtype || groups < 1) return "its weight is not for this input";
  const std::int64_t inputs = transposed ? weight.size(0) : weight.size(1) * groups;
  const std::int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  const bool fits = inputs == src.dims[1] && inputs % groups == 0 && outputs % groups == 0 &&
                    bias_fits(bias, src.dtype, outputs);
  return fits ? "" : "its weight is not for this input";
}

// The padding that at::conv2d's word means: "valid", or "same". With "same" an odd zero is behind
// the image, and ATen takes it only at stride 1. Nothing if we do not take it.
std::optional<Padding> padding_of_word(std::string_view word, at::IntArrayRef kernel,
                                       const Dims& stride, const Dims& dilation) {
  Padding padding{Dims(stride.size(), 0), Dims(stride.size(), 0)};
  if (word == "valid") return padding;
  if (word != "same") return std::nullopt;
  for (std::size_t i = 0; i < stride.size(); ++i) {
    if (stride[i] != 1) return std::nullopt;
    const std::int64_t all = dilation[i] * (kernel[i] - 1);
    padding.begin[i] = all / 2;
    padding.more[i] = all % 2;
  }
  return padding;
}

}  // namespace

std::optional<Padding> padding_of(const Node& node, const ConvolutionOp& op, at::IntArrayRef kernel,
                                  const Dims& stride, const Dims& dilation) {
  const Argument& given = node.arguments[static_cast<std::size_t>(op.padding)];
  if (node.overload == "padding") {
    return padding_of_word(given.constant().toStringView(), kernel, stride, dilation);
  }
  auto numbers = integers(given, stride.size());
  return numbers ? std::optional(Padding{*std::move(numbers), {}}) : std::nullopt;
}

namespace {

void find_one(const Rewrite& rewrite, Node& node) {
  const ConvolutionOp* row = convolution_op(node.name);
  if (!row || node.held.has_value()) return;  // a convolution of bytes has one
  const auto decline = [&](std::string why) { node.declined = std::move(why); };
  const Graph& graph = rewrite.graph;
  const at::Tensor* weight = constant_of(graph, node.arguments[1]);
  const at::Tensor* bias = constant_of(graph, node.arguments[2]);
  const Value src = node.arguments[0].value();
  const Argument& groups = node.arguments[static_cast<std::size_t>(row->groups)];
  const bool computed = !weight || (!bias && !is_none(node.arguments[2]));
  if (computed || !groups.is_constant())
    return decline("its weights are computed at each run; keep them as parameters");
  if (src == kNone) return decline("its input is a constant");
  const Meta& meta = rewrite.meta(src);
  const std::int64_t count = groups.constant().toInt();
  const std::string why = misfit(meta, *weight, bias, count, row->transposed);
  if (!why.empty()) return decline(why);
  const std::size_t ndims = meta.dims.size();
  const auto list = [&](std::int64_t index) -> std::optional<Dims> {
    if (index < 0) return Dims(ndims - 2, 0);
    return integers(node.arguments[static_cast<std::size_t>(index)], ndims - 2);
  };
  const auto stride = list(row->stride), dilation = list(row->dilation),
             output_padding = list(row->output_padding);
  if (!stride || !dilation || !output_padding) return;
  const auto padding = padding_of(node, *row, weight->sizes().slice(2), *stride, *dilation);
  if (!padding) return;
  node.become(nodes::convolution, {{ValueRef{src}}},
              Convolution{.weight = {*weight},
                          .bias = bias ? *bias : at::Tensor(),
                          .stride = *stride,
                          .padding = padding->begin,
                          .dilation = *dilation,
                          .output_padding = *output_padding,
                          .padding_end = padding->more,
                          .transposed = row->transposed,
                          .groups = count});
}

void find(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) find_one(rewrite, node);
}

bool fuse_reader(const Rewrite& rewrite, Node& node, const Uses& uses) {
  return join_reader<Convolution>(rewrite, node, uses,
                                  [](const auto&, const auto&, Value) { return true; });
}

void fuse(Rewrite& rewrite) {
  simplify_padding(rewrite);
  join_from_end(rewrite, fuse_reader);
}

// ---- sizes and formats --------------------------------------------------------------------------

// The convolution for these dims, as a problem in plain formats.
ConvolutionProblem problem_of(const Node& node, const std::vector<Meta>& metas) {
  const Convolution& c = *node.as<Convolution>();
  auto problem = layer_problem(c, c.weight.source, c.bias, metas[Uses::at(node.read(0))].dims);
  problem.dtype = c.weight.dtype();
  return problem;
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  const ConvolutionProblem problem = problem_of(node, metas);
  return {{problem.dst_dims, problem.dtype}};
}

// How a convolution runs: the step's choice.
struct Choice {
  ConvolutionProblem problem;
  std::string implementation;
  double microseconds = kImpossible, total = kImpossible;  // total: with src's reorder
  const Node* gather = nullptr;  // it reads this gather's sources, not its result
  std::string instead_of = "";   // the fastest alone, if it cannot run on some rows at a time
};

const Choice& chosen(Planner& planner, const Node& node, Format format);

// Later candidates are timed in turn with an earlier choice. When each was timed at its own moment,
// next to another busy process, one of 24 plans of ResNet-18 took channels-last for 512 channels on
// 7x7, where Winograd takes two thirds of the time.
std::optional<Beside> beside(const Choice& choice) {
  if (choice.implementation.empty()) return std::nullopt;
  return Beside{choice.problem, {choice.implementation, choice.microseconds}};
}

// The fastest way to a convolution's dst in `format`. src may be reordered for it.
Choice timed(Planner& planner, const Node& node, Format format) {
  Choice best;
  const bool after_blocks = planner.tuner().enabled() && format != planner.blocked();
  const Choice& before = after_blocks ? chosen(planner, node, planner.blocked()) : best;
  const Value src = node.read(0);
  for (const Format src_format : {format, kPlain}) {
    ConvolutionProblem problem = problem_of(node, planner.metas());
    // Only a plain src of few channels may differ from dst's format. A residual that is src itself
    // must have dst's format.
    if (src_format != format && src == node.read(1)) continue;
    if (src_format == kPlain && format != kPlain && problem.src_dims[1] > kFewChannels) continue;
    problem.src_format = src_format;
    problem.dst_format = format;
    const auto choice = fastest(planner.tuner(), problem, beside(before));
    if (!choice) continue;
    const double total =
        choice->microseconds + planner.reorder_cost(src, planner.home(src), src_format);
    if (total < best.total) best = {problem, choice->implementation, choice->microseconds, total};
  }
  return best;
}

// Whether no kernel in `format` can win, even at peak speed: the blocked one is faster, reorders of
// src and dst included. Only blocked formats have Winograd kernels, and to time the other formats
// on layers for Winograd was half of the time of a U-Net's plan.
bool is_hopeless(Planner& planner, const Node& node, Format format) {
  if (!planner.tuner().enabled() || format == planner.blocked()) return false;
  const ConvolutionProblem problem = problem_of(node, planner.metas());
  if (problem.dtype != at::kFloat) return false;
  const Choice& own = chosen(planner, node, planner.blocked());
  const double reorders = planner.reorder_cost(node.read(0), format, own.problem.src_format) +
                          planner.reorder_cost(node.output(), own.problem.dst_format, format);
  return least_microseconds(problem) > own.microseconds + reorders;
}

// A hopeless format gets no implementation until it is needed all the same.
Choice choose(Planner& planner, const Node& node, Format format) {
  if (!is_hopeless(planner, node, format)) return timed(planner, node, format);
  Choice least{problem_of(node, planner.metas()), ""};
  least.microseconds = least_microseconds(least.problem);
  least.total =
      least.microseconds + planner.reorder_cost(node.read(0), planner.home(node.read(0)), format);
  return least;
}

const Choice& chosen(Planner& planner, const Node& node, Format format) {
  return planner.once<Choice>({&node, format, planner.home(node.read(0))},
                              [&] { return choose(planner, node, format); });
}

double cost(Planner& planner, const Node& node, Format format) {
  return chosen(planner, node, format).total;
}

// A lower bound of the time in a format that was not timed.
double least(Planner& planner, const Node& node, Format format) {
  const Format src_home = planner.home(node.read(0));
  if (const auto* known = planner.made<Choice>({&node, format, src_home})) return known->total;
  ConvolutionProblem problem = problem_of(node, planner.metas());
  if (format == planner.blocked() || !is_known(problem)) return cost(planner, node, format);
  double known = chosen(planner, node, planner.blocked()).microseconds;
  if (const auto* last = planner.made<Choice>({&node, kChannelsLast, src_home})) {
    known = std::min(known, last->microseconds);
  }
  if (known == kImpossible) return cost(planner, node, format);
  const bool takes_plain = problem.src_dims[1] <= kFewChannels && src_home == kPlain;
  problem.src_format = takes_plain ? kPlain : format;
  problem.dst_format = format;
  return planner.reorder_cost(node.read(0), src_home, problem.src_format) +
         least_beside(problem, known, planner.blocked());
}

const Traits& traits_of(const Choice& choice) {
  return convolution_implementations().row(choice.implementation).traits;
}

// The gather whose sources the convolution can read instead of its result; null if it cannot, or if
// another node has needed the result already.
const Node* gather_for(const Planner& planner, const Node& node, const Choice& choice) {
  const Value src = node.read(0);
  const Node* maker = planner.waiting(src);
  const auto* gather = maker ? maker->as<Gather>() : nullptr;
  if (!gather || !traits_of(choice).gathers_channels) return nullptr;
  if (planner.home(src) != choice.problem.src_format) return nullptr;
  if (choice.problem.dtype != at::kFloat) return nullptr;
  return gathers_in_place(choice.problem, gather->channels) ? maker : nullptr;
}

void plan(Planner& planner, const Node& node, Step& step) {
  const Format format = planner.home(node.output());
  Choice choice = chosen(planner, node, format);
  if (choice.implementation.empty()) choice = timed(planner, node, format);
  choice.gather = gather_for(planner, node, choice);
  const auto read = [&](Value value) {
    step.reads[value] = planner.slot(value, choice.problem.src_format);
  };
  if (choice.gather) {
    for_values(choice.gather->arguments, read);
  } else {
    read(node.read(0));
  }
  step.choice = std::move(choice);
}

const Choice& choice_of(const Step& step) { return *std::any_cast<Choice>(&step.choice); }

// ---- memory and running -------------------------------------------------------------------------

// A sum may overwrite its residual, but not src, which the convolution reads around each pixel.
Value stored_over(const Step& step) {
  const Value residual = step.node->read(1);
  const bool sums = traits_of(choice_of(step)).sums_in_place;
  return sums && residual != step.node->read(0) ? residual : kNone;
}

// The program that runs on what the convolution stores; null if there is none.
std::shared_ptr<const StoredProgramRun> stored_run_of(const Step& step,
                                                      const ConvolutionProblem& p) {
  const auto& program = step.node->as<Convolution>()->stored;
  if (!program) return nullptr;
  return std::make_shared<const StoredProgramRun>(*program, p.dst_dims, p.dst_format, p.dtype);
}

OnStored on_stored_of(const StoredProgramRun& program, void* dst) {
  return [&program, dst](std::int64_t row, std::int64_t first, std::int64_t pixels) {
    program(dst, row, first, pixels);
  };
}

RunRows followed_by(std::shared_ptr<const StoredProgramRun> program, RunRows run_rows,
                    std::int64_t columns) {
  return [program = std::move(program), run_rows = std::move(run_rows), columns](
             const BlockedRows& src, const std::uint8_t* residual, const BlockedRows& dst,
             Range rows) {
    run_rows(src, residual, dst, rows);
    program->rows(dst, columns, rows);
  };
}

Prepared prepare_alone(const Step& step, const Choice& choice, const Running& running) {
  const Convolution& c = *step.node->as<Convolution>();
  // A file of times may name an implementation for which this build's oneDNN has no kernel.
  auto named = plan_convolution(choice.problem, choice.implementation);
  auto plan = named ? std::move(named->plan) : plan_convolution(choice.problem).plan;
  const LayerTensors tensors = tensors_of(step, running, c.weight, c.bias, plan.weights_format,
                                          [&] { return pack_weights(plan, c.weight.values()); });
  const auto stored = stored_run_of(step, choice.problem);
  const bool loops_only = plan.loops_only && (!stored || plan.calls_on_stored);
  RunRows run_rows;
  if (plan.row_stage) {
    run_rows = plan.run_rows(tensors.parameters());
    if (stored) run_rows = followed_by(stored, std::move(run_rows), choice.problem.dst_dims.back());
  }
  return {[plan = std::move(plan), tensors, stored] {
            LayerBuffers buffers = tensors.buffers();
            const OnStored on_stored = stored ? on_stored_of(*stored, buffers.dst) : OnStored();
            if (stored && plan.calls_on_stored) buffers.on_stored = &on_stored;
            plan.run(buffers);
            if (stored && !plan.calls_on_stored) stored->all(buffers.dst);
          },
          loops_only, std::move(run_rows)};
}

// An implementation that runs a convolution on some rows at a time: the chosen one, or one that
// takes about as long.
struct InRows {
  const char* implementation;
  RowStage stage;
};
std::optional<InRows> in_rows(const Choice& choice) {
  const Traits& own = traits_of(choice);
  if (choice.gather || (!own.in_rows && !own.yardstick)) return std::nullopt;
  for (const auto& row : convolution_implementations().rows()) {
    if (!row.traits.in_rows || (own.in_rows && row.name != choice.implementation)) continue;
    const auto named = plan_convolution(choice.problem, row.name);
    if (named && named->plan.row_stage) return InRows{row.name, *named->plan.row_stage};
  }
  return std::nullopt;
}

std::optional<RowStage> row_stage(const Step& step) {
  const auto found = in_rows(choice_of(step));
  return found ? std::optional(found->stage) : std::nullopt;
}

void choose_rows(Step& step) {
  auto& choice = *std::any_cast<Choice>(&step.choice);
  const char* implementation = in_rows(choice)->implementation;
  if (choice.implementation == implementation) return;
  choice.instead_of = std::exchange(choice.implementation, implementation);
}

// Prepares a convolution that reads its channels directly from a gather's sources.
Prepared prepare_gathered(const Step& step, const Choice& choice, const Running& running) {
  const Convolution& c = *step.node->as<Convolution>();
  const std::vector<Slot> srcs = sources(step, *choice.gather);
  auto plan = plan_direct_gathered(choice.problem, choice.gather->as<Gather>()->channels,
                                   channel_counts(running.plan, srcs));
  const LayerTensors tensors = tensors_of(step, running, c.weight, c.bias, plan.weights_format,
                                          [&] { return plan.pack(c.weight.values()); });
  const auto stored = stored_run_of(step, choice.problem);
  return {[plan = std::move(plan), tensors, srcs, stored] {
            LayerBuffers buffers = tensors.buffers();
            const OnStored on_stored = stored ? on_stored_of(*stored, buffers.dst) : OnStored();
            if (stored) buffers.on_stored = &on_stored;
            plan.run(data_of(tensors.all, srcs), buffers);
          },
          true};
}

Prepared prepare(const Step& step, const Running& running) {
  const Choice& choice = choice_of(step);
  return choice.gather ? prepare_gathered(step, choice, running)
                       : prepare_alone(step, choice, running);
}

double flops(const Plan&, const Step& step) { return flops_of(choice_of(step).problem); }

std::string why(const Step& step) {
  const Choice& choice = choice_of(step);
  const char* gathers = choice.gather ? "; gathers its channels" : "";
  if (!choice.instead_of.empty()) return text("about as fast alone as ", choice.instead_of);
  if (choice.microseconds <= 0) return text("first in the list", gathers);
  return text("fastest alone: ", choice.microseconds, " us", gathers);
}

std::string formats_of(const ConvolutionProblem& p) {
  const auto src = p.src_format.name(p.src_dims.size()), dst = p.dst_format.name(p.dst_dims.size());
  return src == dst ? std::string(dst) : text(src, " -> ", dst);
}

// Adds the implementations that do not take a problem.
void add_refusals(const ConvolutionProblem& p, std::vector<Rival>& all) {
  for (const auto& [name, why] : convolution_implementations().refusals(p)) {
    all.push_back({name, formats_of(p), 0, why});
  }
}

// All implementations in the step's formats, the fastest in other formats, and why other
// implementations do not take the step's formats or blocked ones.
std::vector<Rival> rivals(Planner& planner, const Step& step) {
  ConvolutionProblem p = choice_of(step).problem;
  Tuner& tuner = planner.tuner();
  std::vector<Rival> all;
  for (const auto& [implementation, microseconds] : all_timed(tuner, p)) {
    all.push_back({implementation, formats_of(p), microseconds, ""});
  }
  add_refusals(p, all);
  const Format own = p.dst_format;
  for (const Format format : {planner.blocked(), kChannelsLast, kPlain}) {
    if (format == own) continue;
    p.src_format = p.dst_format = format;
    const auto best = fastest(tuner, p, beside(choice_of(step)));
    if (best) all.push_back({best->implementation, formats_of(p), best->microseconds, ""});
    if (format.is_blocked()) add_refusals(p, all);
  }
  return all;
}

}  // namespace

constinit const NodeKind nodes::convolution = {
    .name = "convolution",
    .find = find,
    .fuse = fuse,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kProduct; },
    .narrow = narrow_layer<Convolution>,
    .tied_from = 1,
    .prefers_blocks = true,
    .cost = cost,
    .least = least,
    .plan = plan,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = stored_over,
    .prepare = prepare,
    .row_stage = row_stage,
    .choose_rows = choose_rows,
    .flops = flops,
    .implementation = [](const Plan&, const Step& step) { return choice_of(step).implementation; },
    .why = why,
    .rivals = rivals,
    .own = own_bias<Convolution>,
    .release = release_weight<Convolution>,
};

}  // namespace torch_blocked::graph
