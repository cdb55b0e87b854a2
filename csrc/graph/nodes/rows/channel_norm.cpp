// Layer norms over the channels of images. They arise here: ops on [N, *spatial, C] between
// permutations to that order and back are rewritten as ops on images. Linear layers then become 1x1
// convolutions, and no reorder is left between them and the convolutions around them; a block of
// ConvNeXt as it is usually written had four.
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <set>

#include "graph/nodes/rows/float_rows.h"
#include "graph/nodes/rows/layer_norm.h"
#include "graph/planning/planner.h"

namespace torch_blocked::graph {
namespace {

// The norm of [N, C, *spatial] over the channels.
struct ChannelNorm {
  LayerNorm norm;
};

// Ops that reduce dims and keep them with size 1, and the argument that lists these dims.
struct Reduction {
  std::string_view name, overload;
  std::size_t dims;
};
constexpr std::array kReductions{
    Reduction{"aten::mean", "dim", 1},
    Reduction{"aten::sum", "dim_IntList", 1},
    Reduction{"aten::amax", "", 1},
    Reduction{"aten::amin", "", 1},
    Reduction{"aten::linalg_vector_norm", "", 2},
};

const Reduction* reduction_of(const Node& node) {
  const auto* row = std::ranges::find_if(kReductions, [&](const Reduction& each) {
    return each.name == node.name && each.overload == node.overload;
  });
  if (row == kReductions.end() || row->dims + 1 >= node.arguments.size()) return nullptr;
  const Argument& keeps = node.arguments[row->dims + 1];
  const bool fits = keeps.is_constant() && keeps.constant().toBool() &&
                    integers(node.arguments[row->dims], 1).has_value();
  return fits ? row : nullptr;
}

// The ops between a permutation to channels last and all permutations back. They read only each
// other.
class Region {
 public:
  Region(Rewrite& rewrite, const Uses& uses, std::size_t rank)
      : rewrite_(rewrite), uses_(uses), rank_(rank) {}

  // False if an op needs channels last, or if an op outside of the region reads a result with
  // channels last.
  bool grow(Node& to_last) {
    std::vector<Node*> open{&to_last};
    while (!open.empty()) {
      Node* node = open.back();
      open.pop_back();
      if (!all_.insert(node).second) continue;
      const bool enters = is_permutation(*node, order_to_last(rank_));
      if (!enters && !add_sources(*node, open)) return false;
      if (!add_readers(*node, open)) return false;
    }
    return true;
  }

  // Rewrites the ops as ops on images.
  void rewrite() {
    for (Node* node : all_) {
      if (is_permutation(*node, order_to_last(rank_))) continue;
      Meta& meta = rewrite_.metas[Uses::at(node->output())];
      meta.dims.insert(meta.dims.begin() + 1, meta.dims.back());
      meta.dims.pop_back();
      change(*node);
    }
    for (Node* exit : exits_) drop(*exit);
    for (Node* node : all_) {
      if (is_permutation(*node, order_to_last(rank_))) drop(*node);
    }
  }

 private:
  bool is_permutation(const Node& node, const Dims& order) const {
    return !node.held.has_value() && node.read(0) != kNone &&
           rewrite_.meta(node.read(0)).dims.size() == rank_ && order_of(node, rank_) == order;
  }

  bool takes(const Node& node) const {
    if (node.as<LayerNorm>() || node.as<Linear>()) return true;
    if (node.held.has_value() || node.outputs.size() != 1) return false;
    if (reduction_of(node) || is_concat(node, static_cast<std::int64_t>(rank_) - 1, rank_)) {
      return true;
    }
    const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
    return op && op->hasTag(at::Tag::pointwise);
  }

  // Adds the nodes whose results an op reads. Constants are numbers, or tensors that broadcast.
  bool add_sources(const Node& node, std::vector<Node*>& open) const {
    if (!takes(node) || rewrite_.meta(node.output()).dims.size() != rank_) return false;
    bool fits = true;
    for_values(node.arguments, [&](Value value) {
      if (rewrite_.graph.constants.contains(value)) {
        fits &= rewrite_.graph.constants.at(value).layout() == at::kStrided;
        return;
      }
      Node* maker = uses_.maker[Uses::at(value)];
      fits &= maker && rewrite_.meta(value).dims.size() == rank_;
      if (fits) open.push_back(maker);
    });
    return fits;
  }

