// Runs Strassen's product: cuts rows into parts and columns into groups, multiplies quarters by the
// tiles of direct convolution, and joins them.
#include "ops/products/strassen.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/rows/reorder.h"
#include "runtime/memory/packed_place.h"
#include "runtime/memory/workspace.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using kernels::kStrassenProducts;

// The most rows of a half that are worked on at a time. Their left side fills 1 / kPartOfBand of
// band_bytes, which is half of L2. All products of a span of groups take about as much.
constexpr std::int64_t kMostStrassenRows = 112, kPartOfBand = 2;
// The most lanes that are summed in registers before they join the sum in memory.
constexpr std::int64_t kStrassenChain = 512;
// The least vectors of a quarter, and its least rows, in tiles.
constexpr std::int64_t kLeastVectors = 3, kLeastTiles = 1;
constexpr std::int64_t kUnitsPerThread = 4;
// If there are few groups of columns, the rows are cut too, so that threads can share the work
// evenly. 197 rows of 768 to 192 have 3 groups, and one of two threads would take two of them. The
// cut must not depend on the number of threads, because it decides which rows are summed.
constexpr std::int64_t kLeastUnits = 6, kLeastPartTiles = 2;

std::int64_t half_of(std::int64_t size) { return ceil_div(size, 2); }

// Makes the right sides from the quarters e, f, g and h of the weights
// (kernels/matrix/strassen.cpp), in the order of the products and `stride` floats apart.
void sum_quarters(const std::array<const float*, 4>& quarters, std::int64_t floats,
                  std::int64_t stride, float* to) {
  const auto [e, f, g, h] = quarters;
  for (std::int64_t i = 0; i < floats; ++i) {
    float* side = to + i;
    side[0] = e[i] + h[i];
    side[stride] = e[i];
    side[2 * stride] = f[i] - h[i];
    side[3 * stride] = g[i] - e[i];
    side[4 * stride] = h[i];
    side[5 * stride] = e[i] + f[i];
    side[6 * stride] = g[i] + h[i];
  }
}

}  // namespace

Strassen::Strassen(const kernels::Kernels& kernels, std::int64_t images, std::int64_t rows,
                   std::int64_t lanes, std::int64_t columns)
    : kernels_(&kernels), images_(images), rows_(rows), lanes_(lanes), columns_(columns) {
  half_vectors_ = half_of(ceil_div(lanes, width()));
  half_columns_ = half_of(ceil_div(columns, width()));
  groups_ = ceil_div(half_columns_, sizes().vectors);
  const std::int64_t tile = sizes().pixels[static_cast<std::size_t>(sizes().vectors - 1)];
  const std::int64_t row_bytes = half_lanes() * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most = std::clamp(sizes().band_bytes / kPartOfBand / row_bytes / tile,
                                       std::int64_t{1}, kMostStrassenRows / tile) *
                            tile;
  const std::int64_t fewest = ceil_div(half_of(rows), most);
  const std::int64_t shared = ceil_div(kLeastUnits, std::max<std::int64_t>(images, 1) * groups_);
  parts_ = std::max(fewest, std::min(shared, rows / (2 * kLeastPartTiles * tile)));
}

const char* Strassen::refuses(const kernels::Kernels& kernels, std::int64_t rows,
                              std::int64_t lanes, std::int64_t columns) {
  const kernels::DirectSizes& sizes = *kernels.direct_sizes;
  const std::int64_t tile = sizes.pixels[static_cast<std::size_t>(sizes.vectors - 1)];
  const bool large =
      std::min(lanes, columns) >= 2 * kLeastVectors * sizes.width && rows >= 2 * kLeastTiles * tile;
  return large ? nullptr : "is for larger matrices";
}

double Strassen::share(std::int64_t width, std::int64_t lanes, std::int64_t columns) {
  const double sums = width > 8 ? 1.35 : 2;
  const double share =
      7. / 8 + sums * static_cast<double>(width) *
                   (1 / static_cast<double>(lanes) + 1 / static_cast<double>(columns));
  return kHandicap * share;
}

