// Zeros around a convolution's src: padding ops become the convolution's own padding, and taps that
// read only padding are removed.
#include <algorithm>

#include "format/errors.h"
#include "graph/nodes/layers.h"

namespace torch_blocked::graph {
namespace {

// Joins zero padding in front of a convolution with the convolution's own. If the near end has more
// padding than the far end, the difference is taken from the image's size, and something of the
// image must be left.
void fuse_padding(Rewrite& rewrite) {
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (!is_any(node, {"aten::pad", "aten::constant_pad_nd"})) continue;
    const bool named = node.name == "aten::pad";
    if (named && node.arguments[2].constant().toStringView() != "constant") continue;
    if (number(node.arguments[named ? 3 : 2], 0) != 0) continue;
    Node* reader = uses.only_reader(node.output());
    auto* found = reader ? reader->as<Convolution>() : nullptr;
    if (!found || found->transposed) continue;
    Convolution& convolution = *found;
    const std::size_t spatial = convolution.stride.size();
    const auto pads = integers(node.arguments[1], 2 * spatial);  // last dim first, begin and end
    if (!pads || pads->size() > 2 * spatial || reader->read(1) == node.output()) continue;
    if (std::ranges::any_of(*pads, [](std::int64_t pad) { return pad < 0; })) continue;
    const Dims& dims = rewrite.meta(node.arguments[0].value()).dims;
    bool is_left = true;
    for (std::size_t i = 0; i < pads->size() / 2; ++i) {
      is_left &= dims[dims.size() - 1 - i] + (*pads)[2 * i + 1] > (*pads)[2 * i];
    }
    if (!is_left) continue;
    if (convolution.padding_end.empty()) convolution.padding_end.resize(spatial, 0);
    for (std::size_t i = 0; i < pads->size() / 2; ++i) {
      convolution.padding[spatial - 1 - i] += (*pads)[2 * i];
      convolution.padding_end[spatial - 1 - i] += (*pads)[2 * i + 1] - (*pads)[2 * i];
    }
    reader->arguments[0] = node.arguments[0];
    node.outputs.clear();
  }
  sweep(graph);
}

// A kernel's taps [first, first + count) along a dim, and the padding before and after them.
struct SeenTaps {
  std::int64_t first, count, begin, end;
};

// The taps from the first to the last that read a pixel of `in` for any output. The removed taps in
// front reduce the padding in front.
SeenTaps seen_taps(std::int64_t in, std::int64_t out, std::int64_t taps, std::int64_t stride,
                   std::int64_t padding, std::int64_t dilation) {
  // Of the outputs only the first one whose pixel is not before `in` counts. A loop over all of
  // them would take seconds for the numbers that a file may hold.
  const auto sees = [&](std::int64_t tap) {
    const std::int64_t before = std::max<std::int64_t>(0, padding - tap * dilation);
    const std::int64_t o = (before + stride - 1) / stride;
    const std::int64_t pixel = o * stride - padding + tap * dilation;
    return o < out && pixel < in;
  };
  std::int64_t first = 0, last = taps - 1;
  while (first < last && !sees(first) && padding >= (first + 1) * dilation) ++first;
  while (last > first && !sees(last)) --last;
  const std::int64_t begin = padding - first * dilation;
  return {first, last - first + 1, begin,
          (out - 1) * stride + (last - first) * dilation + 1 - in - begin};
}

// Removes taps that read only padding. A 3x3 kernel with a dilation of 24 on a map of 16x16 becomes
// 1x1, which takes a quarter of the time.
void drop_unseen_taps(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    auto* c = node.as<Convolution>();
    if (!c || c->transposed) continue;
    const Dims &in = rewrite.meta(node.read(0)).dims, &out = rewrite.meta(node.output()).dims;
    at::Tensor weight = c->weight.source;
    Dims padding = c->padding, more(padding.size());
    bool fits = true;
    std::string how = "taps";
    for (std::size_t i = 0; i < padding.size(); ++i) {
      const auto dim = static_cast<std::int64_t>(i) + 2;
      const SeenTaps taps = seen_taps(in[2 + i], out[2 + i], weight.size(dim), c->stride[i],
                                      padding[i], c->dilation[i]);
      weight = weight.narrow(dim, taps.first, taps.count);
      padding[i] = taps.begin;
      more[i] = taps.end - taps.begin;
      fits &= in[2 + i] + more[i] > 0;
      how += text(" ", taps.first, " ", taps.count);
    }
    if (!fits || weight.sizes() == c->weight.sizes()) continue;
    c->weight = rewrite.weights
                    .folded(c->weight.parts(), how,
                            [&] { return Folded{{weight.contiguous(), c->weight.factors}, {}}; })
                    .weight;
    const bool symmetric = std::ranges::all_of(more, [](std::int64_t size) { return size == 0; });
    c->padding = padding;
    c->padding_end = symmetric ? Dims() : more;
  }
}

}  // namespace

void simplify_padding(Rewrite& rewrite) {
  fuse_padding(rewrite);
  drop_unseen_taps(rewrite);
}

}  // namespace torch_blocked::graph
