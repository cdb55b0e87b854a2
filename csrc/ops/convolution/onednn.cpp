// Runs convolutions by oneDNN's primitives, but never by a `ref` kernel.
#include "ops/convolution/onednn.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <array>
#include <cstring>
#include <memory>

#include "format/errors.h"
#include "ops/convolution_time.h"
#include "ops/moving/reorder.h"
#include "ops/post_ops.h"
#include "ops/wanted_formats.h"
#include "runtime/fork.h"
#include "runtime/memory/packed_place.h"
#include "runtime/memory/packed_weights.h"
#include "runtime/onednn/descriptor_md.h"
#include "runtime/onednn/engine.h"
#include "runtime/onednn/primitive.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

using Problem = ConvolutionProblem;

Dims onednn_weight_dims(const Problem& p) {
  Dims dims = p.weight_dims;
  if (p.transposed) std::swap(dims[0], dims[1]);  // [OC/G, IC, ...]
  if (p.groups == 1) return dims;
  dims[p.transposed ? 1 : 0] /= p.groups;
  dims.insert(dims.begin(), p.groups);
  return dims;
}

dnnl::memory::desc dense_weights_md(const Problem& p, const at::Tensor& weight) {
  Dims strides = weight.strides().vec();
  if (p.transposed) std::swap(strides[0], strides[1]);
  if (p.groups > 1) {
    strides.insert(strides.begin(), weight.stride(0) * (p.weight_dims[0] / p.groups));
  }
  return {onednn_weight_dims(p), onednn_type(p.dtype), strides};
}

namespace {

// A primitive and the weights format it chose.
struct Convolution {
  Primitive primitive;
  dnnl::memory::desc weights_md;
  std::string weights_format;  // the key of packed weights
};

// The key has `transposed` because the gradient of a convolution packs the same weights with O and
// I exchanged.
std::string name_of(const dnnl::memory::desc& md, bool transposed) {
  Key key("onednn");
  key.add(transposed).add(md.get_padded_dims()).add(md.get_strides()).add(md.get_inner_blks());
  return std::move(key.add(md.get_inner_idxs())).text();
}

using Arguments = std::vector<Primitive::Argument>;

// The epilogue as post-ops. The residual is added to the arguments.
dnnl::primitive_attr attributes(const Epilogue& epilogue, const dnnl::memory::desc& dst_md,
                                Arguments& arguments) {
  dnnl::post_ops post_ops;
  append_activation(post_ops, epilogue.before);
  if (epilogue.residual) {
    post_ops.append_binary(dnnl::algorithm::binary_add, dst_md);
    arguments.push_back(
        {DNNL_ARG_ATTR_MULTIPLE_POST_OP(post_ops.len() - 1) | DNNL_ARG_SRC_1, dst_md});
    append_activation(post_ops, epilogue.after);
  }
  dnnl::primitive_attr attr = user_scratchpad();
  attr.set_post_ops(post_ops);
  return attr;
}

// Chooses one name for an image of one channel or one pixel, which is plain and channels-last at
// once. oneDNN's primitive cache takes the two descriptors for equal, but oneDNN has kernels for
// one that it lacks for the other. Without one name, the result would depend on which name was
// asked for first.
Problem with_one_name(Problem p) {
  if (p.src_format.is_blocked() || p.dst_format.is_blocked()) return p;
  const auto is_both = [](const Dims& dims) {
    return dims[1] == 1 || c10::multiply_integers(dims) == dims[0] * dims[1];
  };
  const bool src = is_both(p.src_dims), dst = is_both(p.dst_dims);
  if (src) p.src_format = dst ? kChannelsLast : p.dst_format;
  if (dst) p.dst_format = p.src_format;
  return p;
}

struct Sides {
  dnnl::memory::desc src, weights, dst;
};

dnnl::memory::desc bias_md_of(const Problem& p) {
  return p.has_bias ? dnnl::memory::desc({p.dst_dims[1]}, onednn_type(p.dtype),
                                         dnnl::memory::format_tag::a)
                    : dnnl::memory::desc();
}

// Empty if oneDNN has no kernel.
template <typename Forward>
typename Forward::primitive_desc describe(const Problem& p, const Sides& sides,
                                          const dnnl::primitive_attr& attr) {
  Dims dilates = p.dilation;  // oneDNN counts the gaps
  for (std::int64_t& dilate : dilates) --dilate;
  Dims padding_end = p.padding;  // includes what dst has beyond the symmetric padding
  for (std::size_t i = 0; i < p.spatial() && !p.transposed; ++i) {
    padding_end[i] =
        std::max(p.padding[i], p.window(i).padding_end(p.src_dims[2 + i], p.dst_dims[2 + i]));
  }
  return {
      engine(),
      dnnl::prop_kind::forward_inference,
      p.transposed ? dnnl::algorithm::deconvolution_direct : dnnl::algorithm::convolution_direct,
      sides.src,
      sides.weights,
      bias_md_of(p),
      sides.dst,
      p.stride,
      dilates,
      p.padding,
      padding_end,
      attr,
      /*allow_empty=*/true};
}

dnnl::memory::desc any_md(const Dims& dims, at::ScalarType dtype) {
  return {dims, onednn_type(dtype), dnnl::memory::format_tag::any};
}

template <typename Forward>
std::shared_ptr<Convolution> make(const Problem& p) {
  const dnnl::memory::desc src_md = activation_md(p.src_dims, p.src_format, p.dtype),
                           dst_md = activation_md(p.dst_dims, p.dst_format, p.dtype);
  Arguments rest;
  const NoFork no_fork;
  // `any` for the weights only: oneDNN would pick nhwc for activations.
  const auto pd = describe<Forward>(p, {src_md, any_md(onednn_weight_dims(p), p.dtype), dst_md},
                                    attributes(p.epilogue, dst_md, rest));
  if (!pd) return nullptr;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, "convolution", pd.impl_info_str()});
    return nullptr;
  }
  Arguments arguments{
      {DNNL_ARG_SRC, src_md}, {DNNL_ARG_WEIGHTS, pd.weights_desc()}, {DNNL_ARG_DST, dst_md}};
  if (p.has_bias) arguments.push_back({DNNL_ARG_BIAS, bias_md_of(p)});
  arguments.insert(arguments.end(), rest.begin(), rest.end());
  return std::make_shared<Convolution>(
      Convolution{Primitive(Forward(pd), arguments, pd.scratchpad_desc()), pd.weights_desc(),
                  name_of(pd.weights_desc(), p.transposed)});
}

