#include "graph/run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/normalization.h"
#include "ops/registered.h"
#include "ops/reorder.h"
#include "runtime/huge_pages.h"
#include "runtime/threads.h"

namespace torch_blocked::graph {
namespace {

bool is_blocked(const SlotPlan& slot) { return slot.format >= 4; }
bool is_plain(std::int64_t format) { return format == kPlain || format == kStrided; }

// Neither autograd nor autocast has a say: types are those of the capture.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

// Conjugated and negated in memory, not by a promise.
at::Tensor resolved(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }

// A tensor that an op of ATen has made, in the format of its slot.
at::Tensor in_format(const at::Tensor& tensor, const SlotPlan& slot) {
  if (slot.format == kChannelsLast && tensor.dim() >= 3) {
    if (is_channels_last(tensor)) return tensor;
    const at::Tensor dst = empty_dense(tensor.sizes(), true, tensor.options());
    return dst.copy_(tensor);
  }
  return tensor.contiguous();
}

// [N, blocks, *spatial, b] <-> [N * blocks, b, *spatial] in channels-last: a batch of images of b
// channels.
at::Tensor as_images(const at::Tensor& physical) { return physical.flatten(0, 1).movedim(-1, 1); }

at::Tensor from_images(const at::Tensor& images, const SlotPlan& slot) {
  return images.movedim(1, -1).contiguous().view(physical_dims(slot.dims, slot.format));
}

// Whether an op's results are those that were planned: sizes may depend on values where no rule and
// no meta kernel says so, and who reads them next reads raw memory.
void check_results(const Node& node, std::size_t got, std::size_t wanted) {
  if (got == wanted) return;
  fail_value("optimize", text(wanted, " results of ", node.name), text(got),
             "its results depend on values; call the model itself");
}

void check_result(const Node& node, const at::Tensor& result, const SlotPlan& slot) {
  const bool blocked = is_blocked(slot);
  const Dims wanted = blocked ? physical_dims(slot.dims, slot.format) : slot.dims;
  if (result.sizes() == wanted && result.scalar_type() == slot.dtype) return;
  fail_value("optimize", text(slot.dtype, " ", wanted, " of ", node.name),
             text(result.scalar_type(), " ", result.sizes()),
             "its results depend on values; call the model itself");
}

}  // namespace

at::Tensor PackedStore::get(const Node& node, const std::vector<at::Tensor>& weights,
                            const std::string& format, const std::function<at::Tensor()>& pack) {
  const std::lock_guard lock(mutex_);
  at::Tensor& packed = packed_[{&node, format}];
  if (!packed.defined()) packed = weights_.packed(weights, format, pack);
  return packed;
}

Run::Run(const Graph& graph, const Plan& plan, PackedStore& weights)
    : plan_(plan),
      memory_(plan_memory(plan)),
      arena_(at::empty({memory_.bytes}, at::kByte)),
      slots_(plan.slots.size()),
      releases_(plan.steps.size()) {
  prefer_huge_pages(arena_.mutable_data_ptr(), arena_.nbytes());
  auto* base = static_cast<char*>(arena_.mutable_data_ptr());
  for (Slot slot = 0; slot < slots_.size(); ++slot) {
    const SlotPlan& s = plan.slots[slot];
    const Placement& placement = memory_.slots[slot];
    if (placement.in_arena) {
      slots_[slot] = reorder_side(base + placement.offset, s.dims, s.format, s.dtype).tensor;
    } else if (placement.last < plan.steps.size()) {
      releases_[placement.last].push_back(slot);
    }
  }
  for (const auto& [value, slot] : plan.constants) slots_[slot] = graph.constants.at(value);
  for (const auto& [value, slot] : plan.constants) {
    for (auto& row : releases_) std::erase(row, slot);
  }
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    steps_.push_back(prepare(plan.steps[i], i, weights));
    if (i == 0 || !steps_[i].loops_only || !steps_[i - 1].loops_only) sections_.push_back(i);
  }
  sections_.push_back(steps_.size());
}

