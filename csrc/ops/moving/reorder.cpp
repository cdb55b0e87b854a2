// Reorders between dense, channels-last and blocked activations: by our kernels, else by oneDNN,
// else by ATen.
#include "ops/moving/reorder.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <functional>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/rows/reorder.h"
#include "ops/implementations.h"
#include "ops/moving/contiguous.h"
#include "ops/registered.h"
#include "runtime/fork.h"
#include "runtime/onednn/engine.h"
#include "runtime/onednn/primitive.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Side = ReorderSide;

dnnl::memory::desc md_of(const Side& side, at::IntArrayRef dims) {
  return side.is_blocked() ? activation_md(dims, side.format, side.tensor.scalar_type())
                           : strided_md(side.tensor);
}

std::string_view name_of(const Side& side, at::IntArrayRef dims) {
  return (side.is_blocked() ? side.format : format_of(side.tensor)).name(dims.size());
}

struct Reorder {
  Dims dims;  // [N, C, *spatial]
  Side src, dst;

  bool changes_dtype() const { return src.tensor.scalar_type() != dst.tensor.scalar_type(); }
};

// A dst larger than this is written past the cache: its next reader would not find it there.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

// Whether our kernels take the reorder: contiguous or channels-last <-> blocked with 4-byte
// elements. oneDNN's reach 0.7 and 0.45 of memcpy's pace at 100 MB.
bool is_ours(const Reorder& reorder) {
  const Side& dense = reorder.src.is_blocked() ? reorder.dst : reorder.src;
  const Side& blocked = reorder.src.is_blocked() ? reorder.src : reorder.dst;
  if (dense.is_blocked() || !blocked.is_blocked() || reorder.changes_dtype()) return false;
  return dense.tensor.itemsize() == sizeof(float) && format_of(dense.tensor) != kStrided;
}

void run_ours(const Reorder& reorder) {
  const bool from_blocked = reorder.src.is_blocked();
  const Side& dense = from_blocked ? reorder.dst : reorder.src;
  const std::int64_t block = (from_blocked ? reorder.src : reorder.dst).format.block;
  const bool planes = dense.tensor.is_contiguous();
  const auto& table = kernels::kernels_for(block);
  const auto kernel = from_blocked ? (planes ? table.unblock_planes : table.unblock_channels)
                                   : (planes ? table.block_planes : table.block_channels);
  const std::int64_t images = reorder.dims[0], channels = reorder.dims[1];
  const std::int64_t pixels = dense.tensor.numel() / (images * channels);
  const auto* src = static_cast<const float*>(reorder.src.tensor.const_data_ptr());
  auto* dst = static_cast<float*>(reorder.dst.tensor.mutable_data_ptr());
  const std::int64_t src_image = reorder.src.tensor.numel() / images;
  const std::int64_t dst_image = reorder.dst.tensor.numel() / images;
  const bool stream = reorder.dst.tensor.nbytes() > kStreamBytes;
  // Threads share tiles of pixels of all images, so that no two write the same cache line of a
  // plane.
  constexpr std::int64_t kTile = 16;
  const std::int64_t tiles = ceil_div(pixels, kTile);
  parallel_units(
      images * tiles, kTile * round_up(channels, block), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t at = begin; at < end;) {
          const std::int64_t image = at / tiles, first = at % tiles;
          const std::int64_t last = std::min(tiles, first + end - at);
          kernel(
              {src + image * src_image, dst + image * dst_image, channels, block, pixels, stream},
              first * kTile, std::min(last * kTile, pixels));
          at += last - first;
        }
      });
}

// Runs a reorder that an implementation takes. One is made for every reorder, so it captures little
// enough that std::function does not allocate memory.
using Call = std::function<void()>;

std::optional<Call> plan_transpose(const Reorder& reorder) {
  if (!is_ours(reorder)) return std::nullopt;
  return [&reorder] { run_ours(reorder); };
}

