// The memory descriptor of the oneAPI specification: logical dims, data type and the rule that maps
// a logical index to an offset in memory. A value type; it owns no data and calls no oneDNN.
//
// Sizes, strides and offsets are in elements unless the name says bytes.
// Source: oneAPI specification, "Memory"; oneDNN, "Understanding Memory Formats". Where they leave
// something open, oneDNN decides; docs/formats.md lists the few places where we differ from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_blocked/tag.h"

namespace torch_blocked {

// Values as in dnnl_data_type_t. oneDNN's boolean is not a type of memory descriptors.
enum class DataType : std::uint8_t { undef, f16, bf16, f32, s32, s8, u8, f64 };

// "f32" -> DataType::f32. Raises ValueError for an unknown name.
TORCH_BLOCKED_API DataType parse_data_type(std::string_view name);
TORCH_BLOCKED_API std::string_view data_type_name(DataType data_type);
TORCH_BLOCKED_API std::int64_t data_type_size_bytes(DataType data_type);  // 0 for undef

// How memory is laid out, with the fields of the structure that users of MKL-DNN 0.95 filled in by
// hand.
struct Blocking {
  Dims strides;                               // one for each logical dim, between blocks
  std::vector<InnerBlock> inner_blocks = {};  // outer-most first
  Dims padded_dims = {};                      // empty: dims rounded up to their blocks
  Dims inner_strides = {};                    // one for each inner block; empty: dense blocks
  std::int64_t submemory_offset = 0;
};

class TORCH_BLOCKED_API Descriptor {
 public:
  // The zero descriptor, which stands for an absent argument.
  Descriptor() = default;

  // Dense memory in the order of `tag`, with blocked dims rounded up. No dims or tag undef give the
  // zero descriptor; tag any leaves the format open. With allow_empty, this and all functions below
  // that have it return a zero descriptor instead of raising ValueError or NotImplementedError.
  static Descriptor with_tag(const Dims& dims, DataType data_type, const FormatTag& tag,
                             bool allow_empty = false);

  // Memory with the given strides, one for each logical dim. With inner blocks, they are the
  // strides between blocks. A stride of 0 broadcasts; other dims must not overlap. Strides of dims
  // of size 1 do not matter; if a dim has size 0, no stride matters.
  static Descriptor with_strides(const Dims& dims, DataType data_type, const Dims& strides,
                                 const std::vector<InnerBlock>& inner_blocks = {},
                                 bool allow_empty = false);

  // The same with all fields. A padded dim is at least the dim and a multiple of the block; or it
  // is the dim itself if that is less than a block, as in a narrow region of blocked memory. Blocks
  // are dense: oneDNN has no other inner strides, and they raise NotImplementedError.
  static Descriptor with_blocking(const Dims& dims, DataType data_type, const Blocking& blocking,
                                  bool allow_empty = false);

  int ndims() const { return static_cast<int>(dims_.size()); }
  const Dims& dims() const { return dims_; }
  DataType data_type() const { return data_type_; }
  FormatKind format_kind() const { return format_kind_; }

  // Empty unless format_kind() is blocked.
  const Dims& strides() const { return strides_; }
  const std::vector<InnerBlock>& inner_blocks() const { return inner_blocks_; }
  // Elements between two neighbours in each inner block: the product of the sizes of the blocks
  // inside it.
  Dims inner_strides() const;
  std::int64_t block_of(int dim) const;    // product of its inner blocks; 1 if not blocked
  std::int64_t outer_size(int dim) const;  // number of blocks along a dim

  // Dims rounded up to their blocks.
  const Dims& padded_dims() const { return padded_dims_; }
  // How far the data starts inside the padding: always 0, padding is at the end.
  Dims padded_offsets() const { return Dims(dims_.size(), 0); }
  // Where a submemory starts inside the memory it was cut from.
  std::int64_t submemory_offset() const { return offset0_; }

  bool is_zero() const { return dims_.empty(); }
  bool has_zero_dim() const;

  // Bytes that a buffer must have, including padding, counted from the start of the whole memory. 0
  // for the zero descriptor, for tag any and for zero volume.
  std::int64_t size_bytes() const;
  // Bytes up to the end of the last block: only these are read or written. Less than size_bytes()
  // if the last row of a dim with gaps is shorter than its stride.
  std::int64_t end_bytes() const;

  // The offset of a logical index, or with `padded` of an index into padded_dims. Raises ValueError
  // for an index out of range, and if there is no data (zero descriptor, tag any, zero volume).
  std::int64_t offset(const Dims& index, bool padded = false) const;

  // The region of size `dims` that starts at `offsets`. Along a blocked dim the offset must be a
  // multiple of the block. The size must be a multiple of the block, less than a block, or reach to
  // the end of the dim. Otherwise raises NotImplementedError, as oneDNN does.
  Descriptor submemory_desc(const Dims& dims, const Dims& offsets, bool allow_empty = false) const;

  // The same memory with other dims. Adds dims of size 1, drops those that are not padded, and
  // splits or joins dims that are dense, in order, not padded and not blocked. Otherwise raises
  // ValueError.
  Descriptor reshape(const Dims& dims, bool allow_empty = false) const;

  // result.dims[permutation[i]] = dims[i]; memory stays as it is.
  Descriptor permute_axes(const std::vector<int>& permutation, bool allow_empty = false) const;

  // A tag for which with_tag gives this descriptor; nothing if there is none. With dims of size 1
  // several tags may fit: use matches_tag to ask for a certain one.
  std::optional<FormatTag> tag() const;
  bool matches_tag(const FormatTag& tag) const;

  // Sizes of a dense tensor over this memory: outer dims in memory order, then the inner blocks.
  Dims physical_shape() const;

  // Compares dims, data type, padding, offset, strides and blocks. Ignores strides of dims of size
  // 1.
  bool operator==(const Descriptor& other) const;
  std::size_t hash() const;
  std::string to_string() const;

 private:
  // Checks dims and data type; the caller fills in the format.
  Descriptor(const Dims& dims, DataType data_type, FormatKind format_kind);

  std::int64_t inner_size() const;   // elements in one block
  bool is_free_unit(int dim) const;  // size 1, neither padded nor blocked
  // Whether dims [begin, end) are dense, in order, not padded and not blocked.
  bool is_dense_range(int begin, int end) const;
  std::vector<int> memory_order() const;  // logical dims from outer-most to inner-most
  void pad_to_blocks();
  void set_padded_dims(const Dims& padded_dims);
  void check_inner_strides(const Dims& inner_strides) const;
  void fill_dense_strides(const std::vector<int>& outer_order);
  void check_strides() const;
  void check_size() const;
  void require_defined(std::string_view op) const;

  Descriptor submemory(const Dims& dims, const Dims& offsets) const;
  Descriptor reshaped(const Dims& dims) const;
  Descriptor permuted(const std::vector<int>& permutation) const;

  Dims dims_;
  DataType data_type_ = DataType::undef;
  FormatKind format_kind_ = FormatKind::undef;
  Dims padded_dims_;
  Dims strides_;
  std::vector<InnerBlock> inner_blocks_;
  std::int64_t offset0_ = 0;
};

}  // namespace torch_blocked
