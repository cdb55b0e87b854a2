// Runs squeeze and excitation in three passes: sums of src, the layers, the product. A few images
// run at a time, so that the product finds src in the caches. The product starts from the end,
// which the sums read last.
//
// Fusing the sums and the product with the chains of rows before and after
// (ops/products/row_chain.h) would save two passes through memory. But with that EfficientNet-B0
// and MobileNetV3 took 0.99 to 1.04 of the time on a Zen 3, because most of a gate's time goes to
// the weights of its layers.
#include "ops/images/squeeze_excite.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/matrix/linear.h"
#include "kernels/rows/normalization.h"
#include "ops/implementations.h"
#include "ops/normalization/exact_sums.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using kernels::LinearRows;

// The floats that a thread sums at a time: 64 KB, small enough that threads can share a map of one
// block.
constexpr std::int64_t kPartElements = 16384;
// How many elements cost as much as one of another kernel. Each costs only a load and an addition
// or product, so a second thread pays off later: 240@14 takes 9 us on one thread and took 12 on
// two.
constexpr std::int64_t kCheap = 2;
// Elements of src in a group of images. The product still finds them in the caches of two cores.
constexpr std::int64_t kGroupElements = 1 << 19;

// src as rows [pixels, lanes], one for each channel block of each image, in parts of pixels.
struct GateRows {
  std::int64_t images, blocks, pixels, lanes, channels;
  std::int64_t part, parts;  // pixels of a part; parts of a row

  explicit GateRows(const SqueezeExciteProblem& p) {
    images = p.dims[0];
    channels = p.dims[1];
    blocks = p.format.blocks(channels);
    lanes = p.format.lanes(channels);
    pixels = c10::multiply_integers(at::IntArrayRef(p.dims).slice(2));
    parts = std::clamp<std::int64_t>(pixels * lanes / kPartElements, 1, std::max(pixels, 1L));
    part = ceil_div(pixels, parts);
  }

  std::int64_t padded_channels() const { return blocks * lanes; }
  std::int64_t image_size() const { return padded_channels() * pixels; }
  // The first element of a part in an image, and its number of pixels.
  std::int64_t offset(std::int64_t unit) const {
    return (unit / parts * pixels + unit % parts * part) * lanes;
  }
  std::int64_t size(std::int64_t unit) const {
    return std::clamp<std::int64_t>(pixels - unit % parts * part, 0, part);
  }
};

// A layer with the sizes of its packed weights, [blocks, inputs, block], and bias, [blocks, block].
struct Layer {
  LinearRows rows{};
  std::int64_t blocks;

  Layer(const SqueezeExciteProblem::Layer& layer, std::int64_t inputs, std::int64_t outputs) {
    const std::int64_t width = kernels::kernels().width;
    rows.inputs = inputs;
    rows.outputs = outputs;
    rows.block = std::min(LinearRows::kMostVectors, ceil_div(outputs, width)) * width;
    rows.weights_stride = inputs * rows.block;
    rows.activation = layer.activation;
    blocks = ceil_div(outputs, rows.block);
  }

  std::int64_t weights_size() const { return blocks * rows.weights_stride; }
  std::int64_t size() const { return weights_size() + blocks * rows.block; }

  // Packs weights and bias, with 0 beyond the layer's own sizes.
  std::vector<at::Tensor> pack(const SqueezeExciteLayer& layer) const {
    const at::Tensor weight = layer.weight.flatten(1);
    at::Tensor padded = at::zeros({blocks * rows.block, rows.inputs}, weight.options());
    padded.narrow(0, 0, weight.size(0)).narrow(1, 0, weight.size(1)).copy_(weight);
    at::Tensor bias = at::zeros({blocks * rows.block}, weight.options());
    if (layer.bias.defined()) bias.narrow(0, 0, weight.size(0)).copy_(layer.bias);
    return {padded.view({blocks, rows.block, rows.inputs}).transpose(1, 2).flatten(), bias};
  }
};