Run::Prepared Run::prepare(const Step& step, std::size_t index, PackedStore& weights) {
  if (!memory_.copies[index]) return {[] {}, true};  // what it makes lies where it belongs
  switch (step.kind) {
    case StepKind::kConvolution:
      return step.gather ? prepare_gathered(step, weights) : prepare_convolution(step, weights);
    case StepKind::kGather:
      return prepare_gather(step);
    case StepKind::kAffine:
      return prepare_affine(step);
    case StepKind::kReorder:
      return prepare_reorder(step);
    case StepKind::kDense:
      return prepare_dense(step);
    case StepKind::kSqueezeExcite:
      return prepare_squeeze_excite(step, weights);
    case StepKind::kLinear:
      return prepare_linear(step, weights);
    case StepKind::kPooling:
      return prepare_pooling(step);
    case StepKind::kRegroup:
      if (is_blocked(plan_.slots[step.writes[0]])) return prepare_regroup(step);
      return prepare_boxed(step);
    case StepKind::kConcat:
      return prepare_concat(step);
    case StepKind::kPointwise:
    case StepKind::kImages:
    case StepKind::kBoxed:
      return prepare_boxed(step);
  }
  __builtin_unreachable();
}

Run::Prepared Run::prepare_convolution(const Step& step, PackedStore& weights) {
  const Convolution& c = *step.node->convolution;
  auto plan = plan_convolution(step.problem, step.implementation)->plan;
  const at::Tensor packed = weights.get(*step.node, {c.weight}, plan.weights_format,
                                        [&] { return pack_weights(plan, c.weight); });
  const at::Tensor bias = c.bias.defined() ? c.bias.contiguous() : c.bias;
  const Slot src = step.reads.at(c.src), dst = step.writes[0];
  const Slot residual = c.residual == kNone ? src : step.reads.at(c.residual);
  const bool loops_only = plan.loops_only;
  return {
      [this, plan = std::move(plan), packed, bias, src, residual, dst, sums = c.residual != kNone] {
        plan.run({.src = slots_[src].const_data_ptr(),
                  .weights = packed.const_data_ptr(),
                  .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                  .residual = sums ? slots_[residual].const_data_ptr() : nullptr,
                  .dst = slots_[dst].mutable_data_ptr()});
      },
      loops_only};
}

std::vector<Slot> Run::sources(const Step& step, const Gather& gather) const {
  std::vector<Slot> slots;
  for (const Value src : gather.srcs) slots.push_back(step.reads.at(src));
  return slots;
}

std::vector<const float*> Run::data(const std::vector<Slot>& slots) const {
  std::vector<const float*> pointers;
  for (const Slot slot : slots) pointers.push_back(slots_[slot].const_data_ptr<float>());
  return pointers;
}

std::vector<std::int64_t> Run::channels(const std::vector<Slot>& slots) const {
  std::vector<std::int64_t> counts;
  for (const Slot slot : slots) counts.push_back(plan_.slots[slot].dims[1]);
  return counts;
}

// A convolution that reads its channels where they are.
Run::Prepared Run::prepare_gathered(const Step& step, PackedStore& weights) {
  const Convolution& c = *step.node->convolution;
  const std::vector<Slot> srcs = sources(step, *step.gather);
  auto plan = plan_direct_gathered(step.problem, step.gather->channels, channels(srcs));
  const at::Tensor packed =
      weights.get(*step.node, {c.weight}, plan.weights_format, [&] { return plan.pack(c.weight); });
  const at::Tensor bias = c.bias.defined() ? c.bias.contiguous() : c.bias;
  const std::optional<Slot> residual =
      c.residual == kNone ? std::nullopt : std::optional(step.reads.at(c.residual));
  return {[this, plan = std::move(plan), packed, bias, srcs, residual, dst = step.writes[0]] {
            plan.run(data(srcs),
                     {.src = nullptr,
                      .weights = packed.const_data_ptr(),
                      .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                      .residual = residual ? slots_[*residual].const_data_ptr() : nullptr,
                      .dst = slots_[dst].mutable_data_ptr()});
          },
          true};
}

