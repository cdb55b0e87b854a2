// Builds and checks memory descriptors, and makes others of them: regions, reshapes and
// permutations.
#include "torch_blocked/descriptor.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

#include "format/errors.h"

namespace torch_blocked {
namespace {

constexpr std::string_view op_create = "Descriptor";
constexpr std::string_view op_offset = "Descriptor.offset";
constexpr std::string_view op_submemory = "Descriptor.submemory_desc";
constexpr std::string_view op_reshape = "Descriptor.reshape";
constexpr std::string_view op_permute = "Descriptor.permute_axes";

struct DataTypeRow {
  std::string_view name;
  std::int64_t size_bytes;
};
// Indexed by DataType.
constexpr std::array<DataTypeRow, 8> data_types = {{{"undef", 0},
                                                    {"f16", 2},
                                                    {"bf16", 2},
                                                    {"f32", 4},
                                                    {"s32", 4},
                                                    {"s8", 1},
                                                    {"u8", 1},
                                                    {"f64", 8}}};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

[[noreturn]] void fail_overflow() {
  fail_value(op_create, "a memory whose size in bytes fits 64 bits", "a larger one",
             "check dims and strides");
}

std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) fail_overflow();
  return result;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) fail_overflow();
  return result;
}

template <typename Make>
Descriptor make_or_empty(bool allow_empty, Make make) {
  if (!allow_empty) return make();
  try {
    return make();
  } catch (const ValueError&) {
    return Descriptor();
  } catch (const NotImplementedError&) {
    return Descriptor();
  }
}

void check_inner_blocks(const std::vector<InnerBlock>& inner_blocks, int ndims) {
  if (inner_blocks.size() > max_ndims)
    fail_value(op_create, "at most 12 inner blocks", text(inner_blocks.size()), "merge blocks");
  std::int64_t product = 1;
  for (const InnerBlock& inner : inner_blocks) {
    if (inner.dim < 0 || inner.dim >= ndims)
      fail_value(op_create, text("inner_idxs from 0 to ", ndims - 1), text(inner.dim),
                 "name a logical dim");
    if (inner.size < 2)
      fail_value(op_create, "inner_blks of at least 2", text(inner.size), "leave the block out");
    product = checked_mul(product, inner.size);
  }
}

// Dims [from_begin, from_end) of a descriptor become [to_begin, to_end) of the reshaped one.
struct DimGroup {
  int from_begin, from_end, to_begin, to_end;
};

// Grows the group to the left until both sides have the same volume. False if that cannot be.
bool grow_to_equal_volume(const Dims& from, const Dims& to, DimGroup& group) {
  if (group.from_begin == 0 || group.to_begin == 0) return false;
  std::int64_t from_volume = from[--group.from_begin];
  std::int64_t to_volume = to[--group.to_begin];
  while (from_volume != to_volume) {
    const bool grow_from = from_volume < to_volume;
    int& begin = grow_from ? group.from_begin : group.to_begin;
    std::int64_t& volume = grow_from ? from_volume : to_volume;
    if (begin == 0) return false;
    --begin;
    if (__builtin_mul_overflow(volume, (grow_from ? from : to)[begin], &volume)) return false;
    if (volume == 0) return false;  // a dim of size 0 can only be kept
  }
  return true;
}

// Pairs the dims of `from` and `to` in the smallest groups of equal volume, from the right.
// `droppable[d]` says that dim d has size 1 and may go. Nothing if the dims cannot be paired.
std::optional<std::vector<DimGroup>> match_dims(const Dims& from,
                                                const std::vector<bool>& droppable,
                                                const Dims& to) {
  std::vector<DimGroup> groups;
  int from_end = static_cast<int>(from.size());
  int to_end = static_cast<int>(to.size());
  while (from_end > 0 || to_end > 0) {
    DimGroup group{from_end, from_end, to_end, to_end};
    if (from_end > 0 && droppable[from_end - 1]) {
      --group.from_begin;
    } else if (to_end > 0 && to[to_end - 1] == 1) {
      --group.to_begin;
      // A padded dim of size 1 cannot be dropped, so it takes the first free place.
      if (from_end > 0 && from[from_end - 1] == 1) --group.from_begin;
    } else if (!grow_to_equal_volume(from, to, group)) {
      return std::nullopt;
    }
    groups.push_back(group);
    from_end = group.from_begin;
    to_end = group.to_begin;
  }
  return groups;
}

}  // namespace

