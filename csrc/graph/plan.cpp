#include "graph/plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "format/errors.h"

namespace torch_blocked::graph {
namespace {

// Reorders run at about the speed of memcpy in cache; the constant is what starting threads costs.
constexpr double kBytesPerMicrosecond = 8e3, kReorderMicroseconds = 3;
constexpr double kImpossible = std::numeric_limits<double>::infinity();

std::size_t at(Value value) { return static_cast<std::size_t>(value); }

bool keeps_format(const Node& node) {
  return node.kind == Kind::kAffine || node.kind == Kind::kPointwise ||
         node.kind == Kind::kImages || node.kind == Kind::kConcat || node.kind == Kind::kGather ||
         node.kind == Kind::kRegroup || node.kind == Kind::kSqueezeExcite;
}

// The formats that a node insists on, whatever its neighbours have; nothing if it has none.
struct Fixed {
  std::int64_t reads, writes;
};
std::optional<Fixed> fixed_formats(const Node& node) {
  if (node.kind == Kind::kLinear) return Fixed{kPlain, kPlain};
  // Other dims over memory that is in order are in order, too.
  if (node.kind == Kind::kBoxed && is_reshape(node)) return Fixed{kPlain, kPlain};
  if (node.kind == Kind::kBoxed) return Fixed{kStrided, kStrided};
  if (node.kind == Kind::kToLast) return Fixed{kChannelsLast, kPlain};
  if (node.kind == Kind::kFromLast) return Fixed{kPlain, kChannelsLast};
  return std::nullopt;
}

// Values that must share one format: what a format-keeping node reads and writes, a convolution's
// dst and its residual.
class Groups {
 public:
  explicit Groups(const Graph& graph) : parent_(at(graph.values)) {
    std::iota(parent_.begin(), parent_.end(), Value{0});
    for (const Node& node : graph.nodes) {
      if (keeps_format(node)) {
        for_reads(node, [&](Value value) { join(value, node.output()); });
      } else if (node.convolution && node.convolution->residual != kNone) {
        join(node.convolution->residual, node.output());
      }
    }
  }

  Value of(Value value) const {
    while (parent_[at(value)] != value) value = parent_[at(value)];
    return value;
  }

 private:
  void join(Value a, Value b) { parent_[at(of(a))] = of(b); }
  std::vector<Value> parent_;
};

class Planner {
 public:
  Planner(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner, std::int64_t block)
      : graph_(graph),
        metas_(infer(graph, metas_of(inputs))),
        groups_(graph),
        tuner_(tuner),
        block_(block) {
    formats_.assign(at(graph.values), kPlain);
    made_.resize(at(graph.values));
    for (std::size_t i = 0; i < inputs.size(); ++i) made_[at(graph.inputs[i])] = inputs[i].format;
    for (const auto& [value, tensor] : graph.constants) made_[at(value)] = kStrided;
    for (const Node& node : graph.nodes) {
      const auto fixed = fixed_formats(node);
      for (const Value value : node.outputs) {
        if (fixed) {
          made_[at(value)] = fixed->writes;
        } else if (node.convolution || node.affine || node.squeeze_excite) {
          formats_[at(groups_.of(value))] = block;  // others follow, or stay plain
        }
      }
    }
  }

  Plan plan() {
    choose_formats();
    for (const Value value : graph_.inputs) plan_.inputs.push_back(new_slot(value, home(value)));
    for (const auto& [value, tensor] : graph_.constants) {
      plan_.constants[value] = new_slot(value, kStrided);
    }
    for (const Node& node : graph_.nodes) emit(node);
    for_arguments(graph_.outputs,
                  [&](Value value) { plan_.outputs[value] = slot(value, kStrided); });
    return std::move(plan_);
  }

 private:
  // The format in which a value comes into being.
  std::int64_t home(Value value) const {
    return made_[at(value)].value_or(formats_[at(groups_.of(value))]);
  }

  // Most of what may have any strides has those of plain.
  double reorder_cost(Value value, std::int64_t from, std::int64_t to) const {
    const auto is_plain = [](std::int64_t format) {
      return format == kPlain || format == kStrided;
    };
    if (from == to || (is_plain(from) && is_plain(to))) return 0;
    const Meta& meta = metas_[at(value)];
    const auto bytes = static_cast<double>(c10::multiply_integers(meta.dims) *
                                           static_cast<std::int64_t>(c10::elementSize(meta.dtype)));
    return kReorderMicroseconds + 2 * bytes / kBytesPerMicrosecond;
  }

