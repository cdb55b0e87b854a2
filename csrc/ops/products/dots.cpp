// Runs convolutions by dot products. A group of output vectors meets the blocks of src that its
// channels see, and at each tap the 32-bit groups of a block. If groups of channels are smaller
// than a vector, weights between channels that do not meet are 0. Src is read in place if it needs
// no padding or widening. Otherwise each thread copies it, row by row with padding, to a band of
// its own.
#include "ops/products/dots.h"

#include <algorithm>

#include "format/errors.h"
#include "format/sizes.h"
#include "kernels/kernels.h"
#include "runtime/memory/packed_place.h"
#include "runtime/memory/workspace.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

// A band of this size stays in L2 beside the weights.
constexpr std::int64_t kBandBytes = 192 << 10;

constexpr std::int64_t kBits = 4;  // bytes of a group

}  // namespace

Dots::Dots(const ConvolutionProblem& problem, const SpatialSizes& sizes, DotNumbers numbers,
           std::uint8_t padding, const OutputGrid& grid)
    : s_(sizes),
      grid_(grid),
      n_(problem.src_dims[0]),
      ic_(problem.src_dims[1]),
      oc_(problem.dst_dims[1]),
      conv_groups_(problem.groups),
      width_(kernels::kernels().width),
      src_block_(problem.src_format.block),
      src_blocks_(ceil_div(ic_, src_block_)),
      numbers_(numbers),
      per_group_(numbers == DotNumbers::kBytes ? 4 : 2),
      element_(numbers == DotNumbers::kBfloats ? 2 : 1),
      padding_(padding),
      in_place_(!words()) {
  for (std::size_t i = 0; i < 3; ++i) {
    in_place_ &= s_.padding[i] == 0 && reach(i, s_.out[i]) <= s_.in[i];
  }
  if (spreads()) {
    const std::int64_t inputs = ic_ / conv_groups_;
    for (std::int64_t lane = 0; lane < width_; ++lane) {
      lanes_.push_back(static_cast<std::int32_t>(lane / inputs * inputs / per_group_));
    }
  }
  groups_ = make_groups();
}

// Whether each lane of an output vector reads only the channels of its own group from a block of
// src. That takes a fraction of the products that zeros beside small groups would take. The
// instructions spread lanes of 16 bytes of src, or of 8 bytes, which AVX-512 cannot do for words.
bool Dots::spreads() const {
  const std::int64_t inputs = ic_ / conv_groups_, outputs = oc_ / conv_groups_;
  const bool has_kernel = numbers_ == DotNumbers::kBytes || (words() && width_ == 8);
  return has_kernel && conv_groups_ > 1 && inputs == outputs && inputs < width_ &&
         width_ % inputs == 0 && inputs % per_group_ == 0 && src_block_ == width_;
}

// The 32-bit groups of src channels that a vector of output channels sees.
Range Dots::seen_by(std::int64_t vector) const {
  const std::int64_t inputs = ic_ / conv_groups_, outputs = oc_ / conv_groups_;
  if (!lanes_.empty()) {
    const std::int64_t begin = vector * groups_of_block();
    return {begin, begin + inputs / per_group_};
  }
  const std::int64_t first = vector * width_ / outputs,
                     last = (std::min((vector + 1) * width_, oc_) - 1) / outputs;
  return {first * inputs / per_group_, ceil_div((last + 1) * inputs, per_group_)};
}

// If rows have few pixels, more vectors at a time keep the multipliers busy.
std::vector<Dots::Group> Dots::make_groups() const {
  const std::int64_t vectors = ceil_div(oc_, width_);
  const std::int64_t row = taps() > 1 ? s_.out[2] : s_.out[1] * s_.out[2];
  const bool few = row <= kernels::kernels().dot_sizes->pixels[4] / 2;
  std::vector<Group> groups;
  std::int64_t weights = 0;
  for (std::int64_t v = 0; v < vectors;) {
    const Range seen = seen_by(v);
    std::int64_t count = 1;
    for (const std::int64_t more : {2, 4}) {
      if ((more == 4 && !few) || v + more > vectors) break;
      const Range last = seen_by(v + more - 1);
      if (last.begin == seen.begin && last.end == seen.end) count = more;
    }
    groups.push_back({v, count, seen.begin, seen.end, weights});
    weights += (seen.end - seen.begin) * taps() * count * width_ * kBits;
    v += count;
  }
  return groups;
}