// Reorders any view to contiguous or channels-last. On two threads of a Zen 4, from channels-last,
// [1, 96, 3136] takes 38 us and 101 by oneDNN, [1, 384, 196] 14 and 27. But it is slower if planes
// are powers of two apart: [1, 32, 16384] takes 75 and 59, [1, 64, 4096] 44 and 33.
std::optional<Call> plan_in_order(const Reorder& r) {
  if (r.src.is_blocked() || r.dst.is_blocked() || r.changes_dtype()) return std::nullopt;
  if (r.src.tensor.scalar_type() != at::kFloat) return std::nullopt;
  const Format format = format_of(r.dst.tensor);
  if (format == kStrided) return std::nullopt;
  return [&r, format] {
    at::DimVector sizes(r.src.tensor.sizes()), strides(r.src.tensor.strides());
    if (format == kChannelsLast) {
      std::rotate(sizes.begin() + 1, sizes.begin() + 2, sizes.end());
      std::rotate(strides.begin() + 1, strides.begin() + 2, strides.end());
    }
    CopyInOrder(sizes, strides)(r.src.tensor.const_data_ptr<float>(),
                                r.dst.tensor.mutable_data_ptr<float>());
  };
}

// Whether it is a picture of bytes, which quantized convolutions read as nChw4c. [1, 3, 224, 224]
// takes 4 us. oneDNN's reorder takes 54 us on two threads and 25 on one.
bool is_picture(const Reorder& r) {
  return r.dst.format.block == 4 && r.dims[1] <= 4 && !r.src.is_blocked() &&
         r.src.tensor.itemsize() == 1 && !r.changes_dtype() && format_of(r.src.tensor) != kStrided;
}

void run_picture(const Reorder& r) {
  const bool planes = r.src.tensor.is_contiguous();
  const std::int64_t images = r.dims[0], channels = r.dims[1];
  const std::int64_t pixels = r.src.tensor.numel() / (images * channels);
  const auto* src = static_cast<const std::uint8_t*>(r.src.tensor.const_data_ptr());
  auto* dst = static_cast<std::uint8_t*>(r.dst.tensor.mutable_data_ptr());
  constexpr std::int64_t kPart = 1024;  // pixels
  const std::int64_t parts = ceil_div(pixels, kPart);
  parallel_units(images * parts, kPart * 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t image = i / parts, first = i % parts * kPart;
      kernels::kernels().block_picture({.src = src + image * pixels * channels,
                                        .pixel_stride = planes ? 1 : channels,
                                        .channel_stride = planes ? pixels : 1,
                                        .dst = dst + image * pixels * 4,
                                        .channels = channels},
                                       first, std::min(first + kPart, pixels));
    }
  });
}

std::optional<Call> plan_picture(const Reorder& reorder) {
  if (!is_picture(reorder)) return std::nullopt;
  return [&reorder] { run_picture(reorder); };
}

// oneDNN, unless it has only a reference kernel or cannot express the strides.
std::optional<Call> plan_onednn(const Reorder& reorder) {
  const at::Tensor &src = reorder.src.tensor, &dst = reorder.dst.tensor;
  if (!has_onednn_type(src.scalar_type()) || !has_onednn_type(dst.scalar_type())) {
    return std::nullopt;
  }
  Key key("reorder");
  key.add(reorder.dims);
  for (const Side* side : {&reorder.src, &reorder.dst}) {
    key.add(side->format.block).add(static_cast<std::int64_t>(side->tensor.scalar_type()));
    if (!side->is_blocked()) key.add(side->tensor.strides());
  }
  static thread_local LruCache<std::optional<Primitive>> cache(kPrimitiveCacheCapacity);
  auto& primitive = cache.get(std::move(key).finish(), [&]() -> std::optional<Primitive> {
    const auto src_md = md_of(reorder.src, reorder.dims), dst_md = md_of(reorder.dst, reorder.dims);
    if (!src_md || !dst_md) return std::nullopt;  // overlapping strides
    const NoFork no_fork;
    const dnnl::reorder::primitive_desc pd(engine(), src_md, engine(), dst_md, user_scratchpad(),
                                           /*allow_empty=*/true);
    if (!pd) return std::nullopt;
    if (is_ref(pd.impl_info_str())) {
      trace::record({trace::Kind::kRef, "reorder", pd.impl_info_str()});
      return std::nullopt;
    }
    const std::array<Primitive::Argument, 2> arguments{
        {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DST, dst_md}}};
    return Primitive(dnnl::reorder(pd), arguments, pd.scratchpad_desc());
  });
  if (!primitive) return std::nullopt;
  return [&reorder, primitive = &*primitive] {
    primitive->execute(
        {reorder.src.tensor.const_data_ptr(), reorder.dst.tensor.mutable_data_ptr()});
  };
}

