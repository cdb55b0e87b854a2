// Runs linear layers by oneDNN's inner product, or by our kernel for few rows, which reads the
// weights in oneDNN's format.
#include <algorithm>
#include <array>
#include <memory>
#include <optional>

#include "format/errors.h"
#include "format/sizes.h"
#include "kernels/kernels.h"
#include "kernels/matrix/linear.h"
#include "kernels/rows/reorder.h"
#include "ops/linear/linear.h"
#include "ops/post_ops.h"
#include "runtime/fork.h"
#include "runtime/memory/packed_place.h"
#include "runtime/onednn/descriptor_md.h"
#include "runtime/onednn/engine.h"
#include "runtime/onednn/primitive.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Md = dnnl::memory::desc;
using Tag = dnnl::memory::format_tag;
using kernels::LinearRows;
constexpr auto kF32 = dnnl::memory::data_type::f32;

dnnl::primitive_attr attributes(const kernels::Activation& activation) {
  dnnl::post_ops post_ops;
  append_activation(post_ops, activation);
  dnnl::primitive_attr attr = user_scratchpad();
  attr.set_post_ops(post_ops);
  return attr;
}

// Weights as [blocks of outputs, inputs, outputs of the block], where inputs may be padded. oneDNN
// wants this format for most problems.
struct OutputBlocks {
  std::int64_t outputs, stride;  // floats of a row of a block, and of a block
};

std::optional<OutputBlocks> output_blocks_of(const Md& weights) {
  if (weights.get_inner_nblks() != 2 || weights.get_inner_idxs() != dnnl::memory::dims{1, 0}) {
    return std::nullopt;
  }
  const std::int64_t inputs = weights.get_inner_blks()[0], outputs = weights.get_inner_blks()[1];
  const dnnl::memory::dims strides = weights.get_strides();
  if (strides[1] != inputs * outputs) return std::nullopt;
  return OutputBlocks{outputs, strides[0]};
}

// Packs without oneDNN's reorder. VGG-16's first linear layer, 392 MiB, is optimized in 0.10 to
// 0.17 s. With oneDNN's reorder and a copy of its result it took 0.15 to 0.77 s, depending on
// whether pages were at hand.
void pack_output_blocks(const at::Tensor& weight, const OutputBlocks& blocks, float* packed) {
  constexpr std::int64_t kInputs = 256;
  const auto [block, stride] = blocks;
  const std::int64_t outputs = weight.size(0), inputs = weight.size(1), rows = stride / block,
                     parts = ceil_div(inputs, kInputs);
  const float* from = weight.const_data_ptr<float>();
  parallel_units(
      ceil_div(outputs, block) * parts, kInputs * block, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t unit = begin; unit < end; ++unit) {
          const std::int64_t index = unit / parts, first = unit % parts * kInputs;
          const std::int64_t last = std::min(first + kInputs, inputs);
          const std::int64_t lanes = std::min(block, outputs - index * block);
          float* to = packed + index * stride + first * block;  // [inputs of this part, block]
          if (lanes < block) std::fill_n(to, (last - first) * block, 0.f);
          kernels::kernels().transpose(
              {from + index * block * inputs + first, inputs, to, block, lanes, last - first});
          if (last == inputs) std::fill_n(to + (last - first) * block, (rows - last) * block, 0.f);
        }
      });
}

at::Tensor pack(const at::Tensor& weight, const Md& packed_md) {
  const auto bytes = static_cast<std::int64_t>(packed_md.get_size());
  trace::Timed timed(trace::Kind::kPack, "linear", bytes);
  const at::Tensor packed = empty_packed(bytes, at::kByte);
  if (const auto blocks = output_blocks_of(packed_md)) {
    pack_output_blocks(weight, *blocks, static_cast<float*>(packed.mutable_data_ptr()));
    return packed;
  }
  const Md md(weight.sizes().vec(), kF32, Tag::ab);
  const NoFork no_fork;
  const dnnl::reorder::primitive_desc pd(engine(), md, engine(), packed_md, user_scratchpad());
  const std::array<Primitive::Argument, 2> arguments{
      {{DNNL_ARG_SRC, md}, {DNNL_ARG_DST, packed_md}}};
  Primitive(dnnl::reorder(pd), arguments, pd.scratchpad_desc())
      .execute({weight.const_data_ptr(), packed.mutable_data_ptr()});
  return packed;
}

// The problem as our kernel for few rows takes it; nothing if it cannot read oneDNN's weights
// format.
std::optional<LinearRows> few_rows(const LinearProblem& p, const Md& weights) {
  const std::int64_t width = kernels::kernels().width;
  const auto blocks = output_blocks_of(weights);
  if (p.rows > LinearRows::kMostRows || !blocks) return std::nullopt;
  const std::int64_t outputs = blocks->outputs;
  if (outputs % width != 0 || outputs > LinearRows::kMostVectors * width) return std::nullopt;
  LinearRows rows{};
  rows.rows = p.rows;
  rows.inputs = p.inputs;
  rows.outputs = p.outputs;
  rows.block = outputs;
  rows.weights_stride = blocks->stride;
  rows.activation = p.activation();
  return rows;
}

void run_few_rows(LinearRows rows, const LayerBuffers& buffers) {
  rows.src = buffers.src;
  rows.weights = buffers.weights;
  rows.bias = buffers.bias;
  rows.dst = buffers.dst;
  parallel_units(ceil_div(rows.outputs, rows.block), rows.weights_stride,
                 [&](std::int64_t begin, std::int64_t end) {
                   kernels::kernels().linear_rows(rows, begin, end);
                 });
}

