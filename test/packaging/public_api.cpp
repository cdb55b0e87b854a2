// What test_cpp.py asks of the public headers, without ATen: it loads this with ctypes.
#include <algorithm>
#include <atomic>
#include <exception>

#include "torch_blocked/accessor.h"
#include "torch_blocked/descriptor.h"
#include "torch_blocked/threads.h"

using torch_blocked::Descriptor;
using torch_blocked::Dims;

extern "C" {

// Fills `data`, the memory of a tensor of these four dims in nChw<lanes>c, with c + 1 at every
// channel c, block by block, and returns the largest number of blocks that one call came for.
std::int64_t number_channels(float* data, const std::int64_t* dims, std::int64_t lanes) {
  const torch_blocked::BlockedAccessor<float> activation(data, Dims(dims, dims + 4), lanes);
  std::vector<int> visits(static_cast<std::size_t>(activation.batch() * activation.blocks()));
  torch_blocked::for_blocks(activation, [&](std::int64_t n, std::int64_t block) {
    ++visits[static_cast<std::size_t>(n * activation.blocks() + block)];
    float* pixels = activation.block(n, block);
    for (std::int64_t pixel = 0; pixel < activation.pixels(); ++pixel) {
      for (std::int64_t lane = 0; lane < activation.lanes_of(block); ++lane) {
        pixels[pixel * lanes + lane] = static_cast<float>(block * lanes + lane + 1);
      }
    }
  });
  return visits.empty() ? 0 : *std::ranges::max_element(visits);
}

// The offset of an index by the accessor; -1 if the descriptor of `tag` says another.
std::int64_t offset(const char* tag, const std::int64_t* dims, const std::int64_t* index,
                    std::int64_t lanes) {
  const torch_blocked::BlockedAccessor<const float> activation(nullptr, Dims(dims, dims + 4),
                                                               lanes);
  const auto descriptor = Descriptor::with_tag(activation.dims(), torch_blocked::DataType::f32,
                                               torch_blocked::parse_tag(tag));
  const std::int64_t at = activation.offset(index[0], index[1], index[2], index[3]);
  return at == descriptor.offset(Dims(index, index + 4)) ? at : -1;
}

// How many of `units` large units a loop runs once.
std::int64_t units_run_once(std::int64_t units) {
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(units));
  torch_blocked::parallel_units(units, std::int64_t{1} << 30,
                                [&](std::int64_t begin, std::int64_t end) {
                                  for (std::int64_t unit = begin; unit < end; ++unit) {
                                    ++runs[static_cast<std::size_t>(unit)];
                                  }
                                });
  return std::ranges::count(runs, 1, [](const auto& each) { return each.load(); });
}

// Whether what a descriptor refuses, and a wrong number of indices, comes as an exception that a
// library of another's can catch.
bool refuses(const char* tag) {
  const torch_blocked::BlockedAccessor<const float> activation(nullptr, {1, 8, 2, 2}, 8);
  try {
    static_cast<void>(activation.offset(0, 0, 0));
    return false;
  } catch (const std::invalid_argument&) {
  }
  try {
    torch_blocked::parse_tag(tag);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

}  // extern "C"
