// Names of formats: any text is a format or is refused, and a format's name gives it again.
#include <functional>
#include <numeric>

#include "format/activation.h"
#include "format/errors.h"
#include "from_bytes.h"

namespace torch_blocked {
namespace {

using fuzz::must_hold;

void check_shape(const FormatTag& tag) {
  Dims dims;
  for (int dim = 0; dim < tag.ndims(); ++dim) dims.push_back(17 * dim + 1);
  const Dims physical = physical_shape(dims, tag);
  must_hold(physical.size() == dims.size() + tag.inner_blocks.size(), "one size for each part");
  for (int dim = 0; dim < tag.ndims(); ++dim) {
    const std::int64_t outer = physical[dim], logical = tag.outer_order[dim];
    std::int64_t padded = 0;
    const bool is_huge = __builtin_mul_overflow(outer, tag.block_of(tag.outer_order[dim]), &padded);
    must_hold(is_huge || padded >= dims[logical], "a dim fits into its blocks");
  }
}

void check(std::string_view name) {
  const FormatTag tag = parse_tag(name);
  must_hold(parse_tag(tag.name()) == tag, "the agnostic name gives the same format");
  must_hold(canonical_tag(tag.name()) == tag.name(), "the agnostic name stays");
  if (tag.kind != FormatKind::blocked) return;
  must_hold(parse_tag(activation_name(tag)) == tag, "the common name gives the same format");
  if (const auto format = Format::of(tag)) {
    must_hold(parse_tag(format->name(tag.ndims())) == tag, "an activation format has its name");
  }
  check_shape(tag);
}

}  // namespace
}  // namespace torch_blocked

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view name(reinterpret_cast<const char*>(data), size);
  try {
    torch_blocked::check(name);
  } catch (const torch_blocked::ValueError& error) {
    torch_blocked::fuzz::must_be_a_sentence(error);
  }
  return 0;
}