template <typename Forward>
WantedFormats asked(const Problem& p) {
  const NoFork no_fork;
  const auto pd =
      describe<Forward>(p,
                        {any_md(p.src_dims, p.dtype), any_md(onednn_weight_dims(p), p.dtype),
                         any_md(p.dst_dims, p.dtype)},
                        user_scratchpad());
  if (!pd)
    fail_not_implemented(
        "wanted_formats", "a convolution that oneDNN takes",
        text("weight ", p.weight_dims, " on ", p.src_dims, ", ", c10::toString(p.dtype)),
        "ask without an implementation");
  return {pd.impl_info_str(), descriptor_of(pd.src_desc()).value(),
          descriptor_of(pd.weights_desc()), descriptor_of(pd.dst_desc()).value()};
}

std::shared_ptr<Convolution> make(const Problem& problem) {
  const Problem p = with_one_name(problem);
  return p.transposed ? make<dnnl::deconvolution_forward>(p) : make<dnnl::convolution_forward>(p);
}

std::int64_t packed_bytes(const Convolution& convolution) {
  return static_cast<std::int64_t>(convolution.weights_md.get_size());
}

at::Tensor pack(const Problem& p, const at::Tensor& weight, const Convolution& convolution) {
  const dnnl::memory::desc& weights_md = convolution.weights_md;
  const at::Tensor dense = weight.is_non_overlapping_and_dense() ? weight : weight.contiguous();
  const std::int64_t bytes = packed_bytes(convolution);
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(dense.nbytes()) + bytes);
  const dnnl::memory::desc src_md = dense_weights_md(p, dense);
  const at::Tensor packed = empty_packed(bytes, at::kByte);
  const NoFork no_fork;
  const dnnl::reorder::primitive_desc pd(engine(), src_md, engine(), weights_md, user_scratchpad());
  const std::array<Primitive::Argument, 2> arguments{
      {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DST, weights_md}}};
  Primitive(dnnl::reorder(pd), arguments, pd.scratchpad_desc())
      .execute({dense.const_data_ptr(), packed.mutable_data_ptr()});
  return packed;
}

