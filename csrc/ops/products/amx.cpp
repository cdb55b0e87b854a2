// Runs products by AMX tiles. A band of src is split into slots with padding around the image. A
// slot holds in one piece the 32 channels of a pixel that one instruction multiplies. Then all
// output channels go over the band.
#include "ops/products/amx.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/rows/reorder.h"
#include "ops/convolution_time.h"
#include "runtime/isa.h"
#include "runtime/memory/workspace.h"

namespace torch_blocked {
namespace {

// The slots of a band stay in L2 beside the weights of a pair of vectors.
constexpr std::int64_t kAmxBandBytes = 768 << 10;
// If all weights stay in L2, smaller bands are better, because they are read while they are in a
// nearer cache. But each band splits the weights again, so it needs enough pixels to hide that.
constexpr std::int64_t kNearWeights = 768 << 10, kNearBand = 128 << 10;
constexpr std::int64_t kLeastPixels = 128, kLeastNear = 256;
// The time for a number of src that another thread has written: 6 to 8 GB/s for each of 16 cores of
// a Xeon.
constexpr double kOtherMicroseconds = sizeof(float) / 8e3;

}  // namespace

bool AmxProducts::available() { return isa() == Isa::kAmx; }

AmxProducts::AmxProducts(AmxProblem problem) : p_(std::move(problem)) {
  SpatialSizes& s = p_.sizes;
  const Sizes3 ones{1, 1, 1};
  pixelwise_ =
      s.kernel == ones && s.padding == Sizes3{0, 0, 0} && s.in == s.out && p_.grid.dims == s.out;
  for (std::size_t i = 0; i < 3; ++i) pixelwise_ &= s.stride[i] == 1 || s.out[i] == 1;
  if (!pixelwise_) return;
  s.in = s.out = p_.grid.dims = {1, 1, s.in[0] * s.in[1] * s.in[2]};  // one long row
  s.stride = ones;
}

AmxProducts::Sizes3 AmxProducts::slots_of(std::int64_t rows, std::int64_t columns) const {
  const auto reach = [&](std::size_t i, std::int64_t outputs) {
    return (outputs - 1) * output_stride(i) + (p_.sizes.kernel[i] - 1) * p_.sizes.dilation[i] + 1;
  };
  return {reach(0, 1), reach(1, rows), reach(2, columns)};
}

std::int64_t AmxProducts::band_bytes(std::int64_t rows, std::int64_t columns) const {
  const auto [d, h, w] = slots_of(rows, columns);
  return steps() * d * h * w * Amx::kSlotBytes;
}

bool AmxProducts::halve(Cut& cut) const {
  const auto [planes, rows, columns] = p_.sizes.out;
  if (cut.row_bands < rows) {
    cut.row_bands = std::min(rows, 2 * cut.row_bands);
    return true;
  }
  const std::int64_t pixels = this->columns(cut);
  if (pixels <= 2 * Amx::kPixels) return false;
  cut.column_bands = ceil_div(columns, round_up(ceil_div(pixels, 2), 2 * Amx::kPixels));
  return true;
}

double AmxProducts::busiest(const Cut& cut) const {
  // Work in a microsecond on one thread: products of whole steps, vectors and tiles; bytes of
  // weights from memory; numbers of src that are split and of dst that are finished. Fitted to
  // 700 times of layers of 44 models on a Xeon, which spread by a factor of 1.2.
  constexpr double kFmas = 1.8e5, kBytes = 25e3, kSplit = 5e3, kFinish = 6.5e3;
  // On several threads, weights that are split again for another band count too. On one thread
  // they dominate a band only if bands are small.
  constexpr double kWeights = 8e3;
  const bool shared = threads() > 1;
  const auto real = [](std::int64_t count) { return static_cast<double>(count); };
  const std::int64_t all = std::max<std::int64_t>(bands(cut), 1), units = all * cut.chunks;
  const std::int64_t each = ceil_div(units, threads());
  const Sizes3 slots = slots_of(rows(cut), columns(cut));
  // A tile has pixels of one row only.
  const std::int64_t columns = round_up(this->columns(cut), pixelwise_ ? 1 : Amx::kPixels);
  const double pixels = real(rows(cut) * columns), lanes = real(steps() * Amx::kLanes);
  const double outputs = real(vectors() * Amx::kWidth) / real(cut.chunks);
  const double weights = real(taps()) * lanes * outputs;
  const double chunks = real(std::min(cut.chunks, each)), fills = real(ceil_div(each, cut.chunks));
  const double number = 1 / kSplit + (shared ? kOtherMicroseconds : 0);
  return real(each) * pixels * (weights / kFmas + outputs / kFinish) +
         chunks * weights * sizeof(float) / kBytes +
         (shared ? (real(each) - chunks) * weights / kWeights : 0) +
         fills * real(slots[0] * slots[1] * slots[2]) * lanes * number;
}

AmxProducts::Cut AmxProducts::cut() const {
  const std::int64_t weight_bytes = packed_floats() * static_cast<std::int64_t>(sizeof(float));
  const bool near = taps() == 1 && weight_bytes <= kNearWeights;
  const std::int64_t most = near ? kNearBand : kAmxBandBytes,
                     least = near ? kLeastNear : kLeastPixels;
  Cut cut{1, 1, 1};
  const auto too_large = [&] {
    const std::int64_t bytes = band_bytes(rows(cut), columns(cut));
    return bytes > kAmxBandBytes || (bytes > most && rows(cut) * columns(cut) >= 2 * least);
  };
  while (too_large() && halve(cut)) {
  }
  if (threads() == 1) return cut;
  // Minimises the work of the busiest thread. More bands split weights again, more chunks split
  // src again.
  Cut best = cut;
  do {
    for (std::int64_t chunks = 1; chunks <= pairs(); ++chunks) {
      const Cut other{cut.row_bands, cut.column_bands, chunks};
      if (busiest(other) < busiest(best)) best = other;
    }
  } while (rows(cut) * columns(cut) > 2 * Amx::kPixels && halve(cut));
  return best;
}

AmxProducts::Band AmxProducts::band_of(const Cut& cut, std::int64_t index) const {
  const auto& out = p_.sizes.out;
  const std::int64_t column = index % cut.column_bands;
  index /= cut.column_bands;
  const std::int64_t row = index % cut.row_bands;
  index /= cut.row_bands;
  // Columns in whole tiles.
  const std::int64_t tiles = ceil_div(out[2], Amx::kPixels);
  const auto column_at = [&](std::int64_t part) {
    return std::min(part * tiles / cut.column_bands * Amx::kPixels, out[2]);
  };
  const auto row_at = [&](std::int64_t part) { return part * out[1] / cut.row_bands; };
  return {index / out[0],    index % out[0],
          row_at(row),       row_at(row + 1) - row_at(row),
          column_at(column), column_at(column + 1) - column_at(column)};
}

// [steps, planes, rows, columns, parts, lanes]
void AmxProducts::fill(const Band& band, const float* src, std::uint8_t* slots) const {
  const SpatialSizes& s = p_.sizes;
  const auto [planes, rows, columns] = slots_of(band.rows, band.columns);
  const auto first = [&](std::size_t i, std::int64_t output) {
    return output * s.stride[i] - s.padding[i];
  };
  const std::int64_t step_bytes = planes * rows * columns * Amx::kSlotBytes;
  // Columns [begin, end) of the slots are inside src.
  const std::int64_t x = first(2, band.column), stride = slot_stride(2);
  const std::int64_t begin =
      std::clamp<std::int64_t>(ceil_div(std::max<std::int64_t>(-x, 0), stride), 0, columns);
  const std::int64_t end = std::clamp<std::int64_t>(
      ceil_div(std::max<std::int64_t>(s.in[2] - x, 0), stride), begin, columns);
  const auto clear = [&](std::uint8_t* to, std::int64_t count) {
    for (std::int64_t step = 0; step < steps() && count > 0; ++step) {
      std::memset(to + step * step_bytes, 0, static_cast<std::size_t>(count * Amx::kSlotBytes));
    }
  };
  const float* image = src + band.image * p_.src.image;
  for (std::int64_t plane = 0; plane < planes; ++plane) {
    const std::int64_t z = first(0, band.plane) + plane * slot_stride(0);
    for (std::int64_t row = 0; row < rows; ++row, slots += columns * Amx::kSlotBytes) {
      const std::int64_t y = first(1, band.row) + row * slot_stride(1);
      if (z < 0 || z >= s.in[0] || y < 0 || y >= s.in[1]) {
        clear(slots, columns);
        continue;
      }
      clear(slots, begin);
      clear(slots + end * Amx::kSlotBytes, columns - end);
      if (begin == end) continue;
      const std::int64_t pixel = (z * s.in[1] + y) * s.in[2] + x + begin * stride;
      kernels::kernels().amx_split({.src = image + pixel * p_.src.pixel,
                                    .pixel = stride * p_.src.pixel,
                                    .vector = p_.src.vector,
                                    .channels = p_.ic,
                                    .slots = slots + begin * Amx::kSlotBytes,
                                    .step_bytes = step_bytes,
                                    .count = end - begin});
    }
  }
}

std::vector<std::int64_t> AmxProducts::segments_of(const Band& band) const {
  const auto& [in, out, kernel, stride, padding, dilation] = p_.sizes;
  const auto [planes, rows, columns] = slots_of(band.rows, band.columns);
  std::vector<std::int64_t> segments;
  for (std::int64_t step = 0; step < steps(); ++step) {
    for (std::int64_t kd = 0; kd < kernel[0]; ++kd) {
      for (std::int64_t kh = 0; kh < kernel[1]; ++kh) {
        for (std::int64_t kw = 0; kw < kernel[2]; ++kw) {
          const std::int64_t z = step * planes + kd * dilation[0];
          segments.push_back(((z * rows + kh * dilation[1]) * columns + kw * dilation[2]) *
                             Amx::kSlotBytes);
        }
      }
    }
  }
  return segments;
}

void AmxProducts::run_band(const Band& band, Range pairs, const std::vector<std::int64_t>& segments,
                           const Memory& memory, const Buffers& buffers) const {
  const auto& [dims, origin, step] = p_.grid;
  const std::int64_t columns = slots_of(band.rows, band.columns)[2];
  const std::int64_t first = pairs.begin * 2 * Amx::kWidth;
  const auto index = [&](std::size_t i, std::int64_t output) {
    return origin[i] + output * step[i];
  };
  const std::int64_t row = index(0, band.plane) * dims[1] + index(1, band.row);
  const std::int64_t at = band.image * p_.dst.image +
                          (row * dims[2] + index(2, band.column)) * p_.dst.pixel +
                          first / Amx::kWidth * p_.dst.vector;
  kernels::kernels().amx_tiles({.slots = memory.slots,
                                .slot_step = output_stride(2) * Amx::kSlotBytes,
                                .slot_row = output_stride(1) * columns * Amx::kSlotBytes,
                                .segments = segments.data(),
                                .count = std::ssize(segments),
                                .weights = buffers.weights + pairs.begin * 2 * vector_floats(),
                                .rows = band.rows,
                                .pixels = band.columns,
                                .channels = std::min(p_.oc, pairs.end * 2 * Amx::kWidth) - first,
                                .bias = buffers.bias ? buffers.bias + first : nullptr,
                                .residual = buffers.residual ? buffers.residual + at : nullptr,
                                .dst = buffers.dst + at,
                                .dst_pixel = step[2] * p_.dst.pixel,
                                .dst_row = step[1] * dims[2] * p_.dst.pixel,
                                .dst_vector = p_.dst.vector,
                                .has_tail = p_.has_tail,
                                .sums = memory.sums,
                                .weight_parts = memory.weight_parts,
                                .epilogue = p_.epilogue});
}

// The scratchpad of this thread, for bands of at most these outputs.
AmxProducts::Memory AmxProducts::memory(std::int64_t rows, std::int64_t columns) const {
  // Tiles read up to a tile of pixels beyond the last.
  const std::int64_t slots =
      band_bytes(rows, columns) + Amx::kPixels * output_stride(2) * Amx::kSlotBytes;
  // One tile more, because their number in a row is made even.
  const std::int64_t tiles = rows * (ceil_div(columns, Amx::kPixels) + 1);
  const bool has_parts = steps() * taps() > Amx::kPartSegments;
  const std::int64_t sums = has_parts ? tiles * 2 * Amx::kPixels * Amx::kWidth : 0;
  float* first = workspace(sums + (Amx::kWeightPartsBytes + slots) / 4);
  auto* bytes = reinterpret_cast<std::uint8_t*>(first + sums);
  return {first, bytes, bytes + Amx::kWeightPartsBytes};
}

void AmxProducts::run(const Buffers& buffers) const {
  const auto& out = p_.sizes.out;
  if (p_.images * out[0] * out[1] * out[2] == 0) return;
  const Cut& cut = cuts_->get([this] { return this->cut(); });
  const std::int64_t most_rows = rows(cut);
  const std::int64_t most_columns =
      std::min(out[2], ceil_div(ceil_div(out[2], Amx::kPixels), cut.column_bands) * Amx::kPixels);
  share_units(bands(cut) * cut.chunks, kLargeUnit, [&](Pieces& pieces) {
    const Memory memory = this->memory(most_rows, most_columns);
    std::int64_t filled = -1;
    std::vector<std::int64_t> segments;
    Band band{};
    for (Range piece; pieces.next(piece);) {
      for (std::int64_t unit = piece.begin; unit < piece.end; ++unit) {
        const std::int64_t i = unit / cut.chunks, chunk = unit % cut.chunks;
        if (i != filled) {
          band = band_of(cut, i);
          fill(band, buffers.src, memory.slots);
          segments = segments_of(band);
          filled = i;
        }
        run_band(band, {chunk * pairs() / cut.chunks, (chunk + 1) * pairs() / cut.chunks}, segments,
                 memory, buffers);
      }
    }
  });
}

void AmxProducts::run_pixels(const Buffers& buffers, std::int64_t pixels, std::int64_t src_vector,
                             std::int64_t dst_vector) const {
  AmxProducts some(*this);
  some.p_.sizes.in = some.p_.sizes.out = some.p_.grid.dims = {1, 1, pixels};
  some.p_.src.vector = src_vector;
  some.p_.dst.vector = dst_vector;
  const Memory memory = some.memory(1, pixels);
  const Band band{0, 0, 0, 1, 0, pixels};
  some.fill(band, buffers.src, memory.slots);
  some.run_band(band, {0, pairs()}, some.segments_of(band), memory, buffers);
}

// Packs each step of a pair of vectors: [channels of the step, taps] of each output channel is
// transposed, and the taps are separated if there are several.
void AmxProducts::pack(const at::Tensor& weight, float* packed) const {
  const at::Tensor dense = weight.contiguous();  // [oc, ic, taps]
  const auto* from = dense.const_data_ptr<float>();
  const std::int64_t taps = this->taps(), steps = this->steps();
  parallel_units(
      pairs() * steps, Amx::kLanes * taps * Amx::kWidth, [&](std::int64_t begin, std::int64_t end) {
        std::vector<float> rows;
        for (std::int64_t unit = begin; unit < end; ++unit) {
          const std::int64_t pair = unit / steps, channel = unit % steps * Amx::kLanes;
          const std::int64_t first = pair * 2 * Amx::kWidth;
          const std::int64_t wide = std::min<std::int64_t>(2, vectors() - pair * 2) * Amx::kWidth;
          const std::int64_t channels = std::min(Amx::kLanes, p_.ic - channel),
                             outputs = std::min(wide, p_.oc - first);
          float* to = packed + pair * 2 * vector_floats() + channel * taps * wide;
          if (channels < Amx::kLanes) std::fill_n(to, Amx::kLanes * taps * wide, 0.f);
          if (taps > 1) rows.resize(static_cast<std::size_t>(channels * taps * wide));
          float* transposed = taps > 1 ? rows.data() : to;
          if (outputs < wide) std::fill_n(transposed, channels * taps * wide, 0.f);
          kernels::kernels().transpose({from + (first * p_.ic + channel) * taps, p_.ic * taps,
                                        transposed, wide, outputs, channels * taps});
          for (std::int64_t tap = 0; taps > 1 && tap < taps; ++tap) {
            for (std::int64_t i = 0; i < channels; ++i) {
              std::copy_n(transposed + (i * taps + tap) * wide, wide,
                          to + (tap * Amx::kLanes + i) * wide);
            }
          }
        }
      });
}

double AmxProducts::estimate(const AmxProblem& problem) {
  const AmxProducts products(problem);
  const Cut cut = products.cut();
  const double busiest = products.busiest(cut);
  if (threads() == 1) return busiest;
  // Other estimates do not count the time in which src comes from other threads, so this one
  // counts only what comes more than once.
  const Sizes3 slots = products.slots_of(products.rows(cut), products.columns(cut));
  const std::int64_t numbers =
      products.bands(cut) * slots[0] * slots[1] * slots[2] * products.steps() * Amx::kLanes;
  return threads() * busiest - static_cast<double>(numbers) * kOtherMicroseconds;
}

}  // namespace torch_blocked