DataType parse_data_type(std::string_view name) {
  for (std::size_t i = 0; i < data_types.size(); ++i)
    if (data_types[i].name == name) return static_cast<DataType>(i);
  fail_value("data_type", "one of undef, f16, bf16, f32, s32, s8, u8, f64", text("\"", name, "\""),
             "cast the data to one of them");
}

std::string_view data_type_name(DataType data_type) {
  return data_types[static_cast<std::size_t>(data_type)].name;
}

std::int64_t data_type_size_bytes(DataType data_type) {
  return data_types[static_cast<std::size_t>(data_type)].size_bytes;
}

Descriptor::Descriptor(const Dims& dims, DataType data_type, FormatKind format_kind)
    : dims_(dims), data_type_(data_type), format_kind_(format_kind), padded_dims_(dims) {
  if (dims.size() > max_ndims)
    fail_value(op_create, "at most 12 dims", text(dims.size(), " dims"), "join dims first");
  if (data_type == DataType::undef)
    fail_value(op_create, "a data type", "undef", "only the zero descriptor has none");
  for (std::int64_t dim : dims)
    if (dim < 0)
      fail_value(op_create, "dims of at least 0", text(dims),
                 "sizes must be known and not negative");
}

Descriptor Descriptor::with_tag(const Dims& dims, DataType data_type, const FormatTag& tag,
                                bool allow_empty) {
  if (dims.empty() || tag.kind == FormatKind::undef) return Descriptor();
  return make_or_empty(allow_empty, [&] {
    Descriptor desc(dims, data_type, tag.kind);
    if (tag.kind == FormatKind::any) return desc;
    if (tag.ndims() != desc.ndims())
      fail_value(op_create, text(tag.ndims(), " dims for tag ", tag.name()),
                 text(dims.size(), " dims ", dims), "use a tag of the same rank");
    desc.inner_blocks_ = tag.inner_blocks;
    desc.pad_to_blocks();
    desc.fill_dense_strides(tag.outer_order);
    desc.check_size();
    return desc;
  });
}

Descriptor Descriptor::with_strides(const Dims& dims, DataType data_type, const Dims& strides,
                                    const std::vector<InnerBlock>& inner_blocks, bool allow_empty) {
  return with_blocking(dims, data_type, {.strides = strides, .inner_blocks = inner_blocks},
                       allow_empty);
}

Descriptor Descriptor::with_blocking(const Dims& dims, DataType data_type, const Blocking& blocking,
                                     bool allow_empty) {
  return make_or_empty(allow_empty, [&] {
    if (blocking.strides.size() != dims.size())
      fail_value(op_create, text(dims.size(), " strides for dims ", dims), text(blocking.strides),
                 "give one stride for each logical dim");
    if (dims.empty()) return Descriptor();
    Descriptor desc(dims, data_type, FormatKind::blocked);
    check_inner_blocks(blocking.inner_blocks, desc.ndims());
    desc.inner_blocks_ = blocking.inner_blocks;
    desc.check_inner_strides(blocking.inner_strides);
    desc.pad_to_blocks();
    desc.set_padded_dims(blocking.padded_dims);
    desc.strides_ = blocking.strides;
    if (blocking.submemory_offset < 0)
      fail_value(op_create, "a submemory offset of at least 0", text(blocking.submemory_offset),
                 "count it from the start of the whole memory");
    desc.offset0_ = blocking.submemory_offset;
    desc.check_strides();
    desc.check_size();
    return desc;
  });
}

