// How our direct convolution sees a problem and cuts up its work; the comment of
// convolution_direct.cpp says what for.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/direct.h"
#include "kernels/kernels.h"
#include "ops/convolution.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::direct {

using Problem = ConvolutionProblem;
using kernels::DirectRun;
using kernels::DirectSegment;
using Sizes3 = std::array<std::int64_t, 3>;  // d, h, w

// Up to this many input channels src is taken apart into planes: a vector of lanes would be mostly
// empty.
constexpr std::int64_t kPlaneChannels = 4;

// Output channels [first, first + vectors * width).
struct Group {
  std::int64_t first, vectors;
};

// What one phase of the problem is, seen as 3-D: missing spatial dims have size 1.
struct Direct {
  const kernels::Kernels* kernels;
  std::int64_t n, ic, oc, src_block, dst_block;  // blocks: lanes between pixels
  Sizes3 in, out, kernel, stride, padding, dilation;
  Sizes3 dst, dst_first, dst_step;   // output o of `out` is index dst_first + o * dst_step of `dst`
  Sizes3 tap_first, tap_step;        // tap k is tap tap_first + k * tap_step of the weights
  bool pixelwise, in_place, planes;  // a dst pixel sees the src pixel in its place only
  Activation activation;
  std::vector<Group> groups;
  // The outputs of a row, cut where they begin to meet other taps inside src: one stretch unless
  // src is read in place, which has no padding.
  std::vector<Range> stretches;

  const kernels::DirectSizes& sizes() const { return *kernels->direct_sizes; }
  std::int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  std::int64_t lanes() const { return taps() * ic; }
  // Channels whose weights for one tap follow each other: those of a vector, or one of a plane.
  std::int64_t step() const { return planes ? 1 : sizes().width; }
  // Whether rows of planes stay as they are: then the taps along w are lanes of one segment,
  // whatever the stride, and pixels are one stride apart.
  bool whole_rows() const { return planes && dilation[2] == 1; }
  std::int64_t pixel_step() const { return whole_rows() ? stride[2] : step(); }
  std::int64_t src_blocks() const { return ceil_div(ic, src_block); }
  std::int64_t dst_blocks() const { return ceil_div(oc, dst_block); }
  bool whole() const { return dst_step == Sizes3{1, 1, 1}; }  // its outputs are all of dst
  std::int64_t packed_floats() const {
    return (groups.back().first + groups.back().vectors * sizes().width) * lanes();
  }
  static std::int64_t volume(const Sizes3& s) { return s[0] * s[1] * s[2]; }
};

// The phases of the problem: one unless it is transposed with strides. None if one has no taps.
std::vector<Direct> phases_of(const Problem& p);

// The taps along w in the order of their weights: those of dilated planes that meet common
// positions side by side, so that they are lanes of one segment.
std::vector<std::int64_t> taps_in_order(const Direct& d);

// How the positions of one dim that `count` outputs meet are laid out in slots: those of tap k are
// tap_slot[k], tap_slot[k] + 1, ...; taps share slots where they meet the same positions.
struct Axis {
  std::vector<std::int64_t> tap_slot;
  std::vector<DirectRun> runs;  // `first` as if the outputs began at position 0
  std::int64_t slots = 0;
};

// The segments of the stretches of output rows that meet the same taps inside src, channel step by
// channel step, and one more, which is prefetched only.
struct Reach {
  std::vector<std::int64_t> kd, kh, kw;  // the taps; along w, which of taps_in_order()
  std::vector<DirectSegment> segments;
  std::vector<std::int64_t> step_begin;  // the first segment of each channel step, and the end
};

// How the work is cut up.
struct Cut {
  std::int64_t rows, columns;            // of outputs in a band, at most
  std::int64_t row_bands, column_bands;  // in a plane of outputs
  std::array<Axis, 3> axes;
  std::vector<Reach> reaches;
  std::vector<std::size_t> reach_of;  // [planes of outputs, rows, stretches]
  std::int64_t part_steps;            // channel steps (vectors, or channels of planes) of one part
  // Units in order: all bands of a group of output channels, not all groups of a band.
  bool by_group;

  std::int64_t slots() const { return axes[0].slots * axes[1].slots * axes[2].slots; }
};

// The slots under so many outputs, in floats.
std::int64_t band_floats(const Direct& d, std::int64_t rows, std::int64_t columns);

// Where input channels lie that are read in place from several tensors.
struct GatheredSegment {
  std::int64_t src;
  DirectSegment segment;  // as if that tensor's image were the src
};
struct GatheredSegments {
  std::vector<std::int64_t> order;  // of the input channels, so that segments are long
  std::vector<GatheredSegment> segments;
  std::vector<std::int64_t> step_begin;  // as in Reach
};
GatheredSegments gather_segments(const Direct& d, const std::vector<ChannelOf>& channels);

// For the number of threads that torch has now.
Cut cut_of(const Direct& d);
// Bands times groups of output channels of that.
std::int64_t units_of(const Direct& d);

}  // namespace torch_blocked::direct