void execute(const Problem& p, Convolution& convolution, const LayerBuffers& buffers) {
  const auto& [src, weights, bias, residual, dst, on_stored] = buffers;
  Primitive& primitive = convolution.primitive;
  if (p.has_bias && p.epilogue.residual) {
    primitive.execute({src, weights, dst, bias, residual});
  } else if (p.has_bias || p.epilogue.residual) {
    primitive.execute({src, weights, dst, p.has_bias ? bias : residual});
  } else {
    primitive.execute({src, weights, dst});
  }
}

// Clears by overlapping stores of fixed sizes: for so few bytes a call of memset() takes longer.
void clear(char* data, std::size_t bytes) {
  for (; bytes > 64; data += 32, bytes -= 32) std::memset(data, 0, 32);
  const auto ends = [&](auto size) {
    std::memset(data, 0, size);
    std::memset(data + bytes - size, 0, size);
  };
  if (bytes >= 32) return ends(std::integral_constant<std::size_t, 32>());
  if (bytes >= 16) return ends(std::integral_constant<std::size_t, 16>());
  if (bytes >= 8) return ends(std::integral_constant<std::size_t, 8>());
  if (bytes >= 4) return ends(std::integral_constant<std::size_t, 4>());
  std::memset(data, 0, 2);
}

// oneDNN computes the tail too, with weights of zero. An infinity or a NaN in src makes it NaN.
void clear_tail(const Problem& p, void* dst) {
  const std::int64_t block = p.dst_format.block, used = p.dst_format.tail(p.dst_dims[1]);
  if (used == 0) return;
  const auto size = static_cast<std::int64_t>(c10::elementSize(p.dtype));
  const std::int64_t blocks = p.dst_format.blocks(p.dst_dims[1]);
  const std::int64_t pixels = c10::multiply_integers(at::IntArrayRef(p.dst_dims).slice(2));
  const auto gap = static_cast<std::size_t>((block - used) * size);
  parallel_units(p.dst_dims[0] * pixels, block, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = (i / pixels * blocks + blocks - 1) * pixels + i % pixels;
      clear(static_cast<char*>(dst) + (row * block + used) * size, gap);
    }
  });
}

// Turns a 1-D problem into a 2-D one of height 1 over the same memory. oneDNN has more kernels for
// 2-D (1-D transposed in 8c is `ref` on AVX-512). At height 1 the stride has no meaning; it is set
// equal to the other because a kernel requires that.
Problem as_2d(Problem p) {
  if (p.spatial() != 1) return p;
  for (Dims* dims : {&p.src_dims, &p.dst_dims, &p.weight_dims}) dims->insert(dims->begin() + 2, 1);
  p.stride.insert(p.stride.begin(), p.stride[0]);
  p.dilation.insert(p.dilation.begin(), 1);
  for (Dims* values : {&p.padding, &p.output_padding}) values->insert(values->begin(), 0);
  return p;
}

// Describes what pack() makes. as_2d() may have lifted the problem.
std::optional<Descriptor> weights_desc(const Problem& problem, const Convolution& convolution) {
  const auto desc = descriptor_of(convolution.weights_md);
  if (!desc) return std::nullopt;
  const Descriptor dropped = desc->reshape(onednn_weight_dims(problem), /*allow_empty=*/true);
  return dropped.is_zero() ? std::nullopt : std::optional(dropped);
}

// A clamp of float32 runs in a pass of its own, because oneDNN's loses NaN. This costs 1 % of the
// time of most models and 3 % of mobilenet_v2. bfloat16 and float16 have no such pass.
bool takes_epilogue(const Problem& p) {
  return p.dtype != at::kFloat ||
         (is_as_in_aten(p.epilogue.before) && is_as_in_aten(p.epilogue.after));
}