std::int64_t Descriptor::block_of(int dim) const {
  std::int64_t block = 1;
  for (const InnerBlock& inner : inner_blocks_)
    if (inner.dim == dim) block *= inner.size;
  return block;
}

// Rounds up because a submemory may be narrower than one block.
std::int64_t Descriptor::outer_size(int dim) const {
  return ceil_div(padded_dims_[dim], block_of(dim));
}

std::int64_t Descriptor::inner_size() const {
  std::int64_t size = 1;
  for (const InnerBlock& inner : inner_blocks_) size *= inner.size;
  return size;
}

bool Descriptor::is_free_unit(int dim) const {
  return dims_[dim] == 1 && padded_dims_[dim] == 1 && block_of(dim) == 1;
}

bool Descriptor::has_zero_dim() const {
  return std::find(dims_.begin(), dims_.end(), 0) != dims_.end();
}

bool Descriptor::is_dense_range(int begin, int end) const {
  std::int64_t expected = strides_[end - 1];
  for (int dim = end - 1; dim >= begin; --dim) {
    if (is_free_unit(dim)) continue;
    if (padded_dims_[dim] != dims_[dim] || block_of(dim) != 1 || strides_[dim] != expected)
      return false;
    expected = checked_mul(expected, dims_[dim]);
  }
  return true;
}

std::vector<int> Descriptor::memory_order() const {
  std::vector<int> order(dims_.size());
  std::iota(order.begin(), order.end(), 0);
  // Among equal strides the longer dim is the outer one: a dim of size 1 takes the stride of the
  // dim just outside of it.
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if (strides_[a] != strides_[b]) return strides_[a] > strides_[b];
    return outer_size(a) > outer_size(b);
  });
  return order;
}

void Descriptor::pad_to_blocks() {
  for (int dim = 0; dim < ndims(); ++dim)
    padded_dims_[dim] = checked_mul(ceil_div(dims_[dim], block_of(dim)), block_of(dim));
}

// Given padded dims replace those that pad_to_blocks() has computed.
void Descriptor::set_padded_dims(const Dims& padded_dims) {
  if (padded_dims.empty()) return;
  if (padded_dims.size() != dims_.size())
    fail_value(op_create, text(dims_.size(), " padded_dims for dims ", dims_), text(padded_dims),
               "give one for each logical dim");
  for (int dim = 0; dim < ndims(); ++dim) {
    const std::int64_t padded = padded_dims[dim], block = block_of(dim);
    const bool narrow = padded == dims_[dim] && padded < block;
    if (padded < dims_[dim] || (padded % block != 0 && !narrow))
      fail_value(op_create,
                 text("padded_dims of whole blocks of ", block, " and at least ", dims_[dim],
                      " along dim ", dim),
                 text(padded), text("round up to ", padded_dims_[dim], " or leave them out"));
  }
  padded_dims_ = padded_dims;
}

Dims Descriptor::inner_strides() const {
  Dims strides(inner_blocks_.size());
  std::int64_t stride = 1;
  for (std::size_t i = inner_blocks_.size(); i-- > 0; stride *= inner_blocks_[i].size)
    strides[i] = stride;
  return strides;
}

void Descriptor::check_inner_strides(const Dims& inner_strides) const {
  if (inner_strides.empty()) return;
  if (inner_strides.size() != inner_blocks_.size())
    fail_value(op_create, text(inner_blocks_.size(), " inner_strides, one for each inner block"),
               text(inner_strides), "leave them out for dense blocks");
  if (inner_strides != this->inner_strides())
    fail_not_implemented(op_create, text("inner_strides ", this->inner_strides()),
                         text(inner_strides),
                         "oneDNN describes dense blocks only; gaps go into the strides between "
                         "blocks");
}