std::int64_t Dots::packed_bytes() const {
  const Group& last = groups_.back();
  return last.weights + (last.end - last.begin) * taps() * last.vectors * width_ * kBits;
}

std::string Dots::weights_format() const {
  static constexpr std::array kNames{"bytes", "words", "bfloat16"};
  return text("dots of ", kNames[static_cast<std::size_t>(numbers_)], " in ", width_, ", ",
              groups_[0].vectors, " vectors, src in ", src_block_,
              lanes_.empty() ? "" : ", spread");
}

// Calls f(first 32-bit group, groups, tap) for the parts of blocks that a group of vectors sees, in
// the order of the weights.
template <typename F>
void Dots::for_segments(const Group& group, F&& f) const {
  const std::int64_t size = groups_of_block();
  for (std::int64_t first = group.begin; first < group.end;) {
    const std::int64_t count = std::min((first / size + 1) * size, group.end) - first;
    for (std::int64_t tap = 0; tap < taps(); ++tap) f(first, count, tap);
    first += count;
  }
}

template <typename From, typename To>
void Dots::pack_group(const Group& group, const From* weight, std::uint8_t* packed) const {
  const std::int64_t inputs = ic_ / conv_groups_, outputs = oc_ / conv_groups_;
  auto* to = reinterpret_cast<To*>(packed + group.weights);
  const auto of = [&](std::int64_t oc, std::int64_t ic, std::int64_t tap) -> To {
    if (oc >= oc_ || ic >= ic_ || ic / inputs != oc / outputs) return 0;
    return static_cast<To>(weight[(oc * inputs + ic % inputs) * taps() + tap]);
  };
  for_segments(group, [&](std::int64_t first, std::int64_t count, std::int64_t tap) {
    for (std::int64_t g = first; g < first + count; ++g) {
      for (std::int64_t lane = 0; lane < group.vectors * width_; ++lane) {
        // In spread groups each lane counts from its own first group.
        const std::int64_t from = lanes_.empty() ? g : g + lanes_[static_cast<std::size_t>(lane)];
        for (std::int64_t i = 0; i < per_group_; ++i) {
          *to++ = of(group.first * width_ + lane, from * per_group_ + i, tap);
        }
      }
    }
  });
}

at::Tensor Dots::pack(const at::Tensor& weight) const {
  const at::Tensor dense = weight.contiguous(), packed = empty_packed(packed_bytes(), at::kByte);
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(weight.nbytes() + packed.nbytes()));
  auto* to = packed.mutable_data_ptr<std::uint8_t>();
  const void* from = dense.const_data_ptr();
  parallel_units(std::ssize(groups_), kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Group& group = groups_[static_cast<std::size_t>(i)];
      switch (numbers_) {
        case DotNumbers::kBytes:
          pack_group<std::int8_t, std::int8_t>(group, static_cast<const std::int8_t*>(from), to);
          break;
        case DotNumbers::kWords:
          pack_group<std::int8_t, std::int16_t>(group, static_cast<const std::int8_t*>(from), to);
          break;
        case DotNumbers::kBfloats:  // their bits
          pack_group<std::uint16_t, std::uint16_t>(group, static_cast<const std::uint16_t*>(from),
                                                   to);
          break;
      }
    }
  });
  return packed;
}

