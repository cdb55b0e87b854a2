// Merges chains of splits, concats and shuffles of channels into one gather, which chooses channels
// of the chain's sources.
//
// To learn how an op moves channels, the op itself is run on their numbers, [1, C, 1, 1], instead
// of on an image.
#include "graph/nodes/moving/gather.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <array>

#include "format/errors.h"
#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"
#include "graph/planning/planner.h"

namespace torch_blocked::graph {
namespace {

// Where the channels of a value come from. Reshapes may have split the channels into several dims,
// or joined the spatial dims into one.
struct Channels {
  at::Tensor numbers;   // [1, *channels, 1 for each spatial dim]: source value * kSource + channel
  std::size_t spatial;  // how many spatial dims it has
  Dims pixels;          // the spatial dims of the image
  std::string name;     // the ops that made them
  bool moved = false;   // not only concats

  bool is_image() const {
    return spatial == pixels.size() && numbers.dim() == static_cast<std::int64_t>(spatial) + 2;
  }
};
constexpr std::int64_t kSource = std::int64_t{1} << 32;

using Numbers = std::vector<at::Tensor>;  // one per result of an op; empty: not known

// Ops that move only channels, provided that argument `dims` names only dims of channels; -1: there
// is no such argument. `adds`: how many dims the op adds.
struct Row {
  std::string_view name;
  int dims;
  std::size_t adds = 0;
};
constexpr std::array kMoves{Row{"aten::chunk", 2},
                            Row{"aten::split", 2},
                            Row{"aten::split_with_sizes", 2},
                            Row{"aten::tensor_split", 2},
                            Row{"aten::slice", 1},
                            Row{"aten::narrow", 1},
                            Row{"aten::select", 1},
                            Row{"aten::unbind", 1},
                            Row{"aten::unsqueeze", 1, 1},
                            Row{"aten::squeeze", 1},
                            Row{"aten::flip", 1},
                            Row{"aten::roll", 2},
                            Row{"aten::index_select", 1},
                            Row{"aten::repeat_interleave", 2},
                            Row{"aten::channel_shuffle", -1},
                            Row{"aten::native_channel_shuffle", -1}};

// Whether an argument names only dims between the batch and the spatial dims, and at least one.
bool names_channels(const Argument& argument, std::size_t rank, std::size_t spatial) {
  const auto named = integers(argument, 1);
  const auto size = static_cast<std::int64_t>(rank),
             end = size - static_cast<std::int64_t>(spatial);
  return named && !named->empty() && std::ranges::all_of(*named, [&](std::int64_t dim) {
           const std::int64_t at = dim < 0 ? dim + size : dim;
           return at >= 1 && at < end;
         });
}

// x[:, numbers]: one index, which is of channels.
bool indexes_channels(const Node& node, std::size_t rank, std::size_t spatial) {
  const auto* indices = std::get_if<std::vector<Argument>>(&node.arguments[1].held);
  std::size_t count = 0, at = 0;
  for (std::size_t i = 0; indices && i < indices->size(); ++i) {
    if ((*indices)[i].value() == kNone) continue;
    ++count;
    at = i;
  }
  return count == 1 && at >= 1 && at + spatial < rank;
}

// repeat(self, sizes) that repeats only channels.
bool repeats_channels(const Node& node, std::size_t rank, std::size_t spatial) {
  const auto times = integers(node.arguments[1], 1);
  if (!times || times->size() != rank) return false;
  for (std::size_t i = 0; i < rank; ++i) {
    const bool is_channel = i >= 1 && i + spatial < rank;
    if (!is_channel && (*times)[i] != 1) return false;
  }
  return true;
}

bool moves_channels(const Node& node, std::size_t rank, std::size_t spatial) {
  if (node.name == "aten::index") return indexes_channels(node, rank, spatial);
  if (node.name == "aten::repeat") return repeats_channels(node, rank, spatial);
  const auto* row = std::ranges::find(kMoves, std::string_view(node.name), &Row::name);
  if (row == kMoves.end()) return false;
  if (row->dims < 0) return rank == spatial + 2;
  const auto at = static_cast<std::size_t>(row->dims);
  return at < node.arguments.size() &&
         names_channels(node.arguments[at], rank + row->adds, spatial);
}

// A reshape may keep the spatial dims, join them into one, or restore those of the image. All dims
// between the batch and them count as channels.
std::optional<Channels> reshaped(const Channels& from, const Dims& src, const Dims& dst) {
  const Dims same(src.end() - static_cast<std::ptrdiff_t>(from.spatial), src.end());
  for (const Dims& spatial : {same, from.pixels, Dims{c10::multiply_integers(from.pixels)}}) {
    const auto count = static_cast<std::ptrdiff_t>(spatial.size());
    if (std::ssize(dst) < count + 1 || dst[0] != src[0]) continue;
    if (!std::equal(dst.end() - count, dst.end(), spatial.begin())) continue;
    Dims shape(dst.size(), 1);
    std::copy(dst.begin() + 1, dst.end() - count, shape.begin() + 1);
    if (c10::multiply_integers(shape) != from.numbers.numel()) continue;
    Channels result = from;
    result.numbers = from.numbers.reshape(shape);
    result.spatial = spatial.size();
    return result;
  }
  return std::nullopt;
}

Numbers permuted(const Channels& from, const Dims& order) {
  const std::size_t rank = order.size();
  for (std::size_t i = 0; i < rank; ++i) {
    const bool channel = i > 0 && i < rank - from.spatial;
    if (!channel && order[i] != static_cast<std::int64_t>(i)) return {};
  }
  return {from.numbers.permute(order)};
}

// Everything else that the op reads must be a constant, such as the numbers of an index.
Numbers moved_by_op(const Graph& graph, const Node& node, const Channels& from) {
  if (!moves_channels(node, static_cast<std::size_t>(from.numbers.dim()), from.spatial)) return {};
  const Value src = node.read(0);
  bool known = true;
  for_values(node.arguments,
             [&](Value value) { known &= value == src || graph.constants.contains(value); });
  if (!known) return {};
  Numbers results;
  for (const c10::IValue& result : call(node, [&](Value value) -> c10::IValue {
         return value == src ? from.numbers : graph.constants.at(value);
       })) {
    results.push_back(result.toTensor());
  }
  return results;
}

// Also copies that a kind for images has taken: it takes copies whose channels are several dims,
// too.
bool copies(const Node& node) { return is_any(node, {"aten::contiguous", "aten::clone"}); }

// "aten::cat + view + transpose"
std::string name_after(const std::string& before, const Node& node) {
  const std::string own = node.name.substr(node.name.find("::") + 2);
  if (before.empty()) return node.name;
  return before.find(own) == before.npos ? text(before, " + ", own) : before;
}

class Finder {
 public:
  explicit Finder(Rewrite& rewrite)
      : graph_(rewrite.graph),
        metas_(rewrite.metas),
        is_image_(metas_.size()),
        known_(metas_.size()) {}