  bool add_readers(const Node& node, std::vector<Node*>& open) {
    if (uses_.is_output[Uses::at(node.output())]) return false;
    for (Node* reader : uses_.readers[Uses::at(node.output())]) {
      // This is no entry: its source is channels last already.
      if (is_permutation(*reader, order_to_last(rank_))) return false;
      if (is_permutation(*reader, order_from_last(rank_))) {
        exits_.insert(reader);
      } else {
        open.push_back(reader);
      }
    }
    return true;
  }

  void change(Node& node) {
    if (const auto* norm = node.as<LayerNorm>()) {
      const ChannelNorm of_channels{*norm};
      node.become(nodes::channel_norm, {{ValueRef{node.read(0)}}}, of_channels);
    } else if (const auto* linear = node.as<Linear>()) {
      node.become(nodes::convolution, {{ValueRef{node.read(0)}}}, as_convolution(*linear, rank_));
    } else if (const Reduction* row = reduction_of(node)) {
      node.arguments[row->dims] = {c10::IValue(moved(*integers(node.arguments[row->dims], 1)))};
    } else if (node.name == "aten::cat") {
      node.arguments[1] = {c10::IValue(std::int64_t{1})};
    } else {
      for (Argument& argument : node.arguments) move_constant(argument);
    }
  }

  // Dims counted with channels last, as dims of images.
  Dims moved(Dims dims) const {
    const Dims order = order_from_last(rank_);
    const auto rank = static_cast<std::int64_t>(rank_);
    for (std::int64_t& dim : dims) {
      dim = std::ranges::find(order, (dim + rank) % rank) - order.begin();
    }
    return dims;
  }

  // Reshapes a constant of channels, such as [C], so that it broadcasts to images: [C, 1, 1].
  void move_constant(Argument& argument) {
    const at::Tensor* constant = constant_of(rewrite_.graph, argument);
    if (!constant || constant->dim() == 0) return;
    Dims sizes(rank_, 1);
    std::ranges::copy(constant->sizes(), sizes.end() - constant->dim());
    argument.held =
        ValueRef{add_constant(rewrite_, constant->reshape(sizes).permute(order_from_last(rank_)))};
  }

  // Removes a permutation: its readers read its source.
  void drop(Node& permutation) {
    replace(rewrite_.graph, permutation.output(), permutation.read(0));
    permutation.outputs.clear();
  }

  Rewrite& rewrite_;
  const Uses& uses_;
  std::size_t rank_;
  std::set<Node*> all_, exits_;
};

// Rewrites one region at a time, since each changes who reads what.
bool find_region(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    if (node.held.has_value() || node.read(0) == kNone) continue;
    const std::size_t rank = rewrite.meta(node.read(0)).dims.size();
    if (rank < 4 || rank > 5 || order_of(node, rank) != order_to_last(rank)) continue;
    if (rewrite.graph.constants.contains(node.read(0))) continue;
    Region region(rewrite, uses, rank);
    if (!region.grow(node)) continue;
    region.rewrite();
    sweep(rewrite.graph);
    return true;
  }
  return false;
}

void find(Rewrite& rewrite) {
  while (find_region(rewrite)) {
  }
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {node.as<ChannelNorm>()->norm.result(metas[Uses::at(node.read(0))])};
}

void combine(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    if (auto* norm = node.as<ChannelNorm>()) join_bytes(uses, node, norm->norm.bytes);
  }
  sweep(rewrite.graph);
}

void narrow(Rewrite&, Node& node) { node.as<ChannelNorm>()->norm.dtype = at::kBFloat16; }

// Pixels of an image, each of `vectors` vectors of `block` channels, `step` numbers apart; in
// channels-last one vector of all channels.
struct Pixels {
  std::int64_t vectors, block, step, channels;
  NumbersOf from, to;

  // Some pixels as float32 in `room`, where they lie without gaps, and back.
  void load(const void* image, std::int64_t at, std::int64_t count, float* room) const {
    for (std::int64_t i = 0; i < vectors; ++i, at += step, room += count * block) {
      from.load(image, at, count * block, room);
    }
  }
  void store(const float* room, std::int64_t count, void* image, std::int64_t at) const {
    for (std::int64_t i = 0; i < vectors; ++i, at += step, room += count * block) {
      to.store(room, count * block, image, at);
      if (!to.bytes || i + 1 < vectors) continue;  // the zero of bytes is another number than 0
      clear_lanes(static_cast<std::uint8_t*>(image) + at, count, block, channels - i * block);
    }
  }
};

