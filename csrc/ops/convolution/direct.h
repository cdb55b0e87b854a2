// How our direct convolution sees a problem and cuts up its work. The head of direct.cpp explains
// the method.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "kernels/direct/direct.h"
#include "kernels/kernels.h"
#include "ops/convolution/convolution.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::direct {

using Problem = ConvolutionProblem;
using kernels::DirectRun;
using kernels::DirectSegment;
using Sizes3 = std::array<std::int64_t, 3>;  // d, h, w

// With at most this many input channels src is split into planes, because a vector of channels
// would be mostly empty.
constexpr std::int64_t kPlaneChannels = 4;

// The products of some input channels with the output channels that see them. Without groups one
// pass multiplies all with all. A vector of outputs from several groups has one pass for each
// group. A pass does not touch the lanes of other groups, so no infinity reaches them.
struct Pass {
  Range inputs;
  Range lanes;           // the lanes of the vectors that are written
  std::int64_t weights;  // where its weights begin, in floats
  std::size_t reads;     // the index of its inputs in Direct::inputs
};

// Output channels [first, first + vectors * width), and their passes.
struct Group {
  std::int64_t first, vectors;
  Range passes;
};

// One phase of the problem, seen as 3-D: missing spatial dims have size 1.
struct Direct {
  const kernels::Kernels* kernels;
  // Groups that fill whole blocks run as separate images, `bundles` of them for each image. n, ic
  // and oc count these.
  std::int64_t n, ic, oc, bundles;
  std::int64_t src_block, dst_block;      // lanes between pixels
  std::int64_t ic_of_group, oc_of_group;  // of the convolution
  Sizes3 in, out, kernel, stride, padding, dilation;
  Sizes3 dst, dst_first, dst_step;   // output o of `out` is index dst_first + o * dst_step of `dst`
  Sizes3 tap_first, tap_step;        // tap k is tap tap_first + k * tap_step of the weights
  bool pixelwise, in_place, planes;  // a dst pixel sees the src pixel in its place only
  Activation activation;
  std::vector<Group> groups;  // of output channels
  std::vector<Pass> passes;
  std::vector<Range> inputs;  // the distinct inputs of the passes
  // A row of outputs, cut wherever the set of taps that lie inside src changes. Only a src that
  // is read in place needs more than one stretch, because it has no padding around it.
  std::vector<Range> stretches;

  const kernels::DirectSizes& sizes() const { return *kernels->direct_sizes; }
  std::int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  // The number of channels whose weights for one tap follow each other: a vector's, or one for
  // planes.
  std::int64_t step() const { return planes ? 1 : sizes().width; }
  // How many steps `channels` have, and where step `i` begins (for i = steps(): where the last
  // ends).
  std::int64_t steps(const Range& channels) const {
    return ceil_div(channels.end, step()) - channels.begin / step();
  }
  std::int64_t step_begin(const Range& channels, std::int64_t i) const {
    return std::clamp((channels.begin / step() + i) * step(), channels.begin, channels.end);
  }
  // Whether rows of planes are copied without regrouping. Then the taps along w are the lanes of
  // one segment, whatever the stride, and pixels are one stride apart.
  bool whole_rows() const { return planes && dilation[2] == 1; }
  std::int64_t pixel_step() const { return whole_rows() ? stride[2] : step(); }
  std::int64_t src_blocks() const { return ceil_div(ic, src_block); }
  std::int64_t dst_blocks() const { return ceil_div(oc, dst_block); }
  bool whole() const { return dst_step == Sizes3{1, 1, 1}; }  // whether its outputs are all of dst
  std::int64_t floats_of(const Pass& pass, const Group& group) const {
    return (pass.inputs.end - pass.inputs.begin) * taps() * group.vectors * sizes().width;
  }
  std::int64_t bundle_floats() const {
    return passes.back().weights + floats_of(passes.back(), groups.back());
  }
  std::int64_t packed_floats() const { return bundles * bundle_floats(); }
  static std::int64_t volume(const Sizes3& s) { return s[0] * s[1] * s[2]; }
};

// The phases of the problem: several only if it is transposed with strides. Empty if a phase has no
// taps.
std::vector<Direct> phases_of(const Problem& p);

// Packs the weights of all phases, one after the other.
at::Tensor pack(const std::vector<Direct>& phases, bool transposed, const at::Tensor& weight);
std::int64_t packed_floats(const std::vector<Direct>& phases);

// The taps along w in the order of their weights. For dilated planes, taps that meet common
// positions stand side by side, so that they are lanes of one segment.
std::vector<std::int64_t> taps_in_order(const Direct& d);

// How the positions that some outputs meet along one dim are laid out in slots. The positions of
// tap k are in the slots from tap_slot[k] on. Taps that meet the same positions share slots.
struct Axis {
  std::vector<std::int64_t> tap_slot;
  std::vector<DirectRun> runs;  // `first` as if the outputs began at position 0
  std::int64_t slots = 0;
};

// Segments, channel step by channel step, plus a last one that is only prefetched.
struct Segments {
  std::vector<DirectSegment> all;
  std::vector<std::int64_t> step_begin;  // the first segment of each channel step, then the end
};

// The taps and segments of all stretches of output rows that meet the same taps inside src.
struct Reach {
  std::vector<std::int64_t> kd, kh, kw;  // the taps; kw holds indices into taps_in_order()
  std::vector<Segments> segments;        // for each of Direct::inputs
};

// How the work is cut up.
struct Cut {
  std::int64_t rows, columns;            // of outputs in a band, at most
  std::int64_t row_bands, column_bands;  // in a plane of outputs
  std::array<Axis, 3> axes;
  std::vector<Reach> reaches;
  std::vector<std::size_t> reach_of;  // [planes of outputs, rows, stretches]
  std::int64_t part_steps;            // channel steps (vectors, or planes) of one part
  // The order of units: true runs all bands of a group of output channels, false all groups of a
  // band.
  bool by_group;

  std::int64_t slots() const { return axes[0].slots * axes[1].slots * axes[2].slots; }
};

// The floats of the slots under a band of this size.
std::int64_t band_floats(const Direct& d, std::int64_t rows, std::int64_t columns);

// Where input channels lie if they are read in place from several tensors.
struct GatheredSegment {
  std::int64_t src;
  DirectSegment segment;  // as if that tensor's image were the src
};
struct GatheredSegments {
  std::vector<std::int64_t> order;  // an order of the input channels that makes segments long
  std::vector<GatheredSegment> segments;
  std::vector<std::int64_t> step_begin;  // as in Segments
};
GatheredSegments gather_segments(const Direct& d, const std::vector<ChannelOf>& channels);

// The cut for the number of threads that torch has now.
Cut cut_of(const Direct& d);
// The units of that cut: bands times groups of output channels.
std::int64_t units_of(const Direct& d);

}  // namespace torch_blocked::direct
