// The format tag grammar: how a name such as "nChw16c" or "acdb" orders a tensor in memory.
//
// Letters 'a'..'l' name logical dims 0..11, left to right is outer-most to inner-most. An
// upper-case letter is the outer part of a blocked dim; number + lower-case letter is an inner
// block of it. Domain names ("nhwc", "OIhw16i16o") are aliases, translated by an ordered list of
// logical dims. Source: oneAPI specification, "Memory"; oneDNN, "Understanding Memory Formats".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_blocked/export.h"

namespace torch_blocked {

using Dims = std::vector<std::int64_t>;  // sizes, strides or indices; never longer than max_ndims

inline constexpr int max_ndims = 12;  // as DNNL_MAX_NDIMS

// One inner block: `size` consecutive indices of logical dim `dim` lie together in memory.
struct InnerBlock {
  std::int64_t size = 1;
  int dim = 0;
  bool operator==(const InnerBlock&) const = default;
};

enum class FormatKind : std::uint8_t {
  undef,    // no tag: stands for an absent tensor
  any,      // placeholder that lets a compute-heavy primitive choose
  blocked,  // strides, with or without inner blocks; every tag with letters
};

// A parsed tag, as a plain value. Equal tags are equal formats, however they were spelt.
struct TORCH_BLOCKED_API FormatTag {
  FormatKind kind = FormatKind::undef;
  std::vector<int> outer_order;          // logical dims from outer-most to inner-most
  std::vector<InnerBlock> inner_blocks;  // from outer-most to inner-most

  bool operator==(const FormatTag&) const = default;

  // Number of logical dims; 0 for undef and any.
  int ndims() const { return static_cast<int>(outer_order.size()); }
  // No inner blocks: strides alone describe it.
  bool is_plain() const { return kind == FormatKind::blocked && inner_blocks.empty(); }
  // The product of the inner blocks of `dim`; 1 if it is not blocked.
  std::int64_t block_of(int dim) const;
  // The agnostic spelling: "aBcd16b", "any", "undef".
  std::string name() const;
};

// Parses an agnostic or a domain name. Raises ValueError if it is neither.
TORCH_BLOCKED_API FormatTag parse_tag(std::string_view name);

// parse_tag(name).name(): "nChw16c" -> "aBcd16b".
TORCH_BLOCKED_API std::string canonical_tag(std::string_view name);

// The physical sizes of `dims` stored as `tag`: the outer dims in memory order, then the inner
// blocks. [2, 17, 5, 4] as aBcd8b -> [2, 3, 5, 4, 8]. Raises ValueError for undef, any, a negative
// dim, or a rank other than the tag's.
TORCH_BLOCKED_API Dims physical_shape(const Dims& dims, const FormatTag& tag);

}  // namespace torch_blocked
