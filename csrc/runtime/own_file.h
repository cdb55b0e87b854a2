// Files that this package keeps between processes, and believes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace torch_blocked {

// What a file holds from a byte on. Nothing if it is not there, or none that only its owner, who is
// this user or root, can write to: a link, a pipe or a device in its place, a folder or a file that
// others may change. It never waits. Larger files than this package writes count as empty.
std::optional<std::string> read_own_file(const std::string& path, std::int64_t from = 0);

// Appends whole lines to such a file, which is made where there is none. False where that fails:
// what is kept is only to be faster.
bool append_to_own_file(const std::string& path, std::string_view lines);

}  // namespace torch_blocked
