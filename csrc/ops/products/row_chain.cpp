// Runs chains of convolutions band by band. A buffer before each stage keeps the rows that the next
// band needs again.
#include "ops/products/row_chain.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "format/sizes.h"
#include "runtime/memory/workspace.h"

namespace torch_blocked {
namespace {

// The size of all buffers of a band, which stay in L2 beside the weights. Smaller bands move more
// rows and leave less than four rows for a depthwise kernel. On one thread MobileNetV2 on bytes
// takes 1.01 times as long with 256 KB, 1.04 with 128 and 1.1 with 64. EfficientNet-Lite0 in
// float32 takes 1.03 times as long with 256 KB, and as long with 900.
constexpr std::int64_t kChainBytes = 512 << 10;
constexpr std::int64_t kBeyond = 64;  // bytes that kernels read after the last row

// The rows of src under rows of dst, including padding.
Range under(const Window& window, Range rows) {
  const std::int64_t begin = rows.begin * window.stride - window.padding;
  return {begin, begin + window.reach(rows.end - rows.begin)};
}

Range inside(Range rows, std::int64_t count) {
  return {std::max<std::int64_t>(rows.begin, 0), std::min(rows.end, count)};
}

}  // namespace

RowChain::RowChain(std::vector<RowStage> stages) : stages_(std::move(stages)), most_rows_(1) {
  // A buffer holds whole rows, even if windows with strides leave the end of a row unread.
  for (RowStage& stage : stages_) {
    stage.src.columns = std::max(stage.src.columns, stage.src.before + stage.src.src_columns);
  }
  while (most_rows_ < stages_.back().dst_rows && bytes(most_rows_ + 1) <= kChainBytes) ++most_rows_;
}

// The rows that the buffer before each stage holds, for bands of `rows` rows of the last stage.
std::vector<std::int64_t> RowChain::capacities(std::int64_t rows) const {
  std::vector<std::int64_t> result(stages_.size());
  for (std::size_t k = stages_.size(); k-- > 0;) {
    result[k] = rows = stages_[k].window.reach(rows);
  }
  return result;
}

std::int64_t RowChain::bytes(std::int64_t rows) const {
  const std::vector<std::int64_t> capacity = capacities(rows);
  std::int64_t sum = 0;
  for (std::size_t k = stages_[0].reads_images() ? 1 : 0; k < stages_.size(); ++k) {
    sum += stages_[k].src_blocks * capacity[k] * stages_[k].src.row_bytes();
  }
  return sum;
}

// The walk of one thread over the images.
class RowChain::Walk {
 public:
  Walk(const RowChain& chain, const std::vector<RunRows>& runs, const Operands& operands,
       std::int64_t rows)
      : stages_(chain.stages_), runs_(runs), operands_(operands), buffers_(stages_.size()) {
    const std::vector<std::int64_t> capacity = chain.capacities(rows);
    std::int64_t bytes = 0;
    for (std::size_t k = 0; k < stages_.size(); ++k) {
      const RowStage& stage = stages_[k];
      if (is_image(k)) continue;
      Buffer& buffer = buffers_[k];
      buffer.offset = bytes;
      buffer.view.row = stage.src.row_bytes();
      buffer.view.block = capacity[k] * buffer.view.row;
      bytes += round_up(stage.src_blocks * buffer.view.block + kBeyond, 64);
    }
    auto* memory =
        reinterpret_cast<std::uint8_t*>(workspace(ceil_div(bytes, 4), WorkspaceOf::kChain));
    for (std::size_t k = 0; k < stages_.size(); ++k) {
      BlockedRows& view = buffers_[k].view;
      view.data = memory + buffers_[k].offset;
      if (!is_image(k)) pad(stages_[k], view.data, stages_[k].src_blocks * capacity[k]);
    }
  }

  // Makes rows of the last stage's dst.
  void band(std::int64_t image, Range rows) {
    if (image != image_) {
      for (Buffer& buffer : buffers_) buffer.rows = {0, 0};
      image_ = image;
    }
    // Finds the rows that each buffer must hold, and those it lacks, which the stage before it
    // makes.
    lacks_.assign(stages_.size(), {0, 0});
    Range made = rows;
    for (std::size_t k = stages_.size(); k-- > 0 && !is_image(k) && made.begin < made.end;) {
      lacks_[k] = move_to(k, under(stages_[k].window, made));
      made = inside(lacks_[k], stages_[k].src_rows);
    }
    for (std::size_t k = 0; k < stages_.size(); ++k) fill(k, lacks_[k]);
    const RowStage& last = stages_.back();
    const std::int64_t offset = image * last.dst_blocks * last.dst_plane();
    const BlockedRows dst{operands_.dst + offset, 0, last.dst_plane(), last.dst_row()};
    const auto* residual =
        operands_.residual ? operands_.residual + offset + rows.begin * last.dst_row() : nullptr;
    runs_.back()(src_of(stages_.size() - 1), residual, dst, rows);
  }

 private:
  struct Buffer {
    std::int64_t offset = 0;
    Range rows{0, 0};  // the rows that it holds
    BlockedRows view{};
  };

  // Whether a stage reads an image instead of a buffer.
  bool is_image(std::size_t k) const { return k == 0 && stages_[0].reads_images(); }

