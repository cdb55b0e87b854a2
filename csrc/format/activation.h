// The memory format of an activation [N, C, *spatial]: which elements lie side by side.
//
//   kPlain         the channels of an image, one after the other: nchw
//   kChannelsLast  all channels of a pixel: nhwc
//   blocked(b)     b channels of a pixel, zeros beyond C in the last block: nChw16c
//
// All three are [N, ceil(C / lanes), *spatial, lanes], with 1, C or b lanes. The fourth, kStrided,
// is for any other tensor: its strides say where its elements lie.
#pragma once

#include <oneapi/dnnl/dnnl_types.h>

#include <algorithm>
#include <array>
#include <compare>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "torch_blocked/descriptor.h"

namespace torch_blocked {

struct Format {
  enum class Kind : std::uint8_t { kStrided, kPlain, kChannelsLast, kBlocked };

  Kind kind;
  std::int64_t block = 0;  // channels of a block; 0 for the other kinds

  static constexpr std::array<std::int64_t, 4> kBlocks{4, 8, 16, 32};
  static constexpr bool is_block(std::int64_t lanes) {
    return std::ranges::find(kBlocks, lanes) != kBlocks.end();
  }
  // `block` must be one of kBlocks.
  static constexpr Format blocked(std::int64_t block) { return {Kind::kBlocked, block}; }

  // The format of a tag of 3 to 5 dims, or of a descriptor. If several fit a descriptor, the first
  // one in the table of activation.cpp. Nothing if none fits.
  static std::optional<Format> of(const FormatTag& tag);
  static std::optional<Format> of(const Descriptor& descriptor);

  constexpr auto operator<=>(const Format&) const = default;

  constexpr bool is_blocked() const { return kind == Kind::kBlocked; }
  // The channels of a pixel that lie side by side in memory, if a pixel has `channels`.
  constexpr std::int64_t lanes(std::int64_t channels) const {
    return is_blocked()                  ? block
           : kind == Kind::kChannelsLast ? std::max<std::int64_t>(channels, 1)
                                         : 1;
  }
  // How many blocks `channels` channels need: ceil(C / lanes). No C overflows.
  constexpr std::int64_t blocks(std::int64_t channels) const {
    return channels / lanes(channels) + (channels % lanes(channels) > 0);
  }
  // The channels in the last block if they do not fill it; 0 if all blocks are full.
  constexpr std::int64_t tail(std::int64_t channels) const { return channels % lanes(channels); }

  // The sizes of the contiguous tensor that holds the memory of an activation with these dims.
  Dims physical_shape(std::span<const std::int64_t> dims) const;

  // For 3 to 5 dims, and not for kStrided, which is "strided" and has no tag.
  std::string_view name(std::size_t ndims) const;
  dnnl_format_tag_t onednn_tag(std::size_t ndims) const;
  Descriptor descriptor(const Dims& dims, DataType data_type) const;
};

inline constexpr Format kStrided{Format::Kind::kStrided}, kPlain{Format::Kind::kPlain},
    kChannelsLast{Format::Kind::kChannelsLast};

// The common name if oneDNN has one, else the agnostic one: "aBcd16b" -> "nChw16c", "bcda" ->
// "chwn", "ABcd16b16a" stays.
std::string activation_name(const FormatTag& tag);
// The name of a descriptor's format; nothing if no tag fits. If several fit, plain comes first.
std::optional<std::string> activation_name(const Descriptor& descriptor);

}  // namespace torch_blocked
