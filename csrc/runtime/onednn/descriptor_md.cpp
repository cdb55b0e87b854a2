// Converts our descriptors to oneDNN's and back.
#include "runtime/onednn/descriptor_md.h"

#include <oneapi/dnnl/dnnl_debug.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "format/errors.h"

namespace torch_blocked {
namespace {

using Md = dnnl::memory::desc;

// oneDNN's tags by their agnostic names.
const std::map<std::string, dnnl_format_tag_t>& onednn_tags() {
  static const auto tags = [] {
    std::map<std::string, dnnl_format_tag_t> found;
    for (int value = dnnl_format_tag_any + 1; value < dnnl_format_tag_last; ++value) {
      const auto tag = static_cast<dnnl_format_tag_t>(value);
      found.emplace(canonical_tag(dnnl_fmt_tag2str(tag)), tag);
    }
    return found;
  }();
  return tags;
}

}  // namespace

std::optional<Md> onednn_md(const Descriptor& descriptor) {
  if (descriptor.is_zero()) return Md();
  const auto type = static_cast<dnnl::memory::data_type>(descriptor.data_type());
  const Dims& dims = descriptor.dims();
  if (descriptor.format_kind() == FormatKind::any)
    return Md(dims, type, dnnl::memory::format_tag::any);
  if (const auto tag = descriptor.tag()) {
    const auto found = onednn_tags().find(tag->name());
    if (found != onednn_tags().end())
      return Md(dims, type, static_cast<dnnl::memory::format_tag>(found->second));
  }
  const bool only_strides = descriptor.inner_blocks().empty() && descriptor.padded_dims() == dims &&
                            descriptor.submemory_offset() == 0;
  Md md;
  if (only_strides) md = Md(dims, type, descriptor.strides(), /*allow_empty=*/true);
  return md ? std::optional(md) : std::nullopt;
}

std::optional<Descriptor> descriptor_of(const Md& md) {
  if (md.is_zero()) return Descriptor();
  const auto type = static_cast<DataType>(md.get_data_type());
  if (md.get_format_kind() != dnnl::memory::format_kind::blocked) return std::nullopt;
  Blocking blocking{.strides = md.get_strides(),
                    .padded_dims = md.get_padded_dims(),
                    .submemory_offset = md.get_submemory_offset()};
  const Dims sizes = md.get_inner_blks(), idxs = md.get_inner_idxs();
  for (std::size_t i = 0; i < sizes.size(); ++i)
    blocking.inner_blocks.push_back({sizes[i], static_cast<int>(idxs[i])});
  return Descriptor::with_blocking(md.get_dims(), type, blocking);
}

at::ScalarType scalar_type(DataType data_type) {
  constexpr std::array<at::ScalarType, 8> kTypes{at::ScalarType::Undefined,
                                                 at::kHalf,
                                                 at::kBFloat16,
                                                 at::kFloat,
                                                 at::kInt,
                                                 at::kChar,
                                                 at::kByte,
                                                 at::kDouble};
  return kTypes[static_cast<std::size_t>(data_type)];
}

}  // namespace torch_blocked