void Descriptor::fill_dense_strides(const std::vector<int>& outer_order) {
  strides_.resize(dims_.size());
  std::int64_t stride = inner_size();
  for (auto dim = outer_order.rbegin(); dim != outer_order.rend(); ++dim) {
    strides_[*dim] = stride;
    if (padded_dims_[*dim] != 0) stride = checked_mul(stride, outer_size(*dim));
  }
}

// No two indices may share an element, except along broadcast dims (stride 0).
void Descriptor::check_strides() const {
  if (has_zero_dim()) return;
  std::int64_t inside = inner_size();  // elements spanned by everything inside the current dim
  const std::vector<int> order = memory_order();
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (strides_[*dim] == 0 || padded_dims_[*dim] == 1) continue;
    if (strides_[*dim] < inside)
      fail_value(op_create, text("a stride of at least ", inside, " for dim ", *dim),
                 text("strides ", strides_, " for dims ", dims_),
                 "strides must not make elements overlap; use 0 to broadcast");
    inside = checked_mul(strides_[*dim], outer_size(*dim));
  }
}

// After this no size or offset of the descriptor can overflow.
void Descriptor::check_size() const {
  if (has_zero_dim()) return;
  std::int64_t last = checked_add(offset0_, inner_size());
  std::int64_t extent = last;
  for (int dim = 0; dim < ndims(); ++dim) {
    if (padded_dims_[dim] == 1) continue;
    extent = std::max(extent, checked_mul(outer_size(dim), strides_[dim]));
    last = checked_add(last, checked_mul(outer_size(dim) - 1, strides_[dim]));
  }
  checked_mul(std::max(extent, last), data_type_size_bytes(data_type_));
}

std::int64_t Descriptor::size_bytes() const {
  if (format_kind_ != FormatKind::blocked || has_zero_dim()) return 0;
  // A submemory ends with its last element: full rows could reach beyond the memory that it is cut
  // from.
  if (offset0_ != 0) return end_bytes();
  std::int64_t extent = inner_size();
  for (int dim = 0; dim < ndims(); ++dim)
    if (padded_dims_[dim] != 1) extent = std::max(extent, outer_size(dim) * strides_[dim]);
  return extent * data_type_size_bytes(data_type_);
}

std::int64_t Descriptor::end_bytes() const {
  if (format_kind_ != FormatKind::blocked || has_zero_dim()) return 0;
  std::int64_t end = offset0_ + inner_size();
  for (int dim = 0; dim < ndims(); ++dim)
    if (padded_dims_[dim] != 1) end += (outer_size(dim) - 1) * strides_[dim];
  return end * data_type_size_bytes(data_type_);
}

void Descriptor::require_defined(std::string_view op) const {
  if (format_kind_ != FormatKind::blocked)
    fail_value(op, "a descriptor with a defined format", to_string(),
               "give it a tag or strides first");
}

std::int64_t Descriptor::offset(const Dims& index, bool padded) const {
  require_defined(op_offset);
  if (has_zero_dim())
    fail_value(op_offset, "memory with at least one element", to_string(),
               "memory of zero volume is never accessed");
  const Dims& limits = padded ? padded_dims_ : dims_;
  bool in_range = index.size() == limits.size();
  for (std::size_t dim = 0; in_range && dim < limits.size(); ++dim)
    in_range = 0 <= index[dim] && index[dim] < limits[dim];
  if (!in_range)
    fail_value(op_offset, text("an index inside ", padded ? "padded dims " : "dims ", limits),
               text(index), "count every dim from 0, in logical order");

  std::int64_t offset = offset0_;
  Dims block_index = index;
  std::int64_t stride = 1;
  for (auto inner = inner_blocks_.rbegin(); inner != inner_blocks_.rend(); ++inner) {
    offset += block_index[inner->dim] % inner->size * stride;
    block_index[inner->dim] /= inner->size;
    stride *= inner->size;
  }
  for (int dim = 0; dim < ndims(); ++dim)
    if (block_index[dim] != 0) offset += block_index[dim] * strides_[dim];
  return offset;
}