Run::Prepared Run::prepare_gather(const Step& step) {
  const Gather& gather = *step.node->gather;
  const std::vector<Slot> srcs = sources(step, gather);
  const Slot to = step.writes[0];
  const SlotPlan& dst = plan_.slots[to];
  if (is_blocked(dst)) {
    const std::int64_t pixels = c10::multiply_integers(at::IntArrayRef(dst.dims).slice(2));
    ChannelGather run(gather.channels, channels(srcs), dst.dims[0], pixels, dst.format);
    return {[this, run = std::move(run), srcs, to] {
              run.run(data(srcs), slots_[to].mutable_data_ptr<float>());
            },
            true};
  }
  std::vector<std::int64_t> first{0}, index;  // in a concat of the sources
  for (const std::int64_t count : channels(srcs)) first.push_back(first.back() + count);
  for (const auto& [src, channel] : gather.channels) {
    index.push_back(first[static_cast<std::size_t>(src)] + channel);
  }
  return {[this, srcs, to, &dst, index = at::tensor(index, at::kLong)] {
    std::vector<at::Tensor> operands;
    for (const Slot slot : srcs) operands.push_back(slots_[slot]);
    slots_[to] = in_format(at::cat(operands, 1).index_select(1, index), dst);
  }};
}

Run::Prepared Run::prepare_affine(const Step& step) {
  const Affine& affine = *step.node->affine;
  const SlotPlan& slot = plan_.slots[step.writes[0]];
  const Dims shape = physical_dims(slot.dims, slot.format);  // [N, blocks, *spatial, lanes]
  const std::int64_t blocks = shape[1], lanes = shape.back();
  std::vector<float> scale(static_cast<std::size_t>(blocks * lanes)), shift(scale);
  std::copy_n(affine.scale.contiguous().const_data_ptr<float>(), slot.dims[1], scale.begin());
  std::copy_n(affine.shift.contiguous().const_data_ptr<float>(), slot.dims[1], shift.begin());
  const std::int64_t rows = shape[0] * blocks, row = c10::multiply_integers(shape) / rows;
  const Epilogue epilogue{.before = affine.activation, .after = {}};
  const auto run = [this, from = step.reads.at(affine.src), to = step.writes[0],
                    scale = std::move(scale), shift = std::move(shift), epilogue, blocks, lanes,
                    rows, row] {
    auto* dst = slots_[to].mutable_data_ptr<float>();
    const kernels::Affine affine{.src = slots_[from].const_data_ptr<float>(),
                                 .scale = scale.data(),
                                 .shift = shift.data(),
                                 .dst = dst,
                                 .block = lanes,
                                 .pixels = row / lanes,
                                 .periods = blocks};
    const auto& table = lanes % 8 == 0 ? kernels::kernels_for(lanes) : kernels::kernels();
    parallel_units(rows, row, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        table.affine(affine, i, i + 1);
        if (!epilogue.empty()) table.finish(epilogue, nullptr, dst + i * row, row);  // in cache
      }
    });
  };
  return {run, true};
}

Run::Prepared Run::prepare_squeeze_excite(const Step& step, PackedStore& weights) {
  const SqueezeExcite& node = *step.node->squeeze_excite;
  const Slot dst = step.writes[0], src = step.reads.at(node.src);
  const std::optional<Slot> residual =
      node.residual == kNone ? std::nullopt : std::optional(step.reads.at(node.residual));
  auto plan = plan_squeeze_excite(problem_of(node, plan_.slots[dst].dims, plan_.slots[dst].format));
  std::vector<at::Tensor> layers;
  for (const auto& [weight, bias, activation] : node.layers) {
    layers.push_back(weight);
    layers.push_back(bias);
  }
  const at::Tensor packed =
      weights.get(*step.node, layers, plan.weights_format, [&] { return plan.pack(node.layers); });
  return {[this, run = std::move(plan.run), packed, src, residual, dst] {
            run({.src = slots_[src].const_data_ptr<float>(),
                 .residual = residual ? slots_[*residual].const_data_ptr<float>() : nullptr,
                 .weights = packed.const_data_ptr<float>(),
                 .dst = slots_[dst].mutable_data_ptr<float>()});
          },
          true};
}

