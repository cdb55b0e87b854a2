// Runs convolutions of bytes and of bfloat16 by tiles of dot products of 32 bits.
#pragma once

#include "kernels/dots/dots.h"
#include "ops/convolution_problem.h"
#include "ops/products/row_chain.h"
#include "ops/products/transposed_phases.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

// What is multiplied: bytes of src, bytes widened to 16-bit words, or bfloat16.
enum class DotNumbers { kBytes, kWords, kBfloats };

using Sizes3 = std::array<std::int64_t, 3>;  // d, h, w

// An ordinary convolution made ready: any kernel, stride, dilation, padding and groups.
class Dots {
 public:
  // problem: dst has blocks of the CPU's vector width, src has any block. The spatial sizes are
  // those of `sizes`. padding: the byte that stands for 0.
  Dots(const ConvolutionProblem& problem, const SpatialSizes& sizes, DotNumbers numbers,
       std::uint8_t padding, const OutputGrid& grid);
  // The same for outputs that fill all of dst.
  Dots(const ConvolutionProblem& problem, const SpatialSizes& sizes, DotNumbers numbers,
       std::uint8_t padding)
      : Dots(problem, sizes, numbers, padding, {sizes.out, {0, 0, 0}, {1, 1, 1}}) {}

  // Names the format that pack() makes.
  std::string weights_format() const;
  // weight [OC, IC / groups, *kernel], int8 or bfloat16
  //   -> [groups of vectors][segments, 32-bit groups, vectors, lanes]
  at::Tensor pack(const at::Tensor& weight) const;
  std::int64_t packed_bytes() const;

  struct Operands {
    const void *src, *weights;
    const kernels::DotChannels* channels;  // of all output channels
    const kernels::DotEnd* end;            // as of kernels::DotTiles, with the two below
    const void* residual;
    float residual_scale;
    void* dst;
    bool is_float32;
  };
  void run(const Operands& operands) const;

  // How it runs a few rows at a time; nothing if src is widened or images have depth.
  std::optional<RowStage> row_stage() const;
  // Makes rows of dst, in one thread. src and dst of `operands` are not used; its `residual` is
  // that of the first row, laid out as dst.
  void run_rows(const Operands& operands, const BlockedRows& src, const BlockedRows& dst,
                Range rows) const;

 private:
  // Vectors of output channels that see the same channels of src.
  struct Group {
    std::int64_t first, vectors;  // vectors
    std::int64_t begin, end;      // 32-bit groups of src channels
    std::int64_t weights;         // the offset of its weights
  };
  // How the work is cut up: bands of output rows, and chunks of groups for each band.
  struct Cut {
    std::int64_t bands, chunks;
  };
  // Outputs [row, row + rows) of a plane of an image.
  struct Band {
    std::int64_t image, plane, row, rows;
  };
  // Where src lies: the first pixel of an image or band, and the bytes between blocks, planes,
  // rows and pixels.
  struct Source {
    const std::uint8_t* first;
    std::int64_t block, plane, row, pixel;
  };
  // The same for dst and the residual, which has dst's distances.
  struct Target {
    char* first;
    const char* residual;
    std::int64_t block, row;
  };

  bool words() const { return numbers_ == DotNumbers::kWords; }
  std::int64_t taps() const { return s_.kernel[0] * s_.kernel[1] * s_.kernel[2]; }
  std::int64_t groups_of_block() const { return src_block_ / per_group_; }
  std::int64_t pixel_bytes() const { return src_block_ * element_; }
  // The src positions under `outputs` outputs along dim i.
  std::int64_t reach(std::size_t i, std::int64_t outputs) const {
    return (outputs - 1) * s_.stride[i] + (s_.kernel[i] - 1) * s_.dilation[i] + 1;
  }
  bool spreads() const;
  Range seen_by(std::int64_t vector) const;
  std::vector<Group> make_groups() const;
  template <typename F>
  void for_segments(const Group& group, F&& f) const;
  template <typename From, typename To>
  void pack_group(const Group& group, const From* weight, std::uint8_t* packed) const;
  Cut cut() const;
  ByteRows band_row() const;
  Source fill_band(const Band& band, const std::uint8_t* src, std::uint8_t* to) const;
  Source in_place(const Band& band, const std::uint8_t* src) const;
  void set_segments(const Source& source, const Group& group,
                    std::vector<kernels::DotSegment>& segments) const;
  void run_groups(const Operands& operands, const Source& source, const Target& target,
                  std::int64_t rows, Range groups,
                  std::vector<kernels::DotSegment>& segments) const;
  void run_group(const Operands& operands, const Source& source, const Target& target,
                 std::int64_t rows, const Group& group,
                 const std::vector<kernels::DotSegment>& segments) const;
  Target target_of(const Operands& operands, const Band& band) const;

  SpatialSizes s_;
  OutputGrid grid_;
  std::int64_t n_, ic_, oc_, conv_groups_, width_, src_block_, src_blocks_;
  DotNumbers numbers_;
  std::int64_t per_group_, element_;  // numbers of 32 bits; bytes of one in memory
  std::uint8_t padding_;
  bool in_place_;
  std::vector<std::int32_t> lanes_;  // as in kernels::DotTiles; empty if groups are not spread
  std::vector<Group> groups_;
};

}  // namespace torch_blocked
