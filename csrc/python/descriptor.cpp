// Python binding of format tags and memory descriptors. torch_blocked/descriptor.py wraps the class
// for users: here data types are strings and every accessor has one name.
#include "torch_blocked/descriptor.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "format/activation.h"
#include "format/errors.h"
#include "torch_blocked/tag.h"

namespace torch_blocked {
namespace {

namespace py = pybind11;

py::tuple to_tuple(const Dims& dims) {
  py::tuple result(dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i) result[i] = py::int_(dims[i]);
  return result;
}

std::vector<InnerBlock> make_inner_blocks(const Dims& sizes, const std::vector<int>& dims) {
  if (sizes.size() != dims.size())
    fail_value("Descriptor", "inner_blks and inner_idxs of the same length",
               text("inner_blks ", sizes, " and inner_idxs ", dims),
               "give one index for each block");
  std::vector<InnerBlock> blocks;
  for (std::size_t i = 0; i < sizes.size(); ++i) blocks.push_back({sizes[i], dims[i]});
  return blocks;
}

Descriptor make_descriptor(const Dims& dims, const std::string& data_type,
                           const std::optional<std::string>& tag,
                           const std::optional<Dims>& strides, const Dims& inner_blks,
                           const std::vector<int>& inner_idxs, const Dims& padded_dims,
                           const Dims& inner_strides, bool allow_empty) {
  if (tag.has_value() == strides.has_value())
    fail_type("Descriptor", "either a tag or strides", tag ? "both" : "neither",
              "pass tag=\"nChw16c\" or strides=(...)");
  const std::vector<InnerBlock> inner = make_inner_blocks(inner_blks, inner_idxs);
  if (tag && !(inner.empty() && padded_dims.empty() && inner_strides.empty()))
    fail_type("Descriptor", "inner blocks and padded dims only beside strides", text("tag ", *tag),
              "name the blocks in the tag, which pads to them");
  const DataType type = parse_data_type(data_type);
  if (tag) return Descriptor::with_tag(dims, type, parse_tag(*tag), allow_empty);
  const Blocking blocking{.strides = *strides,
                          .inner_blocks = inner,
                          .padded_dims = padded_dims,
                          .inner_strides = inner_strides};
  return Descriptor::with_blocking(dims, type, blocking, allow_empty);
}

std::string format_kind_name(FormatKind kind) {
  constexpr const char* names[] = {"undef", "any", "blocked"};
  return names[static_cast<int>(kind)];
}

Dims inner_blks(const Descriptor& d) {
  Dims sizes;
  for (const InnerBlock& inner : d.inner_blocks()) sizes.push_back(inner.size);
  return sizes;
}

std::vector<int> inner_idxs(const Descriptor& d) {
  std::vector<int> dims;
  for (const InnerBlock& inner : d.inner_blocks()) dims.push_back(inner.dim);
  return dims;
}

// All fields of a descriptor, for pickle: names instead of enums, and only Python's own types.
py::tuple to_state(const Descriptor& d) {
  return py::make_tuple(d.dims(), std::string(data_type_name(d.data_type())),
                        format_kind_name(d.format_kind()), d.strides(), inner_blks(d),
                        inner_idxs(d), d.padded_dims(), d.submemory_offset());
}

Descriptor from_state(const Dims& dims, const std::string& data_type, const std::string& kind,
                      const Dims& strides, const Dims& inner_blks,
                      const std::vector<int>& inner_idxs, const Dims& padded_dims,
                      std::int64_t submemory_offset) {
  const DataType type = parse_data_type(data_type);
  if (kind != "blocked") return Descriptor::with_tag(dims, type, parse_tag(kind));
  const Blocking blocking{.strides = strides,
                          .inner_blocks = make_inner_blocks(inner_blks, inner_idxs),
                          .padded_dims = padded_dims,
                          .submemory_offset = submemory_offset};
  return Descriptor::with_blocking(dims, type, blocking);
}

void bind_tags(py::module_& m) {
  m.def("canonical_tag", [](const std::string& tag) { return canonical_tag(tag); });
  // The logical dims from outer-most to inner-most in memory; None for a tag with inner blocks.
  m.def("memory_order", [](const std::string& name) -> std::optional<std::vector<int>> {
    const FormatTag tag = parse_tag(name);
    return tag.is_plain() ? std::optional(tag.outer_order) : std::nullopt;
  });
  m.def("physical_shape", [](const Dims& dims, const std::string& tag) {
    return to_tuple(physical_shape(dims, parse_tag(tag)));
  });
}

Format blocked_format(std::int64_t block) {
  if (!Format::is_block(block))
    fail_value("Format", text("a block, one of ", Format::kBlocks), text(block), "use 8 or 16");
  return Format::blocked(block);
}

void bind_format(py::module_& m) {
  py::class_<Format>(m, "Format")
      .def_static("blocked", &blocked_format)
      // The format that a tag names; None if the tag has another number of dims.
      .def_static("of",
                  [](const std::string& name, int ndims) {
                    const FormatTag tag = parse_tag(name);
                    return tag.ndims() == ndims ? Format::of(tag) : std::nullopt;
                  })
      .def_readonly_static("PLAIN", &kPlain)
      .def_readonly_static("CHANNELS_LAST", &kChannelsLast)
      .def_property_readonly_static(
          "BLOCKS",
          [](const py::object&) {
            return to_tuple({Format::kBlocks.begin(), Format::kBlocks.end()});
          })
      .def_readonly("block", &Format::block)
      .def("name", [](const Format& f, std::size_t ndims) { return std::string(f.name(ndims)); });
}

}  // namespace

void bind_descriptor(py::module_& m) {
  bind_tags(m);
  bind_format(m);
  using namespace py::literals;
  py::class_<Descriptor>(m, "Descriptor")
      .def(py::init<>())
      .def(py::init(&make_descriptor), "dims"_a, "data_type"_a, "tag"_a, "strides"_a,
           "inner_blks"_a, "inner_idxs"_a, "padded_dims"_a, "inner_strides"_a, "allow_empty"_a)
      .def("state", &to_state)
      .def_static("from_state", &from_state)
      .def("ndims", &Descriptor::ndims)
      .def("dims", [](const Descriptor& d) { return to_tuple(d.dims()); })
      .def("data_type",
           [](const Descriptor& d) { return std::string(data_type_name(d.data_type())); })
      .def("format_kind", [](const Descriptor& d) { return format_kind_name(d.format_kind()); })
      .def("strides", [](const Descriptor& d) { return to_tuple(d.strides()); })
      .def("padded_dims", [](const Descriptor& d) { return to_tuple(d.padded_dims()); })
      .def("padded_offsets", [](const Descriptor& d) { return to_tuple(d.padded_offsets()); })
      .def("submemory_offset", &Descriptor::submemory_offset)
      .def("inner_blks", [](const Descriptor& d) { return to_tuple(inner_blks(d)); })
      .def("inner_idxs",
           [](const Descriptor& d) {
             const std::vector<int> idxs = inner_idxs(d);
             return to_tuple({idxs.begin(), idxs.end()});
           })
      .def("inner_strides", [](const Descriptor& d) { return to_tuple(d.inner_strides()); })
      .def("get_size", &Descriptor::size_bytes)
      .def("is_zero", &Descriptor::is_zero)
      .def("offset", &Descriptor::offset, "index"_a, "padded"_a)
      .def("submemory_desc", &Descriptor::submemory_desc, "dims"_a, "offsets"_a, "allow_empty"_a)
      .def("reshape", &Descriptor::reshape, "dims"_a, "allow_empty"_a)
      .def("permute_axes", &Descriptor::permute_axes, "permutation"_a, "allow_empty"_a)
      .def("tag",
           [](const Descriptor& d) -> std::optional<std::string> {
             const auto tag = d.tag();
             return tag ? std::optional(tag->name()) : std::nullopt;
           })
      .def("activation_name", [](const Descriptor& d) { return activation_name(d); })
      .def("matches_tag", [](const Descriptor& d,
                             const std::string& tag) { return d.matches_tag(parse_tag(tag)); })
      .def("physical_shape", [](const Descriptor& d) { return to_tuple(d.physical_shape()); })
      .def("equals", [](const Descriptor& a, const Descriptor& b) { return a == b; })
      .def("hash", &Descriptor::hash)
      .def("to_string", &Descriptor::to_string);
}

}  // namespace torch_blocked
