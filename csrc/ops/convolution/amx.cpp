// Runs float32 convolutions by tiles of bfloat16 products.
#include "ops/products/amx.h"

#include <memory>

#include "ops/convolution/convolution.h"
#include "ops/products/transposed_phases.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

PixelSteps steps_of(const Format& format, const Dims& dims) {
  const std::int64_t channels = dims[1];
  const std::int64_t pixels = c10::multiply_integers(at::IntArrayRef(dims).slice(2));
  constexpr std::int64_t kWidth = kernels::Amx::kWidth;
  if (!format.is_blocked()) return {channels, kWidth, channels * pixels};
  return {kWidth, pixels * kWidth, round_up(channels, kWidth) * pixels};
}

AmxProblem amx_problem(const Problem& p, const ConvolutionPhase& phase) {
  return {.images = p.src_dims[0],
          .ic = p.src_dims[1],
          .oc = p.dst_dims[1],
          .sizes = phase.sizes,
          .grid = phase.grid,
          .src = steps_of(p.src_format, p.src_dims),
          .dst = steps_of(p.dst_format, p.dst_dims),
          .has_tail = p.dst_format.is_blocked(),
          .epilogue = p.epilogue};
}

// The products of each phase. The weights of the phases lie one after the other.
struct Work {
  ConvolutionPhases phases;
  std::vector<AmxProducts> products;

  explicit Work(const Problem& p) : phases(p) {
    for (const ConvolutionPhase& phase : phases.phases()) {
      products.emplace_back(amx_problem(p, phase));
    }
  }

  std::int64_t packed_floats() const {
    std::int64_t floats = 0;
    for (const AmxProducts& each : products) floats += each.packed_floats();
    return floats;
  }

  at::Tensor pack(const at::Tensor& weight) const {
    const at::Tensor packed = empty_packed(packed_floats(), at::kFloat);
    trace::Timed timed(trace::Kind::kPack, "convolution",
                       static_cast<std::int64_t>(weight.nbytes() + packed.nbytes()));
    const std::vector<at::Tensor> weights = phases.weights(weight);
    auto* to = packed.mutable_data_ptr<float>();
    for (std::size_t i = 0; i < products.size(); ++i) {
      products[i].pack(weights[i], to);
      to += products[i].packed_floats();
    }
    return packed;
  }

  AmxProducts::Buffers buffers_of(const LayerBuffers& b) const {
    return {.src = static_cast<const float*>(b.src),
            .weights = static_cast<const float*>(b.weights),
            .bias = static_cast<const float*>(b.bias),
            .residual = static_cast<const float*>(b.residual),
            .dst = static_cast<float*>(b.dst)};
  }

  void run(const LayerBuffers& b) const {
    AmxProducts::Buffers buffers = buffers_of(b);
    for (const AmxProducts& each : products) {
      each.run(buffers);
      buffers.weights += each.packed_floats();
    }
  }
};

// Vectors of channels are blocks; in channels-last they follow each other in a pixel. Nothing lies
// between rows, because no float32 row stage has padding beside them.
RunRows rows_of(const std::shared_ptr<const Work>& work, const Problem& p, const LayerBuffers& b) {
  const auto vector_of = [](const Format& format, const BlockedRows& rows) {
    return format.is_blocked() ? rows.block / static_cast<std::int64_t>(sizeof(float))
                               : kernels::Amx::kWidth;
  };
  return
      [work, src_format = p.src_format, dst_format = p.dst_format, columns = p.dst_dims.back(),
       all = work->buffers_of(b), vector_of](const BlockedRows& src, const std::uint8_t* residual,
                                             const BlockedRows& dst, Range rows) {
        AmxProducts::Buffers buffers = all;
        buffers.src = reinterpret_cast<const float*>(src.at(0, rows.begin));
        buffers.residual = reinterpret_cast<const float*>(residual);
        buffers.dst = reinterpret_cast<float*>(dst.at(0, rows.begin));
        work->products[0].run_pixels(buffers, (rows.end - rows.begin) * columns,
                                     vector_of(src_format, src), vector_of(dst_format, dst));
      };
}

// The handicap holds for 1x1 only. The rival of larger kernels is Winograd, whose weights are four
// times as large and slow down a model more.
double handicap(const Problem& p) {
  return p.weight_dims[0] * p.weight_dims[1] == c10::multiply_integers(p.weight_dims) ? kAmxHandicap
                                                                                      : 1;
}

const char* refuses_amx(const Problem& p) {
  if (!AmxProducts::available()) return "is for CPUs with AMX";
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (p.groups != 1) return "takes one group only";
  for (const Format& format : {p.src_format, p.dst_format}) {
    const bool takes =
        format == kChannelsLast || (format.is_blocked() && format.block == kernels::Amx::kWidth);
    if (!takes) return "takes blocks of 16 and channels-last only";
  }
  return nullptr;
}

double estimate_amx(const Problem& p) {
  double sum = 0;
  const ConvolutionPhases phases(p);
  for (const ConvolutionPhase& phase : phases.phases()) {
    sum += AmxProducts::estimate(amx_problem(p, phase));
  }
  return handicap(p) * sum;
}

std::optional<LayerPlan> plan_amx(const Problem& p) {
  const auto work = std::make_shared<const Work>(p);
  const AmxProducts& first = work->products[0];
  return LayerPlan{
      .weights_format = "amx" + work->phases.name(),
      .pack = [work](const at::Tensor& weight) { return work->pack(weight); },
      .packed_bytes = work->packed_floats() * kFloatBytes,
      .run = [work](const LayerBuffers& buffers) { work->run(buffers); },
      .loops_only = true,
      .handicap = handicap(p),
      .row_stage = first.pixelwise() ? pixel_row_stage(p, first.packed_floats()) : std::nullopt,
      .run_rows = [work, p](const LayerBuffers& b) { return rows_of(work, p, b); }};
}

}  // namespace

constinit const ConvolutionImplementation convolutions::amx = {
    .name = "amx",
    .refuses = refuses_amx,
    .plan = plan_amx,
    .estimate = estimate_amx,
    .traits = {.sums_in_place = true, .any_format = true, .in_rows = true},
};

}  // namespace torch_blocked
