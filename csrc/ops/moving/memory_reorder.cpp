// Reorders between any two descriptors: by our kernels for activations, else by oneDNN, else by
// ATen on views of blocks.
#include "ops/moving/memory_reorder.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/round.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <optional>

#include "format/activation.h"
#include "format/errors.h"
#include "ops/implementations.h"
#include "ops/moving/reorder.h"
#include "runtime/fork.h"
#include "runtime/onednn/descriptor_md.h"
#include "runtime/onednn/engine.h"
#include "runtime/onednn/primitive.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

constexpr const char* kOp = "reorder";

struct MemoryReorder {
  Descriptor src, dst;
  const char* src_data;  // where the descriptors' offsets begin
  char* dst_data;
};

using Call = std::function<void()>;

// Takes reorders between two formats of activations, for which we have kernels.
std::optional<Call> plan_activations(const MemoryReorder& p) {
  const auto from = Format::of(p.src), to = Format::of(p.dst);
  if (!from || !to || p.src.data_type() != p.dst.data_type()) return std::nullopt;
  return [&p, from = *from, to = *to] {
    const Dims& dims = p.src.dims();
    const at::ScalarType type = scalar_type(p.src.data_type());
    reorder_uncounted(dims, reorder_side(p.src_data, dims, from, type),
                      reorder_side(p.dst_data, dims, to, type));
  };
}

// Adds everything that distinguishes descriptors with a defined format.
void add(Key& key, const Descriptor& desc) {
  key.add(static_cast<std::int64_t>(desc.data_type())).add(desc.submemory_offset());
  for (const Dims& each : {desc.dims(), desc.padded_dims(), desc.strides()}) key.add(each);
  key.add(static_cast<std::int64_t>(desc.inner_blocks().size()));
  for (const InnerBlock& block : desc.inner_blocks()) key.add(block.size).add(block.dim);
}

std::optional<Primitive> make_primitive(const MemoryReorder& p) {
  const auto src_md = onednn_md(p.src), dst_md = onednn_md(p.dst);
  if (!src_md || !dst_md) return std::nullopt;
  const NoFork no_fork;
  const dnnl::reorder::primitive_desc pd(engine(), *src_md, engine(), *dst_md, user_scratchpad(),
                                         /*allow_empty=*/true);
  if (!pd) return std::nullopt;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, kOp, pd.impl_info_str()});
    return std::nullopt;
  }
  const std::array<Primitive::Argument, 2> arguments{
      {{DNNL_ARG_SRC, *src_md}, {DNNL_ARG_DST, *dst_md}}};
  return Primitive(dnnl::reorder(pd), arguments, pd.scratchpad_desc());
}

std::optional<Call> plan_onednn_memory(const MemoryReorder& p) {
  Key key("memory_reorder");
  add(key, p.src);
  add(key, p.dst);
  static thread_local LruCache<std::optional<Primitive>> cache(kPrimitiveCacheCapacity);
  auto& primitive = cache.get(std::move(key).finish(), [&] { return make_primitive(p); });
  if (!primitive) return std::nullopt;
  return [&p, &primitive = *primitive] { primitive.execute({p.src_data, p.dst_data}); };
}

// Whole blocks of memory as a tensor: for each dim the number of blocks, then its inner blocks.
at::Tensor split_view(const Descriptor& desc, const char* data) {
  const Dims inner_strides = desc.inner_strides();
  Dims sizes, strides;
  for (int dim = 0; dim < desc.ndims(); ++dim) {
    sizes.push_back(desc.outer_size(dim));
    // The stride of a single block is arbitrary.
    strides.push_back(desc.outer_size(dim) == 1 ? 1 : desc.strides()[dim]);
    for (std::size_t i = 0; i < inner_strides.size(); ++i) {
      if (desc.inner_blocks()[i].dim != dim) continue;
      sizes.push_back(desc.inner_blocks()[i].size);
      strides.push_back(inner_strides[i]);
    }
  }
  const std::int64_t start = desc.submemory_offset() * data_type_size_bytes(desc.data_type());
  return at::from_blob(const_cast<char*>(data) + start, sizes, strides,
                       scalar_type(desc.data_type()));
}

Dims whole_dims(const Descriptor& desc) {
  Dims dims;
  for (int dim = 0; dim < desc.ndims(); ++dim)
    dims.push_back(desc.outer_size(dim) * desc.block_of(dim));
  return dims;
}

at::Tensor cut(at::Tensor whole, const Dims& dims) {
  for (std::size_t dim = 0; dim < dims.size(); ++dim)
    whole = whole.narrow(static_cast<std::int64_t>(dim), 0, dims[dim]);
  return whole;
}

template <typename T>
at::Tensor saturated(const at::Tensor& values, T most = std::numeric_limits<T>::max()) {
  return values.clamp(std::numeric_limits<T>::min(), most);
}