Run::Prepared Run::prepare_linear(const Step& step, PackedStore& weights) {
  const Linear& linear = *step.node->linear;
  const Slot src = step.reads.at(linear.src), dst = step.writes[0];
  const Dims& dims = plan_.slots[src].dims;
  LinearPlan plan = plan_linear({.rows = c10::multiply_integers(dims) / dims.back(),
                                 .inputs = dims.back(),
                                 .outputs = linear.weight.size(0),
                                 .has_bias = linear.bias.defined(),
                                 .activation = linear.activation});
  const at::Tensor packed = weights.get(*step.node, {linear.weight}, plan.weights_format,
                                        [&] { return plan.pack(linear.weight.contiguous()); });
  const at::Tensor bias = linear.bias.defined() ? linear.bias.contiguous() : linear.bias;
  const bool loops_only = plan.loops_only;
  const auto run = [this, plan = std::move(plan), packed, bias, src, dst] {
    plan.run(slots_[src].const_data_ptr<float>(), packed.const_data_ptr(),
             bias.defined() ? bias.const_data_ptr<float>() : nullptr,
             slots_[dst].mutable_data_ptr<float>());
  };
  return {run, loops_only};
}

Run::Prepared Run::prepare_pooling(const Step& step) {
  return {[this, run = plan_pooling(*step.pooling), src = step.reads.begin()->second,
           dst = step.writes[0]] {
    run(slots_[src].const_data_ptr(), slots_[dst].mutable_data_ptr());
  }};
}

Run::Prepared Run::prepare_regroup(const Step& step) {
  const Slot from = step.reads.begin()->second, to = step.writes[0];
  const SlotPlan& dst = plan_.slots[to];
  return {[this, from, to, shape = physical_dims(dst.dims, dst.format)] {
    slots_[to] = slots_[from].view(shape);
  }};
}

Run::Prepared Run::prepare_reorder(const Step& step) {
  const Slot from = step.reads.begin()->second, to = step.writes[0];
  return {[this, from, to] {
    const auto side = [&](Slot slot) -> ReorderSide {
      const SlotPlan& s = plan_.slots[slot];
      return {s.format == kStrided ? resolved(slots_[slot]) : slots_[slot],
              is_blocked(s) ? s.format : 0};
    };
    reorder("optimize", plan_.slots[to].dims, side(from), side(to));
  }};
}

Run::Prepared Run::prepare_dense(const Step& step) {
  return {[this, from = step.reads.begin()->second, to = step.writes[0]] {
    slots_[to] = resolved(slots_[from]).contiguous();
  }};
}

Run::Prepared Run::prepare_concat(const Step& step) {
  std::vector<Slot> from;
  Dims channels;
  for_reads(*step.node, [&](Value value) {
    from.push_back(step.reads.at(value));
    channels.push_back(plan_.slots[from.back()].dims[1]);
  });
  return {[this, from, channels, to = step.writes[0]] {
    std::vector<at::Tensor> operands;
    for (const Slot slot : from) operands.push_back(slots_[slot]);
    slots_[to] = is_blocked(plan_.slots[to]) ? concat_channels(operands, channels)
                                             : in_format(at::cat(operands, 1), plan_.slots[to]);
  }};
}