  struct Choice {
    ConvolutionProblem problem;
    std::string implementation;
    double microseconds = std::numeric_limits<double>::infinity(), total = microseconds;
  };

  // The best way to a convolution's dst in `format`; src may be reordered for it.
  Choice choose(const Node& node, std::int64_t format) {
    Choice best;
    const Value src = node.convolution->src;
    for (const std::int64_t src_format : {format, kPlain}) {
      ConvolutionProblem problem = problem_of(node, metas_);
      // Other mixtures have no kernel. A residual that is src itself has dst's format.
      if (src_format != format && src == node.convolution->residual) continue;
      if (src_format == kPlain && format != kPlain && problem.src_dims[1] > 4) continue;
      problem.src_block = src_format;
      problem.dst_block = format;
      const auto choice = tuner_.best(problem);
      if (!choice) continue;
      const double total = choice->microseconds + reorder_cost(src, home(src), src_format);
      if (total < best.total) {
        best = {problem, choice->implementation, choice->microseconds, total};
      }
    }
    return best;
  }

  const Choice& chosen(const Node& node, std::int64_t format) {
    const auto key = std::tuple(&node, format, home(node.convolution->src));
    const auto found = choices_.find(key);
    return found != choices_.end() ? found->second
                                   : choices_.emplace(key, choose(node, format)).first->second;
  }

  double cost() {
    double total = 0;
    for (const Node& node : graph_.nodes) {
      if (node.convolution) {
        total += chosen(node, home(node.output())).total;
        const Value residual = node.convolution->residual;
        if (residual != kNone) {
          total += reorder_cost(residual, home(residual), home(node.output()));
        }
        continue;
      }
      if ((node.affine || node.squeeze_excite) && home(node.output()) == kPlain) return kImpossible;
      const std::int64_t wanted = wanted_by(node);
      if (node.gather && wanted != block_) {  // ATen's, in two passes
        total += 2 * reorder_cost(node.output(), wanted, block_);
      }
      for_reads(node, [&](Value value) {
        if (!graph_.constants.contains(value)) {
          total += reorder_cost(value, home(value), wanted);
        }
      });
    }
    return total;
  }

  // The format in which a node other than a convolution reads.
  std::int64_t wanted_by(const Node& node) const {
    const auto fixed = fixed_formats(node);
    return fixed ? fixed->reads : home(node.output());
  }

  // One group after the other takes the format that makes the whole cheapest, until none changes:
  // groups meet at convolutions only, so two or three rounds do.
  void choose_formats() {
    if (!tuner_.enabled()) return;
    std::vector<Value> groups;
    for (const Node& node : graph_.nodes) {
      for (const Value value : node.outputs) {
        if (!made_[at(value)]) groups.push_back(groups_.of(value));
      }
    }
    std::ranges::sort(groups);
    groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
    double least = cost();
    for (int round = 0; round < 3; ++round) {
      const double before = least;
      for (const Value group : groups) {
        std::int64_t& format = formats_[at(group)];
        std::int64_t kept = format;
        for (const std::int64_t other : {block_, kChannelsLast, kPlain}) {
          format = other;
          const double total = other == kept ? least : cost();
          // A change should win more than rounding: formats that cost the same stay.
          if (total < 0.9995 * least) {
            least = total;
            kept = other;
          }
        }
        format = kept;
      }
      if (least == before) break;
    }
  }

  Slot new_slot(Value value, std::int64_t format) {
    const Meta& meta = metas_[at(value)];
    plan_.slots.push_back({meta.dims, meta.dtype, format});
    return slots_[{value, format}] = plan_.slots.size() - 1;
  }

  // The value in a format, reordered once for all that want it so. Who takes any strides takes them
  // in plain, too.
  Slot slot(Value value, std::int64_t format) {
    if (format == kStrided && home(value) != kStrided) format = kPlain;
    if (const auto found = slots_.find({value, format}); found != slots_.end()) {
      return found->second;
    }
    if (const auto made = slots_.find({value, home(value)}); made == slots_.end()) {
      emit_gather(*gathers_.at(value));
      return slot(value, format);
    }
    const Slot from = slots_.at({value, home(value)});
    const Slot to = new_slot(value, format);
    const bool dense = home(value) == kStrided && format == kPlain;
    const StepKind kind = dense ? StepKind::kDense : StepKind::kReorder;
    plan_.steps.push_back({kind, nullptr, {{value, from}}, {to}});
    return to;
  }