// [N, blocks, *spatial, b] seen as [N, blocks, b, *spatial].
at::Tensor channels_view(const at::Tensor& physical) { return physical.movedim(-1, 2); }

// The first `channels` channels of a physical tensor as pieces [N, C, *spatial]: whole blocks, then
// the tail.
struct ReorderPieces {
  at::Tensor whole, tail;
};

ReorderPieces blocked_pieces(const at::Tensor& physical, std::int64_t channels) {
  const std::int64_t block = physical.size(-1), whole = channels / block, tail = channels % block;
  const at::Tensor view = channels_view(physical);
  return {view.narrow(1, 0, whole), tail ? view.select(1, whole).narrow(1, 0, tail) : at::Tensor()};
}

ReorderPieces dense_pieces(const at::Tensor& dense, std::int64_t block) {
  const std::int64_t channels = dense.size(1), whole = channels / block, tail = channels % block;
  return {dense.narrow(1, 0, whole * block).unflatten(1, {whole, block}),
          tail ? dense.narrow(1, whole * block, tail) : at::Tensor()};
}

// Reorders any type and any strides, at ATen's speed.
void run_aten(const Reorder& reorder) {
  if (!reorder.src.is_blocked() && !reorder.dst.is_blocked()) {
    reorder.dst.tensor.copy_(reorder.src.tensor);
    return;
  }
  if (reorder.src.is_blocked() && reorder.dst.is_blocked()) {
    const Side dense{reorder_to_dense("reblock", {reorder.src.tensor, reorder.dims[1]}, false)};
    return run_aten({reorder.dims, dense, reorder.dst});
  }
  const std::int64_t channels = reorder.dims[1];
  const auto pieces = [&](const Side& side, const Side& other) {
    return side.is_blocked() ? blocked_pieces(side.tensor, channels)
                             : dense_pieces(side.tensor, other.format.block);
  };
  const ReorderPieces src = pieces(reorder.src, reorder.dst),
                      dst = pieces(reorder.dst, reorder.src);
  dst.whole.copy_(src.whole);
  if (dst.tail.defined()) {
    if (reorder.dst.is_blocked()) reorder.dst.tensor.select(1, -1).zero_();
    dst.tail.copy_(src.tail);
  }
}

std::optional<Call> plan_aten(const Reorder& reorder) {
  return [&reorder] { run_aten(reorder); };
}

// Fastest first; ATen takes everything else.
const Implementations<Reorder, Call> kReorderImplementations(
    "reorder", {{.name = "transpose", .plan = plan_transpose},
                {.name = "in_order", .plan = plan_in_order},
                {.name = "picture", .plan = plan_picture},
                {.name = "onednn", .plan = plan_onednn},
                {.name = "aten", .plan = plan_aten, .traits = {.last_resort = true}}});

std::string described(const Reorder& reorder) {
  return text(name_of(reorder.src, reorder.dims), " -> ", name_of(reorder.dst, reorder.dims), " ",
              reorder.dims);
}

void run_uncounted(const Reorder& reorder) {
  if (reorder.dst.tensor.numel() == 0) return;
  const auto named = kReorderImplementations.choose(reorder, kReorderImplementations.forced(),
                                                    [&] { return described(reorder); });
  kReorderImplementations.set_last(named->name);
  named->plan();
}

void run(const char* op, const Reorder& reorder) {
  if (reorder.dst.tensor.numel() == 0) return;
  counted_reorder(
      op, static_cast<std::int64_t>(reorder.src.tensor.nbytes() + reorder.dst.tensor.nbytes()),
      [&] { return described(reorder); }, [&] { run_uncounted(reorder); });
}