// An op of ATen on the slots' tensors; blocked ones are seen as images where the op asks for it.
Run::Prepared Run::prepare_boxed(const Step& step) {
  const SlotPlan& dst = plan_.slots[step.writes[0]];
  const bool blocked = is_blocked(dst), images = blocked && step.kind == StepKind::kImages;
  const bool clears = blocked && step.kind == StepKind::kPointwise && dst.dims[1] % dst.format != 0;
  const auto index = static_cast<std::size_t>(&step - plan_.steps.data());
  return {[this, &step, &dst, images, clears, blocked, index] {
    const auto results = call(*step.node, [&](Value value) -> c10::IValue {
      const at::Tensor& tensor = slots_[step.reads.at(value)];
      return images ? as_images(tensor) : tensor;
    });
    check_results(*step.node, results.size(), step.writes.size());
    for (std::size_t i = 0; i < step.writes.size(); ++i) {
      if (!results[i].isTensor()) continue;
      const at::Tensor& result = results[i].toTensor();
      const bool read = memory_.slots[step.writes[i]].last > index;
      if (read && !images && result.defined())
        check_result(*step.node, result, plan_.slots[step.writes[i]]);
      slots_[step.writes[i]] = images ? from_images(result, dst)
                               : step.kind == StepKind::kBoxed && is_plain(dst.format) ? result
                               : blocked ? result.contiguous()
                                         : in_format(result, dst);
    }
    if (clears) clear_tail_(slots_[step.writes[0]], dst.dims[1]);
  }};
}

void Run::begin(const std::vector<Given>& inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) slots_[plan_.inputs[i]] = inputs[i].tensor;
}

// One step, or several that threads go through together.
void Run::run_steps(std::size_t first, std::size_t end) {
  if (end - first == 1) {
    steps_[first].run();
  } else {
    on_all_threads([&] {
      for (std::size_t i = first; i < end; ++i) steps_[i].run();
    });
  }
  for (std::size_t i = first; i < end; ++i) {
    for (const Slot slot : releases_[i]) slots_[slot] = at::Tensor();
  }
}

void Run::end() {
  for (const Slot slot : plan_.inputs) slots_[slot] = at::Tensor();
}

std::map<Value, at::Tensor> Run::operator()(const std::vector<Given>& inputs) {
  const Below below;
  begin(inputs);
  for (std::size_t i = 0; i + 1 < sections_.size(); ++i) run_steps(sections_[i], sections_[i + 1]);
  std::map<Value, at::Tensor> outputs;
  const auto* arena = static_cast<const char*>(arena_.const_data_ptr());
  for (const auto& [value, slot] : plan_.outputs) {
    const at::Tensor& tensor = slots_[slot];
    if (!tensor.defined()) {
      outputs[value] = tensor;
      continue;
    }
    const auto* data = static_cast<const char*>(tensor.const_data_ptr());
    const bool inside = data >= arena && data < arena + arena_.nbytes();
    outputs[value] = inside ? tensor.clone() : tensor;
    if (!memory_.slots[slot].in_arena) slots_[slot] = at::Tensor();
  }
  for (const auto& [value, slot] : plan_.constants) {
    if (outputs.contains(value)) slots_[slot] = outputs[value];
  }
  end();
  return outputs;
}

std::vector<double> Run::timed(const std::vector<Given>& inputs) {
  const Below below;
  begin(inputs);
  std::vector<double> times;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const auto start = std::chrono::steady_clock::now();
    run_steps(i, i + 1);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    times.push_back(time.count());
  }
  end();
  return times;
}

void Run::watched(const std::vector<Given>& inputs, const Seen& seen) {
  const Below below;
  begin(inputs);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    steps_[i].run();  // before memory of ATen's goes
    const Step& step = plan_.steps[i];
    for (std::size_t j = 0; step.node && j < step.writes.size(); ++j) {
      const Slot slot = step.writes[j];
      const SlotPlan& s = plan_.slots[slot];
      const at::Tensor& tensor = slots_[slot];
      if (!tensor.defined()) continue;
      seen(i, step.node->outputs[j],
           is_blocked(s) ? reorder_to_dense("optimize", {tensor, s.dims[1]}, false) : tensor);
    }
  }
  end();
}

}  // namespace torch_blocked::graph
