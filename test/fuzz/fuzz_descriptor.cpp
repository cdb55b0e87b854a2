// Memory descriptors: any fields make a valid one or are refused, and regions, reshapes and
// permutations of it stay inside its memory.
#include <numeric>
#include <utility>

#include "format/activation.h"
#include "format/errors.h"
#include "from_bytes.h"

namespace torch_blocked {
namespace {

using fuzz::Bytes;
using fuzz::must_hold;

constexpr int kMostSteps = 6;

Dims numbers(Bytes& bytes, int count) {
  Dims values;
  for (int i = 0; i < count; ++i) values.push_back(bytes.number());
  return values;
}

// Rarely another count than the given one.
int near(Bytes& bytes, int count) {
  const int kind = bytes.byte();
  return kind < 240 ? count : kind % 15;
}

// The name of a tag with every dim once, in any order, and blocks of any dims.
std::string tag_name(Bytes& bytes, int ndims) {
  std::string letters(static_cast<std::size_t>(ndims), 'a');
  std::iota(letters.begin(), letters.end(), 'a');
  for (std::size_t i = 1; i < letters.size(); ++i) {
    std::swap(letters[i], letters[bytes.below(static_cast<int>(i + 1))]);
  }
  std::string inner;
  for (int left = bytes.below(4); left > 0 && ndims > 0; --left) {
    const int dim = bytes.below(ndims);
    inner += text(2 + bytes.below(15), static_cast<char>('a' + dim));
    letters[letters.find_first_of(
        text(static_cast<char>('a' + dim), static_cast<char>('A' + dim)))] =
        static_cast<char>('A' + dim);
  }
  return letters + inner;
}

Descriptor made(Bytes& bytes) {
  const int ndims = bytes.below(14);
  const auto type = static_cast<DataType>(bytes.below(8));
  const Dims dims = numbers(bytes, ndims);
  if (bytes.below(2) == 0) {
    const FormatTag tag = parse_tag(tag_name(bytes, near(bytes, ndims)));
    return Descriptor::with_tag(dims, type, tag);
  }
  Blocking blocking{.strides = numbers(bytes, near(bytes, ndims))};
  for (int left = bytes.below(4); left > 0; --left) {
    const std::int64_t size = bytes.number();
    blocking.inner_blocks.push_back({size, static_cast<int>(bytes.number())});
  }
  const int given = bytes.byte();
  if (given & 1) blocking.padded_dims = numbers(bytes, near(bytes, ndims));
  if (given & 2) blocking.inner_strides = numbers(bytes, near(bytes, bytes.below(4)));
  if (given & 4) blocking.submemory_offset = bytes.number();
  return Descriptor::with_blocking(dims, type, blocking);
}

void check_tag(const Descriptor& desc) {
  if (const auto tag = desc.tag()) {
    must_hold(desc.matches_tag(*tag), "a descriptor matches its tag");
    must_hold(Descriptor::with_tag(desc.dims(), desc.data_type(), *tag) == desc,
              "a tag gives the descriptor again");
  }
  if (const auto name = activation_name(desc)) parse_tag(*name);
}

// An index inside the dims; nothing if there is none.
std::optional<Dims> some_index(Bytes& bytes, const Dims& limits) {
  Dims index;
  for (const std::int64_t limit : limits) {
    if (limit == 0) return std::nullopt;
    index.push_back(bytes.below(2) ? limit - 1 : bytes.byte() % limit);
  }
  return index;
}

void check_offset(const Descriptor& desc, Bytes& bytes) {
  if (desc.format_kind() != FormatKind::blocked || desc.has_zero_dim()) return;
  const bool padded = bytes.below(2);
  const auto index = some_index(bytes, padded ? desc.padded_dims() : desc.dims());
  if (!index) return;
  const std::int64_t offset = desc.offset(*index, padded);
  must_hold(desc.submemory_offset() <= offset, "an element lies behind the beginning");
  must_hold(offset < desc.end_bytes() / data_type_size_bytes(desc.data_type()),
            text("an element lies before the end: ", desc.to_string(), " ", *index));
}

void check(const Descriptor& desc, Bytes& bytes) {
  must_hold(desc == desc && desc.hash() == Descriptor(desc).hash(), "a copy is equal");
  must_hold(desc.size_bytes() >= desc.end_bytes(), "what is read lies inside the memory");
  must_hold(!desc.to_string().empty(), "it has a text");
  if (!desc.is_zero()) {
    check_tag(desc);
    check_offset(desc, bytes);
    must_hold(desc.reshape(desc.dims()) == desc, "its own dims change nothing");
  }
}

std::vector<int> permutation(Bytes& bytes, int ndims) {
  std::vector<int> axes(static_cast<std::size_t>(near(bytes, ndims)));
  std::iota(axes.begin(), axes.end(), 0);
  for (std::size_t i = 1; i < axes.size(); ++i) {
    std::swap(axes[i], axes[bytes.below(static_cast<int>(i + 1))]);
  }
  if (!axes.empty() && bytes.byte() >= 250) axes[0] = static_cast<int>(bytes.number());
  return axes;
}

Descriptor permuted(const Descriptor& desc, Bytes& bytes) {
  const std::vector<int> axes = permutation(bytes, desc.ndims());
  const Descriptor result = desc.permute_axes(axes);
  std::vector<int> back(axes.size());
  for (std::size_t i = 0; i < axes.size(); ++i) back[axes[i]] = static_cast<int>(i);
  must_hold(result.permute_axes(back) == desc, "the inverse permutation leads back");
  must_hold(result.size_bytes() == desc.size_bytes(), "a permutation keeps the memory");
  return result;
}

Descriptor region(const Descriptor& desc, Bytes& bytes) {
  Dims dims, offsets;
  for (const std::int64_t dim : desc.dims()) {
    const int kind = bytes.below(4);
    offsets.push_back(kind < 2 ? 0 : bytes.number());
    std::int64_t rest = 0;
    if (__builtin_sub_overflow(dim, offsets.back(), &rest)) rest = dim;
    dims.push_back(kind % 2 == 0 ? rest : bytes.number());
  }
  const Descriptor result = desc.submemory_desc(dims, offsets);
  must_hold(result.end_bytes() <= desc.end_bytes(), "a region lies inside its memory");
  return result;
}

Descriptor reshaped(const Descriptor& desc, Bytes& bytes) {
  Dims dims;
  for (const std::int64_t dim : desc.dims()) {
    const int kind = bytes.below(4), factor = 2 + bytes.below(4);
    if (kind == 1) dims.push_back(1);
    if (kind == 2 && dim % factor == 0) dims.push_back(factor);
    std::int64_t joined = 0;
    if (kind == 3 && !dims.empty() && !__builtin_mul_overflow(dims.back(), dim, &joined)) {
      dims.back() = joined;
    } else {
      dims.push_back(kind == 2 && dim % factor == 0 ? dim / factor : dim);
    }
  }
  const Descriptor result = desc.reshape(dims);
  must_hold(result.end_bytes() == desc.end_bytes(), "a reshape keeps the memory");
  return result;
}

void run(Bytes& bytes) {
  Descriptor desc = made(bytes);
  check(desc, bytes);
  for (int step = 0; step < kMostSteps && !bytes.empty(); ++step) {
    constexpr std::array kSteps{permuted, region, reshaped};
    desc = kSteps[bytes.below(kSteps.size())](desc, bytes);
    check(desc, bytes);
  }
}

}  // namespace
}  // namespace torch_blocked

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  torch_blocked::fuzz::Bytes bytes(data, size);
  try {
    torch_blocked::run(bytes);
  } catch (const torch_blocked::ValueError& error) {
    torch_blocked::fuzz::must_be_a_sentence(error);
  } catch (const torch_blocked::NotImplementedError& error) {
    torch_blocked::fuzz::must_be_a_sentence(error);
  }
  return 0;
}