Strassen::Group Strassen::group(std::int64_t index) const {
  const std::int64_t first = index * sizes().vectors;
  const std::int64_t left = std::min(sizes().vectors, half_columns_ - first);
  const std::int64_t all = ceil_div(columns_, width());
  return {first, left, std::clamp<std::int64_t>(all - half_columns_ - first, 0, left)};
}

Strassen::Part Strassen::part(std::int64_t index) const {
  const std::int64_t i = index % parts_;
  const std::int64_t upper = i * rows_ / parts_, end = (i + 1) * rows_ / parts_;
  const std::int64_t half = half_of(end - upper);
  return {index / parts_, upper, end - half, half};
}

void Strassen::pack_group(const float* weight, const Group& group, float* to) const {
  const std::int64_t wide = group.left * width(), floats = half_lanes() * wide;
  std::vector<float> quarters(static_cast<std::size_t>(4 * floats), 0.f);
  std::array<const float*, 4> parts;
  for (std::int64_t i = 0; i < 4; ++i) {
    float* quarter = quarters.data() + i * floats;
    parts[static_cast<std::size_t>(i)] = quarter;
    const std::int64_t lane = i / 2 * half_lanes();
    const std::int64_t column = (i % 2 * half_columns_ + group.first) * width();
    const std::int64_t lanes = std::min(half_lanes(), lanes_ - lane);
    const std::int64_t columns = std::min(wide, columns_ - column);
    if (columns > 0) {
      kernels_->transpose({weight + column * lanes_ + lane, lanes_, quarter, wide, columns, lanes});
    }
  }
  sum_quarters(parts, floats, side_weights(), to);
}

at::Tensor Strassen::pack(const at::Tensor& weight) const {
  const at::Tensor packed = empty_packed(kStrassenProducts * side_weights(), weight.scalar_type());
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(weight.nbytes() + packed.nbytes()));
  const auto* from = weight.const_data_ptr<float>();
  float* to = packed.mutable_data_ptr<float>();
  parallel_units(groups_, kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Group each = group(i);
      pack_group(from, each, to + each.first * half_lanes() * width());
    }
  });
  return packed;
}

struct Strassen::Work {
  std::vector<kernels::DirectSegment> segments;  // of a side
  std::int64_t rows = 0;
  float *sides = nullptr, *products = nullptr;  // [products, vectors, rows, width]; of each group
                                                // [products, rows, columns of the group]
};

void Strassen::split(const Part& part, const VectorSteps& src, const float* from,
                     Work& work) const {
  work.rows = part.half;
  work.segments.clear();
  for (std::int64_t vector = 0; vector < half_vectors_; ++vector) {
    work.segments.push_back({vector * part.half * width(), width(), vector * width()});
  }
  work.segments.push_back({0, 0, 0});  // only prefetched
  from += part.image * src.image;
  kernels_->strassen_split({.upper = from + part.upper * src.row,
                            .lower = from + part.lower * src.row,
                            .row_step = src.row,
                            .vector_step = src.vector,
                            .rows = part.half,
                            .vectors = half_vectors_,
                            .all_vectors = ceil_div(lanes_, width()),
                            .to = work.sides});
}

// to [rows, columns of the group] = the left side of one product x the group's right side.
void Strassen::multiply(std::int64_t product, const Group& group, const float* weights, Work& work,
                        float* to) const {
  const std::int64_t wide = group.left * width(),
                     chain = std::min(kStrassenChain, sizes().lanes) / width();
  for (std::int64_t vector = 0; vector < half_vectors_; vector += chain) {
    const std::int64_t count = std::min(chain, half_vectors_ - vector);
    kernels_->direct_tiles(
        {.src = work.sides + product * half_vectors_ * work.rows * width(),
         .src_step = width(),
         .segments = work.segments.data() + vector,
         .count = count,
         .weights = weights + product * side_weights() + group.first * half_lanes() * width(),
         .bias = nullptr,
         .residual = nullptr,
         .dst = to,
         .pixels = work.rows,
         .vectors = group.left,
         .channels = wide,
         .dst_step = wide,
         .dst_offsets = {0, width(), 2 * width()},
         .parts = 0,
         .part_stride = 0,
         .first = vector == 0,
         .last = vector + count == half_vectors_,
         .ahead = count * width() * wide,
         .row = 0,
         .rows = 1,
         .stream = false,
         .activation = {}});
  }
}