// Converts as oneDNN does. ATen's conversion to an integer would truncate and wrap around.
at::Tensor cast(const at::Tensor& values, at::ScalarType to) {
  if (values.scalar_type() == to || at::isFloatingType(to)) return values.to(to);
  const bool rounds = at::isFloatingType(values.scalar_type());
  const at::Tensor wide = rounds ? at::round(values.to(at::kDouble)) : values.to(at::kLong);
  if (to == at::kChar) return saturated<std::int8_t>(wide).to(to);
  if (to == at::kByte) return saturated<std::uint8_t>(wide).to(to);
  // The largest float below 2^31, at which oneDNN saturates floats.
  constexpr std::int32_t kMostOfFloat = 2147483520;
  return (rounds ? saturated(wide, kMostOfFloat) : saturated<std::int32_t>(wide)).to(to);
}

// Reorders any pair, at ATen's speed.
void run_aten_memory(const MemoryReorder& p) {
  const at::Tensor src = split_view(p.src, p.src_data).reshape(whole_dims(p.src));
  const at::Tensor values = cast(cut(src, p.src.dims()), scalar_type(p.dst.data_type()));
  const at::Tensor dst = split_view(p.dst, p.dst_data);
  const Dims whole = whole_dims(p.dst);
  if (whole == p.dst.dims()) {
    dst.copy_(values.reshape(dst.sizes()));
    return;
  }
  // A submemory that ends within its blocks shares them with other elements, which must not
  // change.
  const bool shares = p.dst.padded_dims() != whole;
  const at::Tensor blocks = shares ? dst.reshape(whole).clone() : at::zeros(whole, dst.options());
  if (shares) cut(blocks, p.dst.padded_dims()).zero_();
  cut(blocks, p.dst.dims()).copy_(values);
  dst.copy_(blocks.view(dst.sizes()));
}

std::optional<Call> plan_aten_memory(const MemoryReorder& p) {
  return [&p] { run_aten_memory(p); };
}

// Fastest first; ATen takes everything else.
const Implementations<MemoryReorder, Call> kMemoryReorderImplementations(
    "memory_reorder",
    {{.name = "activations", .plan = plan_activations},
     {.name = "onednn", .plan = plan_onednn_memory},
     {.name = "aten", .plan = plan_aten_memory, .traits = {.last_resort = true}}});

std::string descriptor_name(const Descriptor& desc) {
  return activation_name(desc).value_or("strided") + " " +
         std::string(data_type_name(desc.data_type()));
}

std::string described_memory(const MemoryReorder& p) {
  return text(descriptor_name(p.src), " -> ", descriptor_name(p.dst), " ", p.src.dims());
}

void check(const DescribedMemory& memory) {
  const Descriptor& desc = memory.desc;
  if (desc.format_kind() != FormatKind::blocked)
    fail_value(kOp, "a descriptor with a defined format", desc.to_string(),
               "ask wanted_formats() which one a module wants");
  check_memory(kOp, memory.bytes);
  if (memory.bytes.scalar_type() != at::kByte || !memory.bytes.is_contiguous())
    fail_type(kOp, "memory as contiguous bytes", text(memory.bytes.toString()), "");
  if (memory.bytes.numel() < desc.end_bytes())
    fail_value(kOp, text("memory of at least ", desc.end_bytes(), " bytes for ", desc.to_string()),
               text(memory.bytes.numel()), "take the size from get_size()");
}

void check_pair(const Descriptor& src, const Descriptor& dst) {
  if (src.dims() != dst.dims())
    fail_value(kOp, text("dims ", src.dims(), " on both sides"), text(dst.dims()),
               "reshape or permute one of the descriptors first");
  for (int dim = 0; dim < dst.ndims(); ++dim)
    if (dst.strides()[dim] == 0 && dst.outer_size(dim) > 1)
      fail_value(kOp, "a dst whose elements have memory of their own", dst.to_string(),
                 "stride 0 is for src only");
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* a_data = static_cast<const char*>(a.const_data_ptr());
  const auto* b_data = static_cast<const char*>(b.const_data_ptr());
  return a_data < b_data + b.numel() && b_data < a_data + a.numel();
}

}  // namespace

void reorder_memory(const DescribedMemory& src, const DescribedMemory& dst) {
  if (src.desc.is_zero() && dst.desc.is_zero()) return;
  check(src);
  check(dst);
  check_pair(src.desc, dst.desc);
  if (src.desc.has_zero_dim()) return;
  const at::Tensor from = overlap(src.bytes, dst.bytes) ? src.bytes.clone() : src.bytes;
  const MemoryReorder p{src.desc, dst.desc, static_cast<const char*>(from.const_data_ptr()),
                        static_cast<char*>(dst.bytes.mutable_data_ptr())};
  const auto describe = [&] { return described_memory(p); };
  counted_reorder(kOp, src.desc.end_bytes() + dst.desc.end_bytes(), describe, [&] {
    const auto named =
        kMemoryReorderImplementations.choose(p, kMemoryReorderImplementations.forced(), describe);
    kMemoryReorderImplementations.set_last(named->name);
    named->plan();
  });
}

}  // namespace torch_blocked
