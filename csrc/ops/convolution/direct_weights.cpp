// Packs the weights of a direct convolution in the order in which its kernel reads them.

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/rows/reorder.h"
#include "ops/convolution/direct.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"

namespace torch_blocked::direct {
namespace {

// The largest block that the kernel block_planes takes.
constexpr std::int64_t kMostPlaneBlock = 32;

// weight [OC, IC / groups, *kernel], transposed [IC, OC / groups, *kernel], any strides
//   -> [bundles, passes, vectors of the pass's inputs, taps, lanes, channels of its vectors],
// planes [bundles, passes, inputs, taps, ...], zeros in the channels that it does not write.
class Packing {
 public:
  Packing(const Direct& d, bool transposed, const at::Tensor& weight)
      : d_(d),
        transposed_(transposed),
        from_(weight.const_data_ptr<float>()),
        oc_stride_(weight.stride(transposed ? 1 : 0)),
        ic_stride_(weight.stride(transposed ? 0 : 1)),
        is_plane_(d.taps() == 1 && ic_stride_ == 1) {
    const Sizes3 strides = as_3d(weight.strides().slice(2), 0);
    for (std::int64_t kd = 0; kd < d.kernel[0]; ++kd) {
      for (std::int64_t kh = 0; kh < d.kernel[1]; ++kh) {
        for (const std::int64_t kw : taps_in_order(d)) {
          const Sizes3 tap{kd, kh, kw};
          std::int64_t offset = 0;
          for (std::size_t i = 0; i < 3; ++i) {
            offset += (d.tap_first[i] + tap[i] * d.tap_step[i]) * strides[i];
          }
          tap_offsets_.push_back(offset);
        }
      }
    }
    for (const Range& inputs : d.inputs) most_steps_ = std::max(most_steps_, d.steps(inputs));
  }

  void operator()(float* to) const {
    const std::int64_t groups = std::ssize(d_.groups);
    const std::int64_t work = d_.step() * d_.taps() * 2 * d_.sizes().width;
    parallel_units(
        d_.bundles * groups * most_steps_, work, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t group = unit / most_steps_;
            pack_step(group / groups, d_.groups[static_cast<std::size_t>(group % groups)],
                      unit % most_steps_, to);
          }
        });
  }

 private:
  // Packs step `i` of the inputs of each pass that has one.
  void pack_step(std::int64_t bundle, const Group& group, std::int64_t i, float* to) const {
    for (std::int64_t p = group.passes.begin; p < group.passes.end; ++p) {
      const Pass& pass = d_.passes[static_cast<std::size_t>(p)];
      if (i >= d_.steps(pass.inputs)) continue;
      const Range lanes{d_.step_begin(pass.inputs, i), d_.step_begin(pass.inputs, i + 1)};
      const std::int64_t size = group.vectors * d_.sizes().width;
      float* out = to + bundle * d_.bundle_floats() + pass.weights +
                   (lanes.begin - pass.inputs.begin) * d_.taps() * size;
      pack_lanes(bundle, group, pass, lanes, out);
    }
  }

  void pack_lanes(std::int64_t bundle, const Group& group, const Pass& pass, const Range& lanes,
                  float* out) const {
    const std::int64_t size = group.vectors * d_.sizes().width, first = pass.lanes.begin;
    const std::int64_t end = std::clamp(d_.oc - group.first, first, pass.lanes.end);
    // An ordinary weight has the inputs of its group, a transposed one the outputs of its
    // group.
    const std::int64_t of_group = pass.inputs.begin / d_.ic_of_group;
    const std::int64_t oc =
        group.first + first + (transposed_ ? -of_group * d_.oc_of_group : bundle * d_.oc);
    const std::int64_t ic = transposed_ ? bundle * d_.ic : -of_group * d_.ic_of_group;
    const float* from = from_ + oc * oc_stride_;
    // Weights of 1x1 are planes of IC pixels and are blocked like an image. Reading one input
    // channel of all OC at a time would crowd one set of L1 if IC is a power of 2: 2048x1024
    // took 3.9 ms.
    if (is_plane_ && size <= kMostPlaneBlock && first == 0) {
      const kernels::ImageReorder reorder{.src = from,
                                          .dst = out - (lanes.begin + ic) * size,
                                          .channels = end,
                                          .block = size,
                                          .pixels = oc_stride_,
                                          .stream = false};
      return d_.kernels->block_planes(reorder, lanes.begin + ic, lanes.end + ic);
    }
    for (const std::int64_t tap : tap_offsets_) {
      for (std::int64_t lane = lanes.begin; lane < lanes.end; ++lane, out += size) {
        const float* in = from + (lane + ic) * ic_stride_ + tap;
        std::fill(out, out + first, 0.f);
        if (oc_stride_ == 1) {
          std::copy_n(in, end - first, out + first);
        } else {
          for (std::int64_t i = first; i < end; ++i) out[i] = in[(i - first) * oc_stride_];
        }
        std::fill(out + end, out + size, 0.f);
      }
    }
  }

  const Direct& d_;
  bool transposed_;
  const float* from_;
  std::int64_t oc_stride_, ic_stride_;
  bool is_plane_;  // whether the inputs of an output are adjacent
  std::vector<std::int64_t> tap_offsets_;
  std::int64_t most_steps_ = 0;
};

}  // namespace

std::int64_t packed_floats(const std::vector<Direct>& phases) {
  std::int64_t floats = 0;
  for (const Direct& d : phases) floats += d.packed_floats();
  return floats;
}

at::Tensor pack(const std::vector<Direct>& phases, bool transposed, const at::Tensor& weight) {
  const at::Tensor packed = empty_packed(packed_floats(phases), weight.scalar_type());
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(weight.nbytes() + packed.nbytes()));
  float* to = packed.mutable_data_ptr<float>();
  for (const Direct& d : phases) {
    Packing(d, transposed, weight)(to);
    to += d.packed_floats();
  }
  return packed;
}

}  // namespace torch_blocked::direct