// The number of spans into which the groups are cut: enough that their products stay in L2 and that
// all threads have work. Each thread has left sides of its own.
std::int64_t Strassen::spans() const {
  const std::int64_t group_bytes = kStrassenProducts * (part(0).half + 1) * sizes().vectors *
                                   width() * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t fitting =
      std::max<std::int64_t>(sizes().band_bytes / kPartOfBand / group_bytes, 1);
  const std::int64_t shared = ceil_div(kUnitsPerThread * threads(), images_ * parts_);
  return std::min(groups_, std::max(ceil_div(groups_, fitting), shared));
}

void Strassen::join(const Part& part, const Group& group, const float* products,
                    const VectorSteps& dst, const kernels::Epilogue& epilogue,
                    const Buffers& buffers) const {
  const std::int64_t offset =
      part.image * dst.image + part.upper * dst.row + group.first * dst.vector;
  kernels_->strassen_join({.products = products,
                           .rows = part.half,
                           .vectors = group.left,
                           .right_vectors = group.right,
                           .common = part.upper + part.half - part.lower,
                           .bias = buffers.bias ? buffers.bias + group.first * width() : nullptr,
                           .half = half_columns_ * width(),
                           .channels = columns_ - group.first * width(),
                           .residual = buffers.residual ? buffers.residual + offset : nullptr,
                           .dst = buffers.dst + offset,
                           .row_step = dst.row,
                           .vector_step = dst.vector,
                           .lower = (part.lower - part.upper) * dst.row,
                           .right = half_columns_ * dst.vector,
                           .epilogue = epilogue});
}

// Runs one product after the other, so that its left side stays in L2 for all groups of the span.
void Strassen::run(const VectorSteps& src, const VectorSteps& dst,
                   const kernels::Epilogue& epilogue, const Buffers& buffers) const {
  const std::int64_t spans = this->spans(), most_rows = part(0).half + 1;
  const std::int64_t sides = kStrassenProducts * half_vectors_ * most_rows * width();
  const auto floats_of = [&](const Group& g, std::int64_t rows) { return rows * g.left * width(); };
  const auto run_span = [&](const Part& part, Range span, Work& work) {
    for (std::int64_t product = 0; product < kStrassenProducts; ++product) {
      float* to = work.products;
      for (std::int64_t i = span.begin; i < span.end; ++i) {
        const std::int64_t floats = floats_of(group(i), part.half);
        multiply(product, group(i), buffers.weights, work, to + product * floats);
        to += kStrassenProducts * floats;
      }
    }
    const float* from = work.products;
    for (std::int64_t i = span.begin; i < span.end; ++i) {
      join(part, group(i), from, dst, epilogue, buffers);
      from += kStrassenProducts * floats_of(group(i), part.half);
    }
  };
  share_units(images_ * parts_ * spans, kLargeUnit, [&](Pieces& pieces) {
    const std::int64_t products =
        ceil_div(groups_, spans) * kStrassenProducts * most_rows * sizes().vectors * width();
    Work work;
    work.sides = workspace(sides + products);
    work.products = work.sides + sides;
    std::int64_t in_sides = -1;  // the part that these sides are split from
    for (Range piece; pieces.next(piece);) {
      for (std::int64_t i = piece.begin; i < piece.end; ++i) {
        const Part at = part(i / spans);
        if (std::exchange(in_sides, i / spans) != i / spans) split(at, src, buffers.src, work);
        const std::int64_t span = i % spans;
        run_span(at, {span * groups_ / spans, (span + 1) * groups_ / spans}, work);
      }
    }
  });
}

}  // namespace torch_blocked
