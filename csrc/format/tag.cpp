// Parses and prints format tags, agnostic ("aBcd16b") and by domain ("nChw16c").
#include "torch_blocked/tag.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "format/errors.h"

namespace torch_blocked {
namespace {

constexpr std::string_view op = "format_tag";
constexpr std::string_view tag_remedy =
    "use a oneDNN name such as nchw, nChw16c, OIhw16i16o or acdb";

// The logical dims of each domain, in logical order: the i-th letter names dim i. A name belongs to
// the domain with the same set of letters; no two rows have the same set, and none contains 'a'.
constexpr std::string_view domains[] = {
    // activations
    "x", "nc", "ncw", "nchw", "ncdhw",
    // convolution weights, without and with groups
    "oi", "oiw", "oihw", "oidhw", "goiw", "goihw", "goidhw",
    // RNN: statistics, data, states, weights, projection, bias (d = directions, g = gates)
    "tn", "tnc", "ldnc", "ldigo", "ldio", "ldgo"};

// oneDNN names that break the grammar (an upper-case letter without an inner block, or I and O
// exchanged), and the regular name of the format that oneDNN means by each.
constexpr std::pair<std::string_view, std::string_view> irregular_names[] = {
    {"OhwI24o", "Ohwi24o"},
    {"OhwI32o", "Ohwi32o"},
    {"gOhwI24o", "gOhwi24o"},
    {"gOhwI32o", "gOhwi32o"},
    {"gIOhw2i8o16i2o", "gOIhw2i8o16i2o"},
    {"gIOdhw2i8o16i2o", "gOIdhw2i8o16i2o"}};

bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
char to_lower(char c) { return is_upper(c) ? static_cast<char>(c - 'A' + 'a') : c; }

template <typename Table>
std::optional<std::string_view> find_in(const Table& table, std::string_view key) {
  for (const auto& [name, value] : table)
    if (name == key) return value;
  return std::nullopt;
}

// A name split into its parts. Letters are not yet translated to dims.
struct SplitName {
  std::string outer;                                 // "aBcd" of "aBcd16b"
  std::vector<std::pair<std::int64_t, char>> inner;  // {16, 'b'}
};

// Of an inner block: far from overflow, and from oneDNN's largest block, which is 64.
constexpr std::int64_t kTooLarge = 1'000'000;

[[noreturn]] void fail_name(std::string_view rule, std::string_view name) {
  fail_value(op, rule, text("\"", name, "\""), tag_remedy);
}

SplitName split_name(std::string_view name) {
  SplitName split;
  std::size_t pos = 0;
  while (pos < name.size() && (is_upper(name[pos]) || is_lower(name[pos])))
    split.outer += name[pos++];
  if (split.outer.empty()) fail_name("a format tag that begins with a letter", name);
  while (pos < name.size()) {
    std::int64_t size = 0;
    const std::size_t begin = pos;
    while (pos < name.size() && is_digit(name[pos])) {
      size = std::min(size * 10 + (name[pos++] - '0'), kTooLarge);
    }
    const bool number = pos > begin && name[begin] != '0' && size >= 2 && size < kTooLarge;
    if (!number || pos == name.size() || !is_lower(name[pos]))
      fail_name("inner blocks written as a number of at least 2 and a lower-case letter", name);
    split.inner.emplace_back(size, name[pos++]);
  }
  if (split.inner.size() > max_ndims) fail_name("at most 12 inner blocks", name);
  return split;
}

// The letters of the logical dims in order: "abcd" for an agnostic name, else its domain.
std::string_view logical_letters(const std::string& outer, std::string_view name) {
  constexpr std::string_view agnostic = "abcdefghijkl";
  std::string letters = outer;
  std::transform(letters.begin(), letters.end(), letters.begin(), to_lower);
  std::sort(letters.begin(), letters.end());
  if (letters.size() > max_ndims) fail_name("at most 12 dims", name);
  if (std::adjacent_find(letters.begin(), letters.end()) != letters.end())
    fail_name("each dim once in the outer part", name);
  if (agnostic.starts_with(letters)) return agnostic.substr(0, letters.size());
  for (std::string_view domain : domains) {
    if (domain.size() != letters.size()) continue;
    if (std::is_permutation(domain.begin(), domain.end(), letters.begin())) return domain;
  }
  fail_name("letters a, b, c, ... without a gap, or those of a oneDNN domain", name);
}

}  // namespace

std::int64_t FormatTag::block_of(int dim) const {
  std::int64_t block = 1;
  for (const InnerBlock& inner : inner_blocks)
    if (inner.dim == dim) block *= inner.size;
  return block;
}

std::string FormatTag::name() const {
  if (kind == FormatKind::undef) return "undef";
  if (kind == FormatKind::any) return "any";
  std::string name;
  for (int dim : outer_order) name += static_cast<char>((block_of(dim) > 1 ? 'A' : 'a') + dim);
  for (const InnerBlock& inner : inner_blocks)
    name += text(inner.size, static_cast<char>('a' + inner.dim));
  return name;
}

FormatTag parse_tag(std::string_view name) {
  FormatTag tag;
  if (name == "undef") return tag;
  if (name == "any") {
    tag.kind = FormatKind::any;
    return tag;
  }
  const SplitName split = split_name(find_in(irregular_names, name).value_or(name));
  const std::string_view letters = logical_letters(split.outer, name);

  tag.kind = FormatKind::blocked;
  for (char c : split.outer) tag.outer_order.push_back(static_cast<int>(letters.find(to_lower(c))));
  std::int64_t product = 1;
  for (const auto& [size, letter] : split.inner) {
    const std::size_t dim = letters.find(letter);
    if (dim == std::string_view::npos) fail_name("inner blocks of dims in the outer part", name);
    if (__builtin_mul_overflow(product, size, &product))
      fail_name("inner blocks whose product fits 64 bits", name);
    tag.inner_blocks.push_back({size, static_cast<int>(dim)});
  }
  for (std::size_t i = 0; i < split.outer.size(); ++i)
    if (is_upper(split.outer[i]) != (tag.block_of(tag.outer_order[i]) > 1))
      fail_name("upper case for exactly the dims that have an inner block", name);
  return tag;
}

std::string canonical_tag(std::string_view name) { return parse_tag(name).name(); }

Dims physical_shape(const Dims& dims, const FormatTag& tag) {
  if (tag.kind != FormatKind::blocked)
    fail_value("physical_shape", "a tag that says where data lies", tag.name(),
               "query the primitive for its format first");
  if (static_cast<int>(dims.size()) != tag.ndims())
    fail_value("physical_shape", text(tag.ndims(), " dims for tag ", tag.name()), text(dims),
               "use a tag of the same rank");
  for (std::int64_t dim : dims)
    if (dim < 0)
      fail_value("physical_shape", "dims of at least 0", text(dims), "pass the logical dims");
  Dims physical;
  for (int dim : tag.outer_order) {
    const std::int64_t block = tag.block_of(dim);
    physical.push_back(dims[dim] / block + (dims[dim] % block != 0));
  }
  for (const InnerBlock& inner : tag.inner_blocks) physical.push_back(inner.size);
  return physical;
}

}  // namespace torch_blocked