// Threads share the rows. If the weights are larger than src, they share the output channels, and
// each reads only its own weights. Shares are equal up to a row.
Dots::Cut Dots::cut() const {
  const std::int64_t planes = n_ * s_.out[0], groups = std::ssize(groups_), rows = s_.out[1];
  const std::int64_t row_bytes = src_blocks_ * s_.kernel[0] * reach(2, s_.out[2]) * pixel_bytes() *
                                 (words() ? 2 : 1) * s_.stride[1];
  const std::int64_t cached = std::min(ceil_div(rows * row_bytes, kBandBytes), rows);
  if (threads() == 1) return {cached, 1};
  const std::int64_t wanted = 3 * threads(), src_bytes = planes * rows * row_bytes;
  if (packed_bytes() > src_bytes && groups >= 2 * threads()) {
    return {cached, std::min(groups, round_up(ceil_div(wanted, planes * cached), threads()))};
  }
  const std::int64_t least = std::max(cached, ceil_div(2 * threads(), planes));
  const std::int64_t bands = std::min(round_up(least, threads()), rows);
  return {bands, std::clamp<std::int64_t>(wanted / (planes * bands), 1, groups)};
}

ByteRows Dots::band_row() const {
  return {.columns = reach(2, s_.out[2]),
          .before = s_.padding[2],
          .src_columns = s_.in[2],
          .pixel_bytes = pixel_bytes(),
          .zero = padding_,
          .words = words()};
}

// Fills a band [blocks, planes of taps, rows, columns, block], with padding around the image.
Dots::Source Dots::fill_band(const Band& band, const std::uint8_t* src, std::uint8_t* to) const {
  const std::int64_t rows = reach(1, band.rows);
  const ByteRows filled = band_row();
  Source source{.first = to, .block = 0, .plane = 0, .row = 0, .pixel = 0};
  source.pixel = pixel_bytes() * (words() ? 2 : 1);
  source.row = filled.row_bytes();
  source.plane = rows * source.row;
  source.block = s_.kernel[0] * source.plane;
  for (std::int64_t block = 0; block < src_blocks_; ++block) {
    for (std::int64_t kd = 0; kd < s_.kernel[0]; ++kd) {
      const std::int64_t z = band.plane * s_.stride[0] - s_.padding[0] + kd * s_.dilation[0];
      for (std::int64_t r = 0; r < rows; ++r, to += source.row) {
        const std::int64_t y = band.row * s_.stride[1] - s_.padding[1] + r;
        const bool inside = z >= 0 && z < s_.in[0] && y >= 0 && y < s_.in[1];
        const std::int64_t at = (block * s_.in[0] + z) * s_.in[1] + y;
        filled.fill(inside ? src + at * s_.in[2] * pixel_bytes() : nullptr, to);
      }
    }
  }
  return source;
}

Dots::Source Dots::in_place(const Band& band, const std::uint8_t* src) const {
  const std::int64_t row = s_.in[2] * pixel_bytes(), plane = s_.in[1] * row;
  const std::uint8_t* first =
      src + band.plane * s_.stride[0] * plane + band.row * s_.stride[1] * row;
  return {first, s_.in[0] * plane, s_.dilation[0] * plane, row, pixel_bytes()};
}

void Dots::set_segments(const Source& source, const Group& group,
                        std::vector<kernels::DotSegment>& segments) const {
  segments.clear();
  for_segments(group, [&](std::int64_t first, std::int64_t count, std::int64_t tap) {
    const std::int64_t kw = tap % s_.kernel[2], kh = tap / s_.kernel[2] % s_.kernel[1],
                       kd = tap / s_.kernel[2] / s_.kernel[1];
    const std::int64_t offset = first / groups_of_block() * source.block + kd * source.plane +
                                kh * s_.dilation[1] * source.row +
                                kw * s_.dilation[2] * source.pixel +
                                first % groups_of_block() * kBits;
    // With the few channels of a picture, a pixel is one group, and adjacent taps are one
    // segment.
    kernels::DotSegment* last = segments.empty() ? nullptr : &segments.back();
    if (last && last->offset + last->groups * kBits == offset) {
      last->groups += count;
    } else {
      segments.push_back({offset, count});
    }
  });
}

