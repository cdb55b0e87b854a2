// Runs nodes as calls through the dispatcher, for kinds that have no kernel of their own in a
// format.
#pragma once

#include "graph/running/run.h"

namespace torch_blocked::graph {

// Calls the node's op; value_of() gives the values that it reads. Lists among the results are
// flattened. `on_meta`: values and results are meta tensors.
std::vector<c10::IValue> call(const Node& node, const std::function<c10::IValue(Value)>& value_of,
                              bool on_meta = false);

// The results of the step's op on `src`, if all of them are views of it; else none. `src` is all
// that the step reads, and has no data.
std::vector<at::Tensor> views_of(const Step& step, const at::Tensor& src);

// A tensor that an op of ATen has made, in the plain or channels-last format of its slot.
at::Tensor in_format(const at::Tensor& tensor, const SlotPlan& slot);

// [N, blocks, *spatial, b] <-> [N * blocks, b, *spatial] in channels-last: a batch of images of b
// channels.
at::Tensor as_images(const at::Tensor& physical);
at::Tensor from_images(const at::Tensor& images, std::int64_t batch);

// How a step passes tensors of blocked slots to ATen's op, and what it does with the results.
struct Seen {
  at::Tensor (*argument)(const at::Tensor& tensor) = nullptr;  // null: as it is
  at::Tensor (*result)(const at::Tensor& result, const SlotPlan& slot) = in_format;
  // Whether the op's results must have the sizes of their slots, which is then checked.
  bool is_physical = true;
};
// The step's op on its slots' tensors.
Prepared prepare_call(const Step& step, const Running& running, const Seen& seen);

// For the report: who ran a step. The last one says ATen for plain and channels-last formats.
std::string by_aten(const Plan& plan, const Step& step);
std::string by_torch_blocked(const Plan& plan, const Step& step);
std::string by_aten_unless_blocked(const Plan& plan, const Step& step);

}  // namespace torch_blocked::graph
