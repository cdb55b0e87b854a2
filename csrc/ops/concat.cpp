#include "ops/concat.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "format/errors.h"
#include "kernels/concat.h"
#include "kernels/kernels.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// A run of channels that lies in one block of an input and in one block of dst.
struct Run {
  std::size_t input;
  std::int64_t src_block, src_lane, dst_block, dst_lane, count;
};

// The runs of channels [src_channel, src_channel + channels) of an input, which become those from
// dst_channel on.
void add_runs(std::vector<Run>& runs, std::size_t input, std::int64_t src_channel,
              std::int64_t dst_channel, std::int64_t channels, std::int64_t block) {
  while (channels > 0) {
    const std::int64_t src_lane = src_channel % block, dst_lane = dst_channel % block;
    const std::int64_t count = std::min({block - src_lane, block - dst_lane, channels});
    runs.push_back({input, src_channel / block, src_lane, dst_channel / block, dst_lane, count});
    src_channel += count, dst_channel += count, channels -= count;
  }
}

// Fills dst, whose channels the runs cover.
void copy_runs(const std::vector<Run>& runs, const std::vector<Blocked>& srcs, const Blocked& dst) {
  const std::int64_t block = dst.block(), pixels = dst.pixels(), row = pixels * block;
  const auto kernel = kernels::kernels_for(block).copy_lanes;
  auto* out = static_cast<float*>(dst.physical.mutable_data_ptr());
  // A thread takes whole blocks of dst, and the runs that fill them: [N * blocks].
  parallel_units(dst.batch() * dst.blocks(), row, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t image = unit / dst.blocks(), dst_block = unit % dst.blocks();
      if (dst.tail() && dst_block + 1 == dst.blocks()) std::fill_n(out + unit * row, row, 0.f);
      for (const Run& run : runs) {
        if (run.dst_block != dst_block) continue;
        const Blocked& src = srcs[run.input];
        const auto* in = static_cast<const float*>(src.physical.const_data_ptr()) +
                         (image * src.blocks() + run.src_block) * row;
        if (run.count == block) {
          std::copy_n(in, row, out + unit * row);
          continue;
        }
        kernel({.src = in,
                .dst = out + unit * row,
                .block = block,
                .pixels = pixels,
                .src_lane = run.src_lane,
                .dst_lane = run.dst_lane,
                .count = run.count});
      }
    }
  });
}

void check_itemsize(const char* op, const at::Tensor& input) {
  if (input.itemsize() != sizeof(float)) {
    fail_not_implemented(op, "4-byte elements where channels are not whole blocks",
                         text(input.dtype().name()), "use a dense tensor");
  }
}

std::vector<Blocked> check_inputs(at::TensorList inputs, at::IntArrayRef channels) {
  if (inputs.empty() || inputs.size() != channels.size()) {
    fail_value("concat_channels", "one channel count per input and at least one input",
               text(inputs.size(), " inputs and ", channels.size(), " counts"), "");
  }
  std::vector<Blocked> checked;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    checked.push_back(blocked_argument("concat_channels", inputs[i], channels[i]));
    Dims dims = checked[i].dims(), first = checked[0].dims();
    dims[1] = first[1];
    if (inputs[i].scalar_type() != inputs[0].scalar_type()) {
      fail_type("concat_channels", text("inputs of one dtype, ", inputs[0].dtype().name()),
                text(inputs[i].dtype().name()), "convert one of them");
    }
    if (dims != first || checked[i].block() != checked[0].block()) {
      fail_value("concat_channels", text("inputs like the first, ", inputs[0].sizes()),
                 text(inputs[i].sizes()), "they may differ in channels only");
    }
  }
  return checked;
}

}  // namespace

void join_channels(const std::vector<Blocked>& srcs, const Blocked& dst) {
  std::vector<Run> runs;
  std::int64_t offset = 0;  // channel of dst at which the input starts
  for (std::size_t input = 0; input < srcs.size(); offset += srcs[input++].channels) {
    add_runs(runs, input, 0, offset, srcs[input].channels, dst.block());
  }
  copy_runs(runs, srcs, dst);
}

at::Tensor concat_channels(at::TensorList inputs, at::IntArrayRef channels) {
  const std::vector<Blocked> srcs = check_inputs(inputs, channels);
  const std::int64_t block = srcs[0].block();
  const bool aligned = std::all_of(channels.begin(), channels.end() - 1,
                                   [&](std::int64_t count) { return count % block == 0; });
  if (aligned) return at::cat(inputs, 1);  // whole blocks follow each other
  check_itemsize("concat_channels", inputs[0]);
  Dims dims = srcs[0].dims();
  dims[1] = std::accumulate(channels.begin(), channels.end(), std::int64_t{0});
  const Blocked dst = empty_blocked(dims, block, inputs[0].options());
  if (dst.physical.numel() == 0) return dst.physical;
  join_channels(srcs, dst);
  return dst.physical;
}

at::Tensor slice_channels(const at::Tensor& input, std::int64_t channels, std::int64_t start,
                          std::int64_t length) {
  const Blocked src = blocked_argument("slice_channels", input, channels);
  if (start < 0 || start > channels || length < 0 || length > channels - start) {
    fail_value("slice_channels", text("a range within ", channels, " channels"),
               text(length, " from ", start), "");
  }
  check_itemsize("slice_channels", input);
  Dims dims = src.dims();
  dims[1] = length;
  const Blocked dst = empty_blocked(dims, src.block(), input.options());
  if (dst.physical.numel() == 0) return dst.physical;
  std::vector<Run> runs;
  add_runs(runs, 0, start, 0, length, src.block());
  copy_runs(runs, {src}, dst);
  return dst.physical;
}

}  // namespace torch_blocked