// Makes `rows` rows of dst, from the rows with which source and target begin. `segments` is
// scratchpad.
void Dots::run_groups(const Operands& operands, const Source& source, const Target& target,
                      std::int64_t rows, Range groups,
                      std::vector<kernels::DotSegment>& segments) const {
  const Group* of = nullptr;  // the group of `segments`: without conv groups all see the same
  for (std::int64_t g = groups.begin; g < groups.end; ++g) {
    const Group& group = groups_[static_cast<std::size_t>(g)];
    if (!of || of->begin != group.begin || of->end != group.end) {
      set_segments(source, group, segments);
    }
    of = &group;
    run_group(operands, source, target, rows, group, segments);
  }
}

void Dots::run_group(const Operands& operands, const Source& source, const Target& target,
                     std::int64_t rows, const Group& group,
                     const std::vector<kernels::DotSegment>& segments) const {
  const std::int64_t element = operands.is_float32 ? 4 : element_;
  const std::int64_t dst_step = grid_.step[2] * width_, pixel = dst_step * element;
  const std::int64_t plane = target.block / element;
  // Adjacent rows without a gap run as one.
  const bool merges = s_.kernel[1] == 1 && s_.stride[1] == 1 &&
                      source.row == s_.out[2] * s_.stride[2] * source.pixel &&
                      target.row == s_.out[2] * pixel;
  kernels::DotTiles tiles{
      .src = nullptr,
      .src_step = s_.stride[2] * source.pixel,
      .src_row = 0,
      .segments = segments.data(),
      .count = std::ssize(segments),
      .weights = static_cast<const std::uint8_t*>(operands.weights) + group.weights,
      .pixels = 0,
      .vectors = group.vectors,
      .rows = 0,
      .rows_src = 0,
      .rows_residual = 0,
      .rows_dst = 0,
      .lanes = lanes_.empty() ? nullptr : lanes_.data(),
      .channels = operands.channels + group.first,
      .residual = nullptr,
      .residual_scale = operands.residual_scale,
      .end = operands.end,
      .dst = nullptr,
      .dst_step = dst_step,
      .dst_offsets = {0, plane, 2 * plane, 3 * plane},
      .is_float32 = operands.is_float32};
  const kernels::Kernels& table = kernels::kernels();
  const std::array same{table.dot_byte_tiles, table.dot_word_tiles, table.dot_bfloat_tiles},
      spread{table.dot_byte_spread_tiles, table.dot_word_spread_tiles, table.dot_bfloat_tiles};
  const auto run = (lanes_.empty() ? same : spread)[static_cast<std::size_t>(numbers_)];
  // Two short rows form one tile, which reads the weights once for both. At 7x7 they come from
  // L3.
  const auto vectors = static_cast<std::size_t>(group.vectors);
  const bool pairs = !merges && target.row == s_.out[2] * pixel &&
                     2 * s_.out[2] <= table.dot_sizes->pixels[vectors];
  const std::int64_t at_once = merges ? rows : pairs ? 2 : 1;
  tiles.rows_src = at_once * s_.stride[1] * source.row;
  tiles.rows_dst = at_once * target.row;
  tiles.rows_residual = tiles.rows_dst / element * element_;
  tiles.src_row = pairs ? s_.stride[1] * source.row : 0;
  tiles.pixels = at_once * s_.out[2];
  const auto run_rows = [&](std::int64_t row, std::int64_t count) {
    const std::int64_t at = group.first * target.block + row * target.row;
    tiles.src = source.first + row * s_.stride[1] * source.row;
    tiles.dst = target.first + at;
    if (target.residual) tiles.residual = target.residual + at / element * element_;
    tiles.rows = count;
    run(tiles);
  };
  const std::int64_t whole = rows / at_once;
  if (whole > 0) run_rows(0, whole);
  if (whole * at_once < rows) {  // one row is left over from pairs
    tiles.src_row = 0;
    tiles.pixels = s_.out[2];
    run_rows(whole * at_once, 1);
  }
}