  // A gather runs when something first needs its result: convolutions may do without.
  void emit(const Node& node) {
    if (node.gather) {
      gathers_[node.output()] = &node;
    } else {
      emit_step(node);
    }
  }

  void emit_gather(const Node& node) {
    Step step{StepKind::kGather, &node, {}, {}};
    const std::int64_t format = home(node.output());
    for (const Value src : node.gather->srcs) step.reads[src] = slot(src, format);
    step.writes = {new_slot(node.output(), format)};
    plan_.steps.push_back(std::move(step));
  }

  // The gather whose sources a convolution reads itself; null if it needs the result, or it is
  // there anyway.
  const Gather* gather_for(const Node& node, const Choice& choice) const {
    const Value src = node.convolution->src;
    const auto found = gathers_.find(src);
    if (found == gathers_.end()) return nullptr;
    const auto& row = convolution_implementations().row(choice.implementation);
    if (!row.traits.gathers_channels) return nullptr;
    if (slots_.contains({src, home(src)}) || home(src) != choice.problem.src_block) return nullptr;
    const Gather& gather = *found->second->gather;
    return gathers_in_place(choice.problem, gather.channels) ? &gather : nullptr;
  }

  void emit_step(const Node& node) {
    static constexpr std::array kKinds{
        StepKind::kBoxed,         StepKind::kConvolution, StepKind::kAffine, StepKind::kPointwise,
        StepKind::kImages,        StepKind::kConcat,      StepKind::kGather, StepKind::kRegroup,
        StepKind::kSqueezeExcite, StepKind::kLinear,      StepKind::kBoxed,  StepKind::kBoxed};
    Step step{kKinds[static_cast<std::size_t>(node.kind)], &node, {}, {}};
    const std::int64_t format = home(node.output());
    if (node.convolution) {
      const Choice& choice = chosen(node, format);
      step.problem = choice.problem;
      step.implementation = choice.implementation;
      step.microseconds = choice.microseconds;
      step.gather = gather_for(node, choice);
    }
    if (step.gather) {
      for (const Value src : step.gather->srcs) step.reads[src] = slot(src, format);
    }
    for_reads(node, [&](Value value) {
      const bool src = node.convolution && value == node.convolution->src;
      if (src && step.gather && value != node.convolution->residual) return;
      const std::int64_t wanted = node.convolution ? format : wanted_by(node);
      step.reads[value] = slot(value, src ? step.problem.src_block : wanted);
    });
    if (node.kind == Kind::kImages && format != kPlain) {
      step.pooling = pooling_of(node, metas_, format);
      if (step.pooling && plan_pooling(*step.pooling)) step.kind = StepKind::kPooling;
    }
    for (const Value value : node.outputs) step.writes.push_back(new_slot(value, format));
    plan_.steps.push_back(std::move(step));
  }

  const Graph& graph_;
  std::vector<Meta> metas_;
  Groups groups_;
  Tuner& tuner_;
  std::int64_t block_;
  std::vector<std::int64_t> formats_;              // of groups
  std::vector<std::optional<std::int64_t>> made_;  // formats that no choice changes
  std::map<std::tuple<const Node*, std::int64_t, std::int64_t>, Choice> choices_;
  std::map<std::pair<Value, std::int64_t>, Slot> slots_;
  std::map<Value, const Node*> gathers_;
  Plan plan_;
};

}  // namespace

ConvolutionProblem problem_of(const Node& node, const std::vector<Meta>& metas) {
  const Convolution& c = *node.convolution;
  Dims dims = metas[at(c.src)].dims;
  const Dims src_dims = dims;
  for (std::size_t i = 0; i < c.padding_end.size(); ++i) dims[2 + i] += c.padding_end[i];
  ConvolutionProblem problem =
      convolution_problem(dims, kPlain, c.weight, c.bias, c.stride, c.padding, c.dilation,
                          c.transposed, c.output_padding, c.groups);
  problem.src_dims = src_dims;
  problem.epilogue = c.epilogue;
  return problem;
}

Plan make_plan(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner,
               std::int64_t block) {
  return Planner(graph, inputs, tuner, block).plan();
}

}  // namespace torch_blocked::graph