// The vectors of means and gates include the tail of the last block.
std::vector<Layer> layers_of(const SqueezeExciteProblem& p) {
  const std::int64_t padded = GateRows(p).padded_channels();
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < p.layers.size(); ++i) {
    const bool first = i == 0, last = i + 1 == p.layers.size();
    const auto& layer = p.layers[i];
    layers.emplace_back(layer, first ? padded : layer.inputs, last ? padded : layer.outputs);
  }
  return layers;
}

at::Tensor pack(const std::vector<Layer>& sizes, const std::vector<SqueezeExciteLayer>& layers) {
  std::int64_t count = 0;
  for (const Layer& layer : sizes) count += layer.size();
  trace::Timed timed(trace::Kind::kPack, "squeeze_excite",
                     count * static_cast<std::int64_t>(sizeof(float)));
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    for (at::Tensor& part : sizes[i].pack(layers[i])) parts.push_back(std::move(part));
  }
  return at::cat(parts);
}

class Runner {
 public:
  explicit Runner(const SqueezeExciteProblem& p)
      : rows_(p),
        layers_(layers_of(p)),
        gate_(p.gate),
        epilogue_(p.epilogue),
        is_bfloat16_(p.dtype == at::kBFloat16),
        table_(rows_.lanes % 8 == 0 ? kernels::kernels_for(rows_.lanes) : kernels::kernels()) {
    group_ = std::clamp<std::int64_t>(kGroupElements / std::max(rows_.image_size(), 1L), 1,
                                      LinearRows::kMostRows);
    const std::int64_t images = std::min(group_, rows_.images);
    std::int64_t widest = rows_.padded_channels();
    for (const Layer& layer : layers_) widest = std::max(widest, layer.rows.outputs);
    if (is_bfloat16_) element_ = 2;
    sums_.resize(static_cast<std::size_t>(images * rows_.blocks * rows_.parts * rows_.lanes));
    for (auto& vectors : vectors_) vectors.resize(static_cast<std::size_t>(images * widest));
  }

  void operator()(SqueezeExciteBuffers buffers) {
    for (std::int64_t first = 0; first < rows_.images; first += group_) {
      const std::int64_t images = std::min(group_, rows_.images - first);
      find_means(buffers.src, images);
      const float* gates = run_layers(buffers.weights, images);
      scale(buffers, gates, images);
      const std::int64_t elements = images * rows_.image_size();
      buffers.src = at(buffers.src, elements);
      buffers.dst = const_cast<void*>(at(buffers.dst, elements));
      buffers.residual = at(buffers.residual, elements);
    }
  }

 private:
  // The address `elements` numbers behind one; null of null.
  const void* at(const void* data, std::int64_t elements) const {
    return data ? static_cast<const char*>(data) + elements * element_ : nullptr;
  }

  // Calls f(begin, end) for ranges of the parts of some images.
  template <typename F>
  void for_parts(std::int64_t images, F&& f) const {
    parallel_units(images * rows_.blocks * rows_.parts, rows_.part * rows_.lanes / kCheap,
                   [&](std::int64_t begin, std::int64_t end) { f(begin, end); });
  }