const char* refuses_onednn_blocked(const Problem& p) {
  if (!has_onednn_type(p.dtype)) return "has no kernel for the dtype on this CPU";
  if (!takes_epilogue(p)) return "has an activation that loses NaN";
  // oneDNN 3.2 adds the bias of a transposed convolution into the tail of 4c and 32c.
  const bool adds_to_tail = p.dst_format.block == 4 || p.dst_format.block == 32;
  return p.transposed && adds_to_tail ? "writes into the tail" : nullptr;
}

const char* refuses_onednn_channels_last(const Problem& p) {
  if (!has_onednn_type(p.dtype)) return "has no kernel for the dtype on this CPU";
  return p.epilogue.empty() ? nullptr : "fuses nothing";
}

std::optional<LayerPlan> plan_onednn_blocked(const Problem& problem) {
  const Problem p = as_2d(problem);
  const auto convolution = make(p);
  if (!convolution) return std::nullopt;
  const bool lifted = p.dst_dims.size() > problem.dst_dims.size();
  return LayerPlan{.weights_format = convolution->weights_format,
                   .pack =
                       [p, convolution, lifted](const at::Tensor& weight) {
                         return pack(p, lifted ? weight.unsqueeze(2) : weight, *convolution);
                       },
                   .packed_bytes = packed_bytes(*convolution),
                   .run =
                       [p, convolution](const LayerBuffers& buffers) {
                         execute(p, *convolution, buffers);
                         clear_tail(p, buffers.dst);
                       },
                   .weights_desc = weights_desc(problem, *convolution)};
}

std::optional<LayerPlan> plan_onednn_channels_last(const Problem& problem) {
  Problem p = problem;
  p.src_format = p.dst_format = kChannelsLast;
  const auto convolution = make(p);
  if (!convolution) return std::nullopt;
  const auto run = [problem, p, convolution](const LayerBuffers& buffers) {
    const at::TensorOptions options = at::TensorOptions().dtype(p.dtype);
    const at::Tensor src = empty_dense(p.src_dims, true, options),
                     dst = empty_dense(p.dst_dims, true, options);
    const auto side = [&](const void* data, const Dims& dims, Format format) {
      return reorder_side(data, dims, format, p.dtype);
    };
    reorder("convolution", p.src_dims, side(buffers.src, p.src_dims, problem.src_format), {src});
    LayerBuffers inner = buffers;
    inner.src = src.const_data_ptr();
    inner.dst = dst.mutable_data_ptr();
    execute(p, *convolution, inner);
    reorder("convolution", p.dst_dims, {dst}, side(buffers.dst, p.dst_dims, problem.dst_format));
  };
  return LayerPlan{
      .weights_format = convolution->weights_format,
      .pack = [p, convolution](const at::Tensor& weight) { return pack(p, weight, *convolution); },
      .packed_bytes = packed_bytes(*convolution),
      .run = run,
      .weights_desc = weights_desc(problem, *convolution)};
}

// The time of the convolution and of the two reorders around it.
double estimate_onednn_channels_last(const Problem& p) {
  return kBarelySlower * direct_microseconds(p) + moving_microseconds(p.src_dims, p.dtype) +
         moving_microseconds(p.dst_dims, p.dtype);
}

constexpr const char* kOnlyRef = "has only a `ref` kernel for it, or none";

}  // namespace

constinit const ConvolutionImplementation convolutions::onednn_blocked = {
    .name = "onednn_blocked",
    .refuses = refuses_onednn_blocked,
    .plan = plan_onednn_blocked,
    .fails = kOnlyRef,
    .estimate = direct_microseconds,
    .traits = {.any_format = true, .yardstick = true},
};

constinit const ConvolutionImplementation convolutions::onednn_channels_last = {
    .name = "onednn_channels_last",
    .refuses = refuses_onednn_channels_last,
    .plan = plan_onednn_channels_last,
    .fails = kOnlyRef,
    .estimate = estimate_onednn_channels_last,
    .traits = {.last_resort = true},
};

WantedFormats formats_wanted_by_onednn(const Problem& p) {
  if (!has_onednn_type(p.dtype))
    fail_type("wanted_formats", "a dtype that oneDNN has kernels for on this CPU",
              c10::toString(p.dtype), "use float32");
  return p.transposed ? asked<dnnl::deconvolution_forward>(p) : asked<dnnl::convolution_forward>(p);
}

}  // namespace torch_blocked
