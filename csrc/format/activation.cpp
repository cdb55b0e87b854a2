// The table of activation formats, with their names and oneDNN's tags.
#include "format/activation.h"

#include <numeric>

#include "format/errors.h"

namespace torch_blocked {
namespace {

struct Row {
  Format format;
  std::array<std::string_view, 3> names;  // for 3, 4 and 5 dims
  std::array<dnnl_format_tag_t, 3> tags;
};
#define ROW(format, w, hw, dhw)                                  \
  Row {                                                          \
    format, {#w, #hw, #dhw}, { dnnl_##w, dnnl_##hw, dnnl_##dhw } \
  }
constexpr std::array kFormats{ROW(kPlain, ncw, nchw, ncdhw),
                              ROW(kChannelsLast, nwc, nhwc, ndhwc),
                              ROW(Format::blocked(4), nCw4c, nChw4c, nCdhw4c),
                              ROW(Format::blocked(8), nCw8c, nChw8c, nCdhw8c),
                              ROW(Format::blocked(16), nCw16c, nChw16c, nCdhw16c),
                              ROW(Format::blocked(32), nCw32c, nChw32c, nCdhw32c)};
#undef ROW
static_assert(kFormats.size() == 2 + Format::kBlocks.size());

constexpr std::size_t kLeastDims = 3, kMostDims = 5;

// Other activation formats that oneDNN has a name for.
constexpr std::array<std::string_view, 3> kOtherNames{"nc", "cn", "chwn"};

const Row* row_of(Format format, std::size_t ndims) {
  if (ndims < kLeastDims || ndims > kMostDims) return nullptr;
  const auto* row = std::ranges::find(kFormats, format, &Row::format);
  return row == kFormats.end() ? nullptr : row;
}

}  // namespace

std::optional<Format> Format::of(const FormatTag& tag) {
  const auto ndims = static_cast<std::size_t>(tag.ndims());
  if (ndims < kLeastDims || ndims > kMostDims) return std::nullopt;
  for (const Row& row : kFormats) {
    if (parse_tag(row.names[ndims - kLeastDims]) == tag) return row.format;
  }
  return std::nullopt;
}

std::optional<Format> Format::of(const Descriptor& descriptor) {
  const auto ndims = static_cast<std::size_t>(descriptor.ndims());
  if (ndims < kLeastDims || ndims > kMostDims) return std::nullopt;
  for (const Row& row : kFormats) {
    if (descriptor == row.format.descriptor(descriptor.dims(), descriptor.data_type())) {
      return row.format;
    }
  }
  return std::nullopt;
}

Dims Format::physical_shape(std::span<const std::int64_t> dims) const {
  Dims shape(dims.begin(), dims.end());
  if (is_blocked()) {
    shape[1] = blocks(dims[1]);
    shape.push_back(block);
  }
  if (kind == Kind::kChannelsLast) std::rotate(shape.begin() + 1, shape.begin() + 2, shape.end());
  return shape;
}

std::string_view Format::name(std::size_t ndims) const {
  const Row* row = row_of(*this, ndims);
  return row ? row->names[ndims - kLeastDims] : "strided";
}

dnnl_format_tag_t Format::onednn_tag(std::size_t ndims) const {
  const Row* row = row_of(*this, ndims);
  return row ? row->tags[ndims - kLeastDims] : dnnl_format_tag_undef;
}

Descriptor Format::descriptor(const Dims& dims, DataType data_type) const {
  return Descriptor::with_tag(dims, data_type, parse_tag(name(dims.size())));
}

std::string activation_name(const FormatTag& tag) {
  if (const auto format = Format::of(tag)) {
    return std::string(format->name(static_cast<std::size_t>(tag.ndims())));
  }
  for (const std::string_view name : kOtherNames) {
    if (parse_tag(name) == tag) return std::string(name);
  }
  return tag.name();
}

std::optional<std::string> activation_name(const Descriptor& descriptor) {
  if (descriptor.format_kind() != FormatKind::blocked) return std::nullopt;
  if (const auto format = Format::of(descriptor)) {
    return std::string(format->name(static_cast<std::size_t>(descriptor.ndims())));
  }
  FormatTag in_order{.kind = FormatKind::blocked, .outer_order = {}, .inner_blocks = {}};
  in_order.outer_order.resize(static_cast<std::size_t>(descriptor.ndims()));
  std::iota(in_order.outer_order.begin(), in_order.outer_order.end(), 0);
  if (descriptor.matches_tag(in_order)) return activation_name(in_order);
  if (const auto tag = descriptor.tag()) return activation_name(*tag);
  return std::nullopt;
}

}  // namespace torch_blocked
