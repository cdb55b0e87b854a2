// Concatenates the channels of blocked tensors, and slices them.
#include "ops/moving/concat.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <vector>

#include "format/errors.h"
#include "ops/blocked.h"
#include "ops/registered.h"

namespace torch_blocked {
namespace {

void check_itemsize(const char* op, const at::Tensor& input) {
  if (input.itemsize() != 4 && input.itemsize() != 2) {
    fail_not_implemented(op, "elements of 2 or 4 bytes where channels are not whole blocks",
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

std::vector<ChannelOf> joined_channels(at::IntArrayRef channels) {
  std::vector<ChannelOf> from;
  for (std::size_t input = 0; input < channels.size(); ++input) {
    for (std::int64_t channel = 0; channel < channels[input]; ++channel) {
      from.push_back({static_cast<std::int64_t>(input), channel});
    }
  }
  return from;
}

at::Tensor concat_channels(at::TensorList inputs, at::IntArrayRef channels) {
  const std::vector<Blocked> srcs = check_inputs(inputs, channels);
  const std::int64_t block = srcs[0].block();
  const bool aligned = std::all_of(channels.begin(), channels.end() - 1,
                                   [&](std::int64_t count) { return count % block == 0; });
  if (aligned) return at::cat(inputs, 1);  // whole blocks follow each other
  check_itemsize("concat_channels", inputs[0]);
  return gathered(srcs, joined_channels(channels));
}

at::Tensor slice_channels(const at::Tensor& input, std::int64_t channels, std::int64_t start,
                          std::int64_t length) {
  const Blocked src = blocked_argument("slice_channels", input, channels);
  if (start < 0 || start > channels || length < 0 || length > channels - start) {
    fail_value("slice_channels", text("a range within ", channels, " channels"),
               text(length, " from ", start), "");
  }
  check_itemsize("slice_channels", input);
  std::vector<ChannelOf> from;
  for (std::int64_t channel = start; channel < start + length; ++channel) {
    from.push_back({0, channel});
  }
  return gathered({src}, from);
}

}  // namespace torch_blocked