  void run() {
    for (Node& node : graph_.nodes) {
      for (const Value value : node.outputs) is_image_[at(value)] = makes_images(node);
      if (node.is(nodes::boxed) || node.is(nodes::concat) || copies(node)) visit(node);
    }
    const std::vector<bool> needed = find_needed();
    std::vector<Node> nodes;
    for (Node& node : graph_.nodes) {
      const std::size_t place = nodes.size();
      for (Value& value : node.outputs) {
        auto gather = needed[at(value)] ? gather_of(value) : std::nullopt;
        if (!gather) continue;
        gather->origin = node.origin;
        nodes.push_back(std::move(*gather));
        metas_.push_back(metas_[at(value)]);
        value = graph_.values++;  // the op itself stays, but nobody reads its results
      }
      nodes.insert(nodes.begin() + static_cast<std::ptrdiff_t>(place), std::move(node));
    }
    graph_.nodes = std::move(nodes);
  }

 private:
  static std::size_t at(Value value) { return static_cast<std::size_t>(value); }
  const Dims& dims(Value value) const { return metas_[at(value)].dims; }

  // What is known of a value; if nothing is, its own channels, provided that it is an image.
  std::optional<Channels> channels_of(Value value) const {
    if (value == kNone || graph_.constants.contains(value)) return std::nullopt;
    if (known_[at(value)]) return known_[at(value)];
    const auto& [dims, dtype] = metas_[at(value)];
    const bool moves = dtype == at::kFloat || dtype == at::kBFloat16;
    if (dims.size() < 3 || dims.size() > 5 || !moves) return std::nullopt;
    Dims shape(dims.size(), 1);
    shape[1] = dims[1];
    const at::Tensor numbers = at::arange(dims[1], at::kLong).add(value * kSource).view(shape);
    return Channels{numbers, dims.size() - 2, Dims(dims.begin() + 2, dims.end()), "", false};
  }