void check_dense(const char* op, const at::Tensor& input) {
  if (input.dim() < 3 || input.dim() > 5) {
    fail_value(op, "a tensor [N, C, *spatial] with 3 to 5 dims", text(input.sizes()),
               "unsqueeze it to the rank of its network");
  }
  if (input.layout() != at::kStrided || !input.device().is_cpu()) {
    fail_type(op, "a strided CPU tensor", text(input.toString()),
              "call .to_dense() or .cpu() first");
  }
}

// Whether oneDNN converts as ATen does. Into integers oneDNN rounds and saturates, but users expect
// ATen's truncation.
bool onednn_converts_as_aten(at::ScalarType from, at::ScalarType to) {
  return from == to || (at::isFloatingType(to) && has_onednn_type(from) && has_onednn_type(to));
}

at::Tensor converted(const at::Tensor& tensor, at::ScalarType to) {
  return onednn_converts_as_aten(tensor.scalar_type(), to) ? tensor : tensor.to(to);
}

}  // namespace

ReorderSide reorder_side(const void* data, at::IntArrayRef dims, Format format,
                         at::ScalarType dtype) {
  void* memory = const_cast<void*>(data);
  if (format == kChannelsLast) {
    return {at::from_blob(memory, dims, channels_last_strides(dims), dtype), format};
  }
  return {at::from_blob(memory, format.physical_shape(dims), dtype), format};
}

void reorder(const char* op, at::IntArrayRef dims, const ReorderSide& src, const ReorderSide& dst) {
  run(op, {dims.vec(), src, dst});
}

void reorder_uncounted(at::IntArrayRef dims, const ReorderSide& src, const ReorderSide& dst) {
  run_uncounted({dims.vec(), src, dst});
}

void counted_reorder(const char* op, std::int64_t bytes, c10::function_ref<std::string()> describe,
                     c10::function_ref<void()> run) {
  if (trace::reorder_watcher()) trace::reorder_watcher()(op, describe());
  trace::Timed timed(trace::Kind::kReorder, op, bytes);
  if (trace::recording()) timed.describe(describe());
  run();
}

Blocked reorder_to_blocked(const char* op, const at::Tensor& src, std::int64_t block,
                           std::optional<at::ScalarType> dtype) {
  check_dense(op, src);
  check_block(op, block);
  const at::ScalarType to = dtype.value_or(src.scalar_type());
  const at::Tensor resolved = src.resolve_conj().resolve_neg();
  const Blocked dst = empty_blocked(src.sizes(), block, src.options().dtype(to));
  run(op, {src.sizes().vec(), {converted(resolved, to)}, {dst.physical, dst.format()}});
  return dst;
}

at::Tensor reorder_to_dense(const char* op, const Blocked& src, bool channels_last,
                            std::optional<at::ScalarType> dtype) {
  const at::ScalarType to = dtype.value_or(src.physical.scalar_type());
  const at::Tensor dst = empty_dense(src.dims(), channels_last, src.physical.options().dtype(to));
  run(op, {src.dims(), {converted(src.physical, to), src.format()}, {dst}});
  return dst;
}

at::Tensor to_blocked(const at::Tensor& input, std::int64_t block,
                      std::optional<at::ScalarType> dtype) {
  return reorder_to_blocked("to_blocked", input, block, dtype).physical;
}

at::Tensor to_dense(const at::Tensor& input, std::int64_t channels, bool channels_last,
                    std::optional<at::ScalarType> dtype) {
  return reorder_to_dense("to_dense", blocked_argument("to_dense", input, channels), channels_last,
                          dtype);
}

at::Tensor reblock(const at::Tensor& input, std::int64_t channels, std::int64_t block,
                   std::optional<at::ScalarType> dtype) {
  check_block("reblock", block);
  const Blocked src = blocked_argument("reblock", input, channels);
  const at::ScalarType to = dtype.value_or(input.scalar_type());
  const Blocked dst = empty_blocked(src.dims(), block, input.options().dtype(to));
  run("reblock",
      {src.dims(), {converted(src.physical, to), src.format()}, {dst.physical, dst.format()}});
  return dst.physical;
}

}  // namespace torch_blocked