// oneDNN's primitive. Both implementations take the weights in the format that it chooses, so
// weights are packed once for any number of rows.
struct InnerProduct {
  NoFork no_fork = {};
  Md src_md, weights_md, bias_md, dst_md;
  dnnl::inner_product_forward::primitive_desc pd;

  explicit InnerProduct(const LinearProblem& p)
      : src_md({p.rows, p.inputs}, kF32, Tag::ab),
        weights_md({p.outputs, p.inputs}, kF32, Tag::any),
        bias_md(p.has_bias ? Md({p.outputs}, kF32, Tag::a) : Md()),
        dst_md({p.rows, p.outputs}, kF32, Tag::ab),
        pd(engine(), dnnl::prop_kind::forward_inference, src_md, weights_md, bias_md, dst_md,
           attributes(p.activation())) {}
};

LayerPlan plan_on(const Md& packed_md) {
  Key key("linear");
  key.add(packed_md.get_padded_dims()).add(packed_md.get_strides()).add(packed_md.get_inner_blks());
  return {.weights_format = std::move(key.add(packed_md.get_inner_idxs())).text(),
          .pack = [packed_md](const at::Tensor& weight) { return pack(weight, packed_md); },
          .run = {},
          .weights_desc = descriptor_of(packed_md)};
}

const char* refuses_onednn(const LinearProblem& p) {
  return p.dtype != at::kFloat ? "computes float32 only" : nullptr;
}

// Plans the problem without its epilogue, followed by a pass that applies it.
std::optional<LayerPlan> with_pass(const LinearProblem& p,
                                   std::optional<LayerPlan> (*plan)(const LinearProblem&)) {
  LinearProblem plain = p;
  plain.epilogue = {};
  std::optional<LayerPlan> whole = plan(plain);
  if (!whole) return whole;
  whole->run = [run = std::move(whole->run), epilogue = p.epilogue,
                floats = p.rows * p.outputs](const LayerBuffers& b) {
    run(b);
    finish(epilogue, static_cast<const float*>(b.residual), static_cast<float*>(b.dst), floats);
  };
  return whole;
}

std::optional<LayerPlan> plan_primitive(const LinearProblem& p) {
  const InnerProduct product(p);
  const Md packed_md = product.pd.weights_desc();
  std::vector<Primitive::Argument> arguments{{DNNL_ARG_SRC, product.src_md},
                                             {DNNL_ARG_WEIGHTS, packed_md},
                                             {DNNL_ARG_DST, product.dst_md}};
  if (p.has_bias) arguments.push_back({DNNL_ARG_BIAS, product.bias_md});
  const auto primitive = std::make_shared<Primitive>(dnnl::inner_product_forward(product.pd),
                                                     arguments, product.pd.scratchpad_desc());
  LayerPlan plan = plan_on(packed_md);
  plan.run = [primitive, has_bias = p.has_bias](const LayerBuffers& b) {
    if (has_bias) {
      primitive->execute({b.src, b.weights, b.dst, b.bias});
    } else {
      primitive->execute({b.src, b.weights, b.dst});
    }
  };
  return plan;
}

// A residual or a clamp runs in a separate pass; oneDNN's own clamp would lose NaN.
std::optional<LayerPlan> plan_onednn(const LinearProblem& p) {
  const bool alone = !p.epilogue.residual && is_as_in_aten(p.activation());
  return alone ? plan_primitive(p) : with_pass(p, plan_primitive);
}

// Bytes per microsecond at which weights are read from memory: 31 GB/s by our kernel, 17 by
// oneDNN's. The more rows there are, the less this matters.
constexpr double kOurBytes = 31e3, kOneDnnBytes = 17e3;

double weights_bytes(const LinearProblem& p) {
  return static_cast<double>(p.inputs * p.outputs) * sizeof(float);
}

// Where the weights do not dominate, it is about as fast as `direct`, but threads wait for each
// other.
double estimate_onednn(const LinearProblem& p) {
  constexpr double kFlops = 80e3;
  return std::max(weights_bytes(p) / kOneDnnBytes,
                  2 * static_cast<double>(p.rows * p.inputs * p.outputs) / kFlops);
}

const char* refuses_few_rows(const LinearProblem& p) {
  if (p.dtype != at::kFloat) return "computes float32 only";
  return p.rows > LinearRows::kMostRows ? "is for few rows" : nullptr;
}

std::optional<LayerPlan> plan_few_rows(const LinearProblem& p) {
  if (p.epilogue.residual) return with_pass(p, plan_few_rows);
  const Md packed_md = InnerProduct(p).pd.weights_desc();
  const auto rows = few_rows(p, packed_md);
  if (!rows) return std::nullopt;
  LayerPlan plan = plan_on(packed_md);
  plan.run = [rows = *rows](const LayerBuffers& buffers) { run_few_rows(rows, buffers); };
  plan.loops_only = true;
  return plan;
}

// 8 rows of 25088 inputs and 4096 outputs take 23 ms here and 19 by oneDNN with AVX-512, 32 and 62
// with AVX2.
double estimate_few_rows(const LinearProblem& p) {
  const std::int64_t most =
      kernels::kernels().width > 8 ? LinearRows::kMostRows / 2 : LinearRows::kMostRows;
  return p.rows > most ? kNever : weights_bytes(p) / kOurBytes;
}

}  // namespace

constinit const LinearImplementation linears::few_rows = {
    .name = "few_rows",
    .refuses = refuses_few_rows,
    .plan = plan_few_rows,
    .estimate = estimate_few_rows,
};

constinit const LinearImplementation linears::onednn = {
    .name = "onednn",
    .refuses = refuses_onednn,
    .plan = plan_onednn,
    .estimate = estimate_onednn,
};

}  // namespace torch_blocked