  void visit(const Node& node) {
    if (node.arguments.empty() || node.outputs.empty()) return;
    if (node.name == "aten::cat" || node.name == "aten::stack") return visit_joined(node);
    const Value src = node.arguments[0].value();
    const auto from = channels_of(src);
    if (!from) return;
    if (is_reshape(node) && !copies(node)) {
      if (const auto seen = reshaped(*from, dims(src), dims(node.output()))) {
        know(node, 0, *seen, seen->numbers, true);
      }
      return;
    }
    const Dims order = order_of(node, dims(src).size());
    const Numbers results = copies(node)     ? Numbers{from->numbers}
                            : !order.empty() ? permuted(*from, order)
                                             : moved_by_op(graph_, node, *from);
    if (results.size() != node.outputs.size()) return;
    for (std::size_t i = 0; i < results.size(); ++i)
      know(node, i, *from, results[i], !copies(node));
  }

  // Notes that result `i` of a node has the channels `numbers`.
  void know(const Node& node, std::size_t i, const Channels& from, const at::Tensor& numbers,
            bool moves) {
    Channels result = from;
    result.numbers = numbers;
    result.name = name_after(from.name, node);
    result.moved |= moves;
    known_[at(node.outputs[i])] = std::move(result);
  }

  // A concat along the channels, or a stack along a new dim among theirs.
  void visit_joined(const Node& node) {
    const bool stacks = node.name == "aten::stack";
    Numbers parts;
    std::optional<Channels> first;
    bool all = true, moves = stacks;
    for_values(node.arguments, [&](Value value) {
      const auto from = channels_of(value);
      if (from && !first) first = from;
      all = all && from && from->spatial == first->spatial && from->pixels == first->pixels &&
            from->numbers.dim() == first->numbers.dim();
      if (!all) return;
      parts.push_back(from->numbers);
      if (first->name.empty()) first->name = from->name;
      moves |= from->moved;
    });
    if (!all || !first) return;
    const auto rank = static_cast<std::size_t>(first->numbers.dim()) + (stacks ? 1 : 0);
    if (!names_channels(node.arguments[1], rank, first->spatial)) return;
    const std::int64_t dim = node.arguments[1].constant().toInt();
    know(node, 0, *first, stacks ? at::stack(parts, dim) : at::cat(parts, dim), moves);
  }

  // The values that are needed as they are: results of the graph, and what other ops read. What
  // these ops read is needed, too, if it leads to such a value that is no image.
  std::vector<bool> find_needed() const {
    std::vector<bool> needed(metas_.size());
    for_values(graph_.outputs, [&](Value value) { needed[at(value)] = true; });
    for (auto node = graph_.nodes.rbegin(); node != graph_.nodes.rend(); ++node) {
      const bool passes_on = std::ranges::all_of(node->outputs, [&](Value value) {
        const auto& known = known_[at(value)];
        return known && (known->is_image() || !needed[at(value)]);
      });
      if (!passes_on) for_values(node->arguments, [&](Value value) { needed[at(value)] = true; });
    }
    return needed;
  }

  // The gather or concat that makes a value in one step, if that helps.
  std::optional<Node> gather_of(Value value) const {
    const auto& known = known_[at(value)];
    if (!known || !known->moved || !known->is_image() || known->numbers.numel() == 0) {
      return std::nullopt;
    }
    Gather gather;
    std::vector<Value> srcs;
    bool image = false;
    const at::Tensor numbers = known->numbers.contiguous();
    for (const std::int64_t number : std::span(numbers.const_data_ptr<std::int64_t>(),
                                               static_cast<std::size_t>(numbers.numel()))) {
      const Value src = number / kSource;
      const auto found = std::ranges::find(srcs, src);
      gather.channels.push_back({found - srcs.begin(), number % kSource});
      if (found == srcs.end()) srcs.push_back(src);
      image |= is_image_[at(src)];
    }
    if (!image) return std::nullopt;
    Node node{.name = known->name, .overload = {}, .arguments = {}, .outputs = {value}};
    std::vector<Argument> reads;
    for (const Value src : srcs) reads.push_back({ValueRef{src}});
    if (is_concat(srcs, gather)) {
      node.name = "aten::cat";
      node.become(nodes::concat, {{std::move(reads)}, {c10::IValue(1)}}, {});
    } else {
      node.become(nodes::gather, std::move(reads), std::move(gather));
    }
    return node;
  }

