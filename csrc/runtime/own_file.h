// Reads and writes files that this package keeps between processes and trusts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace torch_blocked {

// The content of a file from byte `from` on. Nothing if the file does not exist or cannot be
// trusted: a link, a pipe or a device, a file or folder that others may change, or that belongs
// neither to this user nor to root. It never waits. Files larger than this package writes count as
// empty.
std::optional<std::string> read_own_file(const std::string& path, std::int64_t from = 0);

// Appends whole lines to such a file, and creates it if there is none. Returns false on failure,
// which only costs time: these files make things faster.
bool append_to_own_file(const std::string& path, std::string_view lines);

}  // namespace torch_blocked