// What normalizes an image: pixels in channels-last over all images at once, in blocked formats
// image by image.
struct Images {
  kernels::RowNormalization norm;
  void (*kernel)(const kernels::RowNormalization& rows, std::int64_t begin, std::int64_t end);
  std::int64_t count = 1, size = 0, pixels;  // size: numbers from one image to the next
  Pixels of;

  // Normalizes pixels [begin, end) of image i.
  void run(const at::Tensor& src, const at::Tensor& dst, std::int64_t i, std::int64_t begin,
           std::int64_t end) const {
    kernels::RowNormalization some = norm;
    if (of.from.are_floats() && of.to.are_floats()) {
      some.src = src.const_data_ptr<float>() + i * size;
      some.dst = dst.mutable_data_ptr<float>() + i * size;
      return kernel(some, begin, end);
    }
    const std::int64_t group = kernels::kernels().width;
    float* room = workspace(group * of.vectors * of.block);
    some.src = some.dst = room;
    for (std::int64_t first = begin; first < end; first += group) {
      const std::int64_t now = std::min(group, end - first), at = i * size + first * of.block;
      if (of.vectors > 1) some.vector_step = now * of.block;
      of.load(src.const_data_ptr(), at, now, room);
      kernel(some, 0, now);
      of.store(room, now, dst.mutable_data_ptr(), at);
    }
  }
};

Images images_of(const LayerNorm& norm, const SlotPlan& src, const SlotPlan& slot,
                 std::vector<at::Tensor>& kept) {
  const std::int64_t channels = slot.dims[1], all = c10::multiply_integers(slot.dims) / channels;
  Images images{.norm = normalization_of(norm, channels, kept),
                .kernel = kernels::kernels().normalize_rows,
                .pixels = all,
                .of = {1, channels, 0, channels, {src, norm.bytes.src}, {slot, norm.bytes.dst}}};
  if (!slot.is_blocked()) return images;
  const std::int64_t block = slot.format.block;
  images.count = std::max<std::int64_t>(slot.dims[0], 1);
  images.pixels = all / images.count;
  images.of.vectors = slot.format.blocks(channels);
  images.of.block = block;
  images.of.step = images.pixels * block;
  images.norm.row_step = block;
  images.norm.vector_step = images.of.step;
  images.size = images.of.vectors * images.of.step;
  images.kernel = kernels::kernels_for(block).normalize_pixels;
  return images;
}

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  std::vector<at::Tensor> kept;
  const Images images = images_of(step.node->as<ChannelNorm>()->norm, running.plan.slots[src],
                                  running.plan.slots[dst], kept);
  const auto run = [&tensors = running.tensors, src, dst, images, kept,
                    group = kernels::kernels().width] {
    // Groups of pixels that the kernel takes at once.
    const std::int64_t groups = ceil_div(images.pixels, group);
    parallel_units(images.count * groups, group * images.norm.channels,
                   [&](std::int64_t begin, std::int64_t end) {
                     while (begin < end) {
                       const std::int64_t i = begin / groups, first = begin % groups;
                       const std::int64_t last = std::min(groups, first + end - begin);
                       images.run(tensors[src], tensors[dst], i, first * group,
                                  std::min(last * group, images.pixels));
                       begin += last - first;
                     }
                   });
  };
  return {run, true};
}

// Of the blocked formats, only those with blocks as wide as a vector have a kernel.
double cost(Planner&, const Node&, Format format) {
  const bool is_vector =
      format.is_blocked() && format.block == kernels::kernels_for(format.block).width;
  return is_vector || format == kChannelsLast ? 0 : kImpossible;
}

}  // namespace

constinit const NodeKind nodes::channel_norm = {
    .name = "channel_norm",
    .find = find,
    .combine = combine,
    .results = results,
    .types = [](const Rewrite&, const Node&) { return Types::kEachItsOwn; },
    .narrow = narrow,
    .prefers_blocks = true,
    .cost = cost,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = by_torch_blocked,
    .own = [](Node& node, Weights& weights) { own(node.as<ChannelNorm>()->norm, weights); },
};

}  // namespace torch_blocked::graph