  // Whether a gather has all channels of each source, in their order.
  bool is_concat(const std::vector<Value>& srcs, const Gather& gather) const {
    std::vector<ChannelOf> whole;
    for (std::size_t i = 0; i < srcs.size(); ++i) {
      for (std::int64_t channel = 0; channel < dims(srcs[i])[1]; ++channel) {
        whole.push_back({static_cast<std::int64_t>(i), channel});
      }
    }
    return whole == gather.channels;
  }

  Graph& graph_;
  std::vector<Meta>& metas_;
  std::vector<bool> is_image_;
  std::vector<std::optional<Channels>> known_;
};

// Our kernel, in blocked formats, counts as free. ATen makes two passes: a concat and an
// index_select.
double cost(Planner& planner, const Node& node, Format format) {
  return 2 * planner.reorder_cost(node.output(), format, planner.blocked());
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  Meta dst = metas[Uses::at(node.read(0))];
  dst.dims[1] = std::ssize(node.as<Gather>()->channels);
  return {dst};
}

Prepared prepare(const Step& step, const Running& running) {
  const Gather& gather = *step.node->as<Gather>();
  const std::vector<Slot> srcs = sources(step, *step.node);
  const std::vector<std::int64_t> counts = channel_counts(running.plan, srcs);
  const Slot to = step.writes[0];
  const SlotPlan& dst = running.plan.slots[to];
  if (dst.is_blocked()) {
    const std::int64_t pixels = c10::multiply_integers(at::IntArrayRef(dst.dims).slice(2));
    ChannelGather run(gather.channels, counts, dst.dims[0], pixels, dst.format.block,
                      static_cast<std::int64_t>(c10::elementSize(dst.dtype)));
    return {[&tensors = running.tensors, run = std::move(run), srcs, to] {
              run.run(data_of(tensors, srcs), tensors[to].mutable_data_ptr());
            },
            true};
  }
  // Where each source begins in a concat of all, and where each channel is in it.
  std::vector<std::int64_t> first{0}, index;
  for (const std::int64_t count : counts) first.push_back(first.back() + count);
  for (const auto& [src, channel] : gather.channels) {
    index.push_back(first[static_cast<std::size_t>(src)] + channel);
  }
  return {[&tensors = running.tensors, srcs, to, &dst, index = at::tensor(index, at::kLong)] {
    std::vector<at::Tensor> operands;
    for (const Slot slot : srcs) operands.push_back(tensors[slot]);
    tensors[to] = in_format(at::cat(operands, 1).index_select(1, index), dst);
  }};
}

}  // namespace

std::vector<Slot> sources(const Step& step, const Node& gather) {
  std::vector<Slot> slots;
  for_values(gather.arguments, [&](Value src) { slots.push_back(step.reads.at(src)); });
  return slots;
}

std::vector<std::int64_t> channel_counts(const Plan& plan, const std::vector<Slot>& slots) {
  std::vector<std::int64_t> counts;
  for (const Slot slot : slots) counts.push_back(plan.slots[slot].dims[1]);
  return counts;
}

std::vector<const void*> data_of(const std::vector<at::Tensor>& tensors,
                                 const std::vector<Slot>& slots) {
  std::vector<const void*> pointers;
  for (const Slot slot : slots) pointers.push_back(tensors[slot].const_data_ptr());
  return pointers;
}

constinit const NodeKind nodes::gather = {
    .name = "gather",
    .combine = [](Rewrite& rewrite) { Finder(rewrite).run(); },
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .cost = cost,
    .waits = true,  // convolutions may read the sources instead
    .fills = [](const Step&, const SlotPlan& dst) { return dst.is_blocked(); },
    .prepare = prepare,
    .implementation = by_aten_unless_blocked,
};

}  // namespace torch_blocked::graph