  // vectors_[0] [images, padded channels] = means of src
  void find_means(const void* src, std::int64_t images) {
    for_parts(images, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const kernels::PixelSums of_part{.src = at(src, rows_.offset(unit)),
                                         .block = rows_.lanes,
                                         .pixels = rows_.size(unit),
                                         .sum = sums_.data() + unit * rows_.lanes};
        (is_bfloat16_ ? table_.sum_pixels_bfloats : table_.sum_pixels)(of_part);
        if (exact::all_finite(of_part.sum, rows_.lanes)) continue;
        std::vector<double> exactly(static_cast<std::size_t>(rows_.lanes));
        exact::sums(of_part, is_bfloat16_ ? at::kBFloat16 : at::kFloat, exactly.data());
        std::ranges::copy(exactly, of_part.sum);
      }
    });
    const float one_of_all = 1.f / static_cast<float>(rows_.pixels);
    const std::int64_t row_sums = rows_.parts * rows_.lanes;
    parallel_units(images * rows_.blocks, row_sums, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float* sum = sums_.data() + row * row_sums;
        float* mean = vectors_[0].data() + row * rows_.lanes;
        std::fill_n(mean, rows_.lanes, 0.f);
        for (std::int64_t i = 0; i < row_sums; ++i) mean[i % rows_.lanes] += sum[i];
        for (std::int64_t lane = 0; lane < rows_.lanes; ++lane) mean[lane] *= one_of_all;
      }
    });
  }

  // vectors_[0] -> the result of the last layer, [images, padded channels]
  const float* run_layers(const float* weights, std::int64_t images) {
    const float* src = vectors_[0].data();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      float* dst = vectors_[1 - i % 2].data();
      LinearRows rows = layers_[i].rows;
      rows.rows = images;
      rows.src = src;
      rows.weights = weights;
      rows.bias = weights + layers_[i].weights_size();
      rows.dst = dst;
      parallel_units(layers_[i].blocks, rows.weights_stride,
                     [&](std::int64_t begin, std::int64_t end) {
                       kernels::kernels().linear_rows(rows, begin, end);
                     });
      weights += layers_[i].size();
      src = dst;
    }
    return src;
  }

  void scale(const SqueezeExciteBuffers& buffers, const float* gates, std::int64_t images) const {
    for_parts(images, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t unit = end; unit-- > begin;) {
        const std::int64_t row = unit / rows_.parts, first_element = rows_.offset(unit);
        const std::int64_t first = row % rows_.blocks * rows_.lanes;
        const auto gate = is_bfloat16_ ? table_.gate_pixels_bfloats : table_.gate_pixels;
        gate({.src = at(buffers.src, first_element),
              .residual = at(buffers.residual, first_element),
              .gates = gates + row * rows_.lanes,
              .dst = const_cast<void*>(at(buffers.dst, first_element)),
              .block = rows_.lanes,
              .pixels = rows_.size(unit),
              .channels = std::min(rows_.lanes, rows_.channels - first),
              .gate = gate_,
              .epilogue = epilogue_});
      }
    });
  }

  GateRows rows_;
  std::vector<Layer> layers_;
  Gate gate_;
  Epilogue epilogue_;
  bool is_bfloat16_;
  std::int64_t element_ = 4;  // bytes
  const kernels::Kernels& table_;
  std::int64_t group_;  // images at a time
  std::vector<float> sums_;
  std::array<std::vector<float>, 2> vectors_;
};

std::optional<SqueezeExcitePlan> plan_three_passes(const SqueezeExciteProblem& problem) {
  std::vector<Layer> layers = layers_of(problem);
  std::string format = "squeeze_excite";
  for (const Layer& layer : layers) {
    format += text(" ", layer.rows.inputs, "x", layer.rows.outputs, "/", layer.rows.block);
  }
  return SqueezeExcitePlan{
      .weights_format = std::move(format),
      .pack = [layers = std::move(layers)](const auto& weights) { return pack(layers, weights); },
      .run = Runner(problem)};
}

const Implementations<SqueezeExciteProblem, SqueezeExcitePlan> kSqueezeExciteImplementations(
    "squeeze_excite", {{.name = "three_passes", .plan = plan_three_passes}});

}  // namespace

SqueezeExcitePlan plan_squeeze_excite(const SqueezeExciteProblem& problem) {
  auto named = kSqueezeExciteImplementations.choose(problem, kSqueezeExciteImplementations.forced(),
                                                    [&] { return text(problem.dims); });
  kSqueezeExciteImplementations.set_last(named->name);
  return std::move(named->plan);
}

}  // namespace torch_blocked