Descriptor Descriptor::submemory_desc(const Dims& dims, const Dims& offsets,
                                      bool allow_empty) const {
  return make_or_empty(allow_empty, [&] { return submemory(dims, offsets); });
}

Descriptor Descriptor::submemory(const Dims& dims, const Dims& offsets) const {
  require_defined(op_submemory);
  bool inside = dims.size() == dims_.size() && offsets.size() == dims_.size();
  for (int dim = 0; inside && dim < ndims(); ++dim)
    inside = dims[dim] >= 0 && offsets[dim] >= 0 && offsets[dim] <= dims_[dim] &&
             dims[dim] <= dims_[dim] - offsets[dim];
  if (!inside)
    fail_value(op_submemory, text("a region inside dims ", dims_),
               text("dims ", dims, " at offsets ", offsets), "shrink or move the region");

  Descriptor region = *this;
  for (int dim = 0; dim < ndims(); ++dim) {
    const std::int64_t block = block_of(dim);
    const bool at_border = offsets[dim] + dims[dim] == dims_[dim];
    const bool aligned =
        offsets[dim] % block == 0 && (at_border || dims[dim] % block == 0 || dims[dim] < block);
    if (!aligned)
      fail_not_implemented(
          op_submemory, text("whole blocks of ", block, " along dim ", dim),
          text(dims[dim], " from ", offsets[dim]),
          "align offset and size to the block, or reorder to a plain format first");
    region.dims_[dim] = dims[dim];
    region.padded_dims_[dim] = at_border ? padded_dims_[dim] - offsets[dim] : dims[dim];
    region.offset0_ =
        checked_add(region.offset0_, checked_mul(offsets[dim] / block, strides_[dim]));
  }
  return region;
}

Descriptor Descriptor::reshape(const Dims& dims, bool allow_empty) const {
  return make_or_empty(allow_empty, [&] { return reshaped(dims); });
}

Descriptor Descriptor::reshaped(const Dims& dims) const {
  const auto fail_reshape = [&](std::string_view rule) {
    fail_value(op_reshape, rule, text("dims ", dims, " for ", to_string()),
               "reorder to a plain format first, or choose other dims");
  };
  if (is_zero() || dims.empty()) fail_reshape("at least one dim, old and new");
  if (dims == dims_) return *this;
  Descriptor result(dims, data_type_, format_kind_);

  std::vector<bool> droppable;
  for (int dim = 0; dim < ndims(); ++dim) droppable.push_back(is_free_unit(dim));
  const auto groups = match_dims(dims_, droppable, dims);
  if (!groups) fail_reshape("the same elements, and dims that split or join whole dims");
  if (format_kind_ == FormatKind::any) return result;

  result.inner_blocks_ = inner_blocks_;
  result.offset0_ = offset0_;
  result.strides_.resize(dims.size());
  std::int64_t stride = inner_size();  // of an inserted dim of size 1: any value would do
  for (const auto& [from_begin, from_end, to_begin, to_end] : *groups) {
    if (to_begin == to_end) continue;  // a dropped dim of size 1
    const bool keep = from_end - from_begin == 1 && to_end - to_begin == 1;
    if (from_begin == from_end) {  // an inserted dim of size 1
      result.strides_[to_begin] = stride;
    } else if (keep) {
      result.strides_[to_begin] = strides_[from_begin];
      result.padded_dims_[to_begin] = padded_dims_[from_begin];
      for (std::size_t i = 0; i < inner_blocks_.size(); ++i)
        if (inner_blocks_[i].dim == from_begin) result.inner_blocks_[i].dim = to_begin;
      stride = checked_mul(strides_[from_begin], std::max<std::int64_t>(outer_size(from_begin), 1));
    } else {
      if (!is_dense_range(from_begin, from_end))
        fail_reshape("joined and split dims to be dense, in order, not padded and not blocked");
      stride = strides_[from_end - 1];
      for (int dim = to_end - 1; dim >= to_begin; --dim) {
        result.strides_[dim] = stride;
        stride = checked_mul(stride, dims[dim]);
      }
    }
  }
  return result;
}