Dots::Target Dots::target_of(const Operands& operands, const Band& band) const {
  const auto& [dims, first, step] = grid_;
  const std::int64_t element = operands.is_float32 ? 4 : element_, row = dims[2] * width_;
  const std::int64_t plane = dims[0] * dims[1] * row;
  const std::int64_t z = first[0] + band.plane * step[0], y = first[1] + band.row * step[1];
  const std::int64_t at =
      band.image * ceil_div(oc_, width_) * plane + (z * dims[1] + y) * row + first[2] * width_;
  const auto* residual = static_cast<const char*>(operands.residual);
  return {static_cast<char*>(operands.dst) + at * element,
          residual ? residual + at * element_ : nullptr, plane * element, step[1] * row * element};
}

std::optional<RowStage> Dots::row_stage() const {
  if (words() || s_.kernel[0] != 1 || s_.in[0] != 1 || s_.padding[0] != 0) return std::nullopt;
  return RowStage{
      .window = {s_.kernel[1], s_.stride[1], s_.padding[1], s_.dilation[1]},
      .src = in_place_ ? ByteRows{s_.in[2], 0, s_.in[2], pixel_bytes(), 0, false} : band_row(),
      .n = n_,
      .src_rows = s_.in[1],
      .src_blocks = src_blocks_,
      .dst_rows = s_.out[1],
      .dst_columns = s_.out[2],
      .dst_blocks = ceil_div(oc_, width_),
      .dst_pixel_bytes = width_ * element_,
      .weight_bytes = packed_bytes()};
}

void Dots::run_rows(const Operands& operands, const BlockedRows& src, const BlockedRows& dst,
                    Range rows) const {
  thread_local std::vector<kernels::DotSegment> segments;
  const std::int64_t first = rows.begin * s_.stride[1] - s_.padding[1];
  run_groups(operands, {src.at(0, first), src.block, 0, src.row, pixel_bytes()},
             {reinterpret_cast<char*>(dst.at(0, rows.begin)),
              static_cast<const char*>(operands.residual), dst.block, dst.row},
             rows.end - rows.begin, {0, std::ssize(groups_)}, segments);
}

void Dots::run(const Operands& operands) const {
  if (n_ * s_.out[0] * s_.out[1] * s_.out[2] == 0) return;
  const Cut cut = this->cut();
  const std::int64_t image = src_blocks_ * s_.in[0] * s_.in[1] * s_.in[2] * pixel_bytes();
  const std::int64_t groups = std::ssize(groups_);
  share_units(n_ * s_.out[0] * cut.bands * cut.chunks, kLargeUnit, [&](Pieces& pieces) {
    std::int64_t filled = -1;
    Source source{};
    std::vector<kernels::DotSegment> segments;
    for (Range piece; pieces.next(piece);) {
      for (std::int64_t unit = piece.begin; unit < piece.end; ++unit) {
        const std::int64_t i = unit / cut.chunks, chunk = unit % cut.chunks;
        const std::int64_t plane = i / cut.bands, part = i % cut.bands;
        const std::int64_t row = part * s_.out[1] / cut.bands;
        const Band band{plane / s_.out[0], plane % s_.out[0], row,
                        (part + 1) * s_.out[1] / cut.bands - row};
        if (filled != i) {
          const auto* src = static_cast<const std::uint8_t*>(operands.src) + band.image * image;
          const std::int64_t bytes = src_blocks_ * s_.kernel[0] * reach(1, band.rows) *
                                     reach(2, s_.out[2]) * pixel_bytes() * (words() ? 2 : 1);
          source = in_place_
                       ? in_place(band, src)
                       : fill_band(band, src,
                                   reinterpret_cast<std::uint8_t*>(workspace(ceil_div(bytes, 4))));
          filled = i;
        }
        run_groups(operands, source, target_of(operands, band), band.rows,
                   {chunk * groups / cut.chunks, (chunk + 1) * groups / cut.chunks}, segments);
      }
    }
  });
}

}  // namespace torch_blocked