  // Moves rows so that a buffer begins with the first wanted row. Returns the rows that it lacks.
  Range move_to(std::size_t k, Range wanted) {
    Buffer& buffer = buffers_[k];
    const Range held = buffer.rows;
    const bool keeps = wanted.begin >= held.begin && wanted.begin < held.end;
    const Range kept{wanted.begin, keeps ? std::min(held.end, wanted.end) : wanted.begin};
    if (kept.begin < kept.end && kept.begin > held.begin) {
      for (std::int64_t b = 0; b < stages_[k].src_blocks; ++b) {
        std::memmove(buffer.view.at(b, held.begin), buffer.view.at(b, kept.begin),
                     static_cast<std::size_t>((kept.end - kept.begin) * buffer.view.row));
      }
    }
    buffer.view.first = wanted.begin;
    buffer.rows = wanted;
    return {kept.end, wanted.end};
  }

  BlockedRows image() const {
    const RowStage& first = stages_[0];
    const std::int64_t plane = first.src_plane();
    return {const_cast<std::uint8_t*>(operands_.src) + image_ * first.src_blocks * plane, 0, plane,
            first.src.src_columns * first.src.pixel_bytes};
  }

  BlockedRows src_of(std::size_t k) const { return is_image(k) ? image() : buffers_[k].view; }

  // Writes the padding beside the rows of a buffer. Once is enough, because nothing else is
  // written there. The padding after one row is also that before the next.
  static void pad(const RowStage& stage, std::uint8_t* data, std::int64_t rows) {
    const ByteRows& row = stage.src;
    const std::int64_t before = row.before * row.pixel_bytes,
                       end = before + row.src_columns * row.pixel_bytes;
    const auto beside = static_cast<std::size_t>(row.row_bytes() - (end - before));
    if (beside == 0) return;
    std::memset(data, row.zero, static_cast<std::size_t>(before));
    for (std::int64_t r = 0; r + 1 < rows; ++r) {
      std::memset(data + r * row.row_bytes() + end, row.zero, beside);
    }
    std::memset(data + (rows - 1) * row.row_bytes() + end, row.zero,
                static_cast<std::size_t>(row.row_bytes() - end));
  }

  // Fills rows of a buffer: the padding above and below, and the rows that the stage before
  // makes.
  void fill(std::size_t k, Range rows) const {
    if (rows.begin >= rows.end) return;
    const RowStage& stage = stages_[k];
    const BlockedRows& view = buffers_[k].view;
    const Range made = inside(rows, stage.src_rows);
    const BlockedRows src = image();
    for (std::int64_t y = rows.begin; y < rows.end; ++y) {
      const bool is_made = y >= made.begin && y < made.end;
      const bool is_filled = is_made ? k == 0 : stage.reads_padding;
      for (std::int64_t b = 0; is_filled && b < stage.src_blocks; ++b) {
        stage.src.fill(is_made ? src.at(b, y) : nullptr, view.at(b, y));
      }
    }
    if (k == 0 || made.begin >= made.end) return;
    BlockedRows dst = view;
    dst.data += stage.src.before * stage.src.pixel_bytes;
    runs_[k - 1](src_of(k - 1), nullptr, dst, made);
  }

  const std::vector<RowStage>& stages_;
  const std::vector<RunRows>& runs_;
  const Operands& operands_;
  std::vector<Buffer> buffers_;  // before each stage
  std::vector<Range> lacks_;
  std::int64_t image_ = -1;
};

// Every thread gets the same number of bands.
std::int64_t RowChain::bands() const {
  const RowStage& last = stages_.back();
  const std::int64_t least = ceil_div(last.dst_rows, most_rows_);
  return last.n % threads() == 0 ? least : std::min(round_up(least, threads()), last.dst_rows);
}

double RowChain::made_twice() const {
  const RowStage& last = stages_.back();
  // A thread has whole images, or one part of an image.
  const std::int64_t parts =
      last.n % threads() == 0 ? 1 : std::min<std::int64_t>(threads(), last.dst_rows);
  const std::vector<std::int64_t> capacity = capacities(ceil_div(last.dst_rows, parts));
  double all = 0, twice = 0;
  for (std::size_t k = 0; k < stages_.size(); ++k) {
    const RowStage& stage = stages_[k];
    const double row = static_cast<double>(stage.weight_bytes * stage.dst_columns);
    all += row * static_cast<double>(stage.dst_rows);
    if (k + 1 == stages_.size()) break;
    const std::int64_t made = parts * std::min(capacity[k + 1], stage.dst_rows);
    twice += row * static_cast<double>(std::max<std::int64_t>(made - stage.dst_rows, 0));
  }
  return twice / all;
}

void RowChain::run(const std::vector<RunRows>& runs, const Operands& operands) const {
  const RowStage& last = stages_.back();
  const std::int64_t rows = last.dst_rows, bands = this->bands();
  share_units(last.n * bands, kLargeUnit, [&](Pieces& pieces) {
    Walk walk(*this, runs, operands, ceil_div(rows, bands));
    for (Range piece; pieces.next(piece);) {
      for (std::int64_t unit = piece.begin; unit < piece.end; ++unit) {
        const std::int64_t band = unit % bands;
        walk.band(unit / bands, {band * rows / bands, (band + 1) * rows / bands});
      }
    }
  });
}

}  // namespace torch_blocked