Descriptor Descriptor::permute_axes(const std::vector<int>& permutation, bool allow_empty) const {
  return make_or_empty(allow_empty, [&] { return permuted(permutation); });
}

Descriptor Descriptor::permuted(const std::vector<int>& permutation) const {
  std::vector<int> sorted = permutation;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int> identity(dims_.size());
  std::iota(identity.begin(), identity.end(), 0);
  if (is_zero() || sorted != identity)
    fail_value(op_permute, text("a permutation of the axes of ", to_string()), text(permutation),
               "name each axis from 0 once");
  Descriptor result = *this;
  for (int dim = 0; dim < ndims(); ++dim) {
    result.dims_[permutation[dim]] = dims_[dim];
    result.padded_dims_[permutation[dim]] = padded_dims_[dim];
    if (!strides_.empty()) result.strides_[permutation[dim]] = strides_[dim];
  }
  for (InnerBlock& inner : result.inner_blocks_) inner.dim = permutation[inner.dim];
  return result;
}

std::optional<FormatTag> Descriptor::tag() const {
  FormatTag tag;
  tag.kind = format_kind_;
  if (format_kind_ != FormatKind::blocked) return tag;
  tag.outer_order = memory_order();
  tag.inner_blocks = inner_blocks_;
  if (!matches_tag(tag)) return std::nullopt;
  return tag;
}

bool Descriptor::matches_tag(const FormatTag& tag) const {
  if (tag.kind != format_kind_) return false;
  if (format_kind_ != FormatKind::blocked) return true;
  return *this == with_tag(dims_, data_type_, tag, /*allow_empty=*/true);
}

Dims Descriptor::physical_shape() const {
  require_defined("Descriptor.physical_shape");
  return torch_blocked::physical_shape(padded_dims_,
                                       {FormatKind::blocked, memory_order(), inner_blocks_});
}

bool Descriptor::operator==(const Descriptor& other) const {
  if (dims_ != other.dims_ || data_type_ != other.data_type_ ||
      format_kind_ != other.format_kind_ || padded_dims_ != other.padded_dims_ ||
      offset0_ != other.offset0_ || inner_blocks_ != other.inner_blocks_)
    return false;
  for (std::size_t dim = 0; dim < strides_.size(); ++dim)
    if (padded_dims_[dim] != 1 && strides_[dim] != other.strides_[dim]) return false;
  return true;
}

std::size_t Descriptor::hash() const {
  std::size_t seed = 0;
  const auto mix = [&seed](std::int64_t value) {
    seed ^= std::hash<std::int64_t>()(value) + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2);
  };
  mix(static_cast<std::int64_t>(data_type_));
  mix(static_cast<std::int64_t>(format_kind_));
  mix(offset0_);
  for (std::int64_t dim : dims_) mix(dim);
  for (std::int64_t dim : padded_dims_) mix(dim);
  for (std::size_t dim = 0; dim < strides_.size(); ++dim)
    if (padded_dims_[dim] != 1) mix(strides_[dim]);
  for (const InnerBlock& inner : inner_blocks_) {
    mix(inner.size);
    mix(inner.dim);
  }
  return seed;
}

std::string Descriptor::to_string() const {
  if (is_zero()) return "Descriptor()";
  std::string result = text("Descriptor(", dims_, ", ", data_type_name(data_type_));
  if (const auto name = tag()) return text(result, ", tag=", name->name(), ")");
  result += text(", strides=", strides_);
  if (!inner_blocks_.empty()) {
    result += ", inner_blocks=";
    for (const InnerBlock& inner : inner_blocks_)
      result += text(inner.size, static_cast<char>('a' + inner.dim));
  }
  if (padded_dims_ != dims_) result += text(", padded_dims=", padded_dims_);
  if (offset0_ != 0) result += text(", offset=", offset0_);
  return result + ")";
}

}  // namespace torch_blocked
