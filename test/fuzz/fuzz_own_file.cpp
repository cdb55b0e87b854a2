// Files that are kept between processes: they are read as they are, or not at all where somebody
// else could have written them, and no kind of file makes the reader wait.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "from_bytes.h"
#include "runtime/own_file.h"
#include "temporary_folder.h"

namespace torch_blocked {
namespace {

using fuzz::Bytes;
using fuzz::must_hold;
namespace fs = std::filesystem;

constexpr mode_t kOthersMayWrite = S_IWGRP | S_IWOTH;

void write(const fs::path& path, std::string_view content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::string content_of(const fs::path& path) {
  std::ostringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return content.str();
}

enum Kind { kFile, kLink, kTwoNames, kPipe, kFolder, kNothing, kKinds };

// Makes it, and says whether its content may be believed.
bool make(Kind kind, const fs::path& path, std::string_view content, mode_t mode) {
  const fs::path other = path.string() + ".other";
  if (kind == kNothing) return false;
  if (kind == kPipe) return ::mkfifo(path.c_str(), mode) != 0;
  if (kind == kFolder) return !fs::create_directory(path);
  write(kind == kLink ? other : path, content);
  if (kind == kLink) fs::create_symlink(other, path);
  if (kind == kTwoNames) fs::create_hard_link(path, other);
  ::chmod(path.c_str(), mode);
  return kind == kFile && (mode & kOthersMayWrite) == 0;
}

void check_read(const std::string& path, std::string_view content, bool is_own, Bytes& bytes) {
  const auto read = read_own_file(path);
  must_hold(read.has_value() == is_own, "only a file of this user alone is read");
  if (!read) return;
  must_hold(*read == content, "a file is read as it is");
  const auto from = static_cast<std::size_t>(bytes.byte());
  const auto later = read_own_file(path, static_cast<std::int64_t>(from));
  must_hold(later && *later == content.substr(std::min(from, content.size())), "from a byte on");
}

void check_append(const std::string& path, std::string_view lines, bool may_write) {
  const std::string before = may_write ? content_of(path) : "";
  const bool is_done = append_to_own_file(path, lines);
  must_hold(is_done == may_write, "only a file of this user alone is written");
  if (!is_done) return;
  const bool is_cut = !before.empty() && before.back() != '\n';
  must_hold(content_of(path) == before + (is_cut ? "\n" : "") + std::string(lines),
            "lines begin behind the end of the last one");
}

void run(Bytes& bytes) {
  static const fuzz::TemporaryFolder temporary;
  const fs::path folder = temporary.path() / "folder", path = folder / "file";
  fs::create_directory(folder);
  const auto kind = static_cast<Kind>(bytes.below(kKinds));
  const mode_t mode = S_IRUSR | S_IWUSR | (bytes.byte() & (S_IRWXG | S_IRWXO));
  const mode_t of_folder = S_IRWXU | (bytes.byte() & (S_IRWXG | S_IRWXO));
  const std::string_view lines = bytes.up_to(bytes.byte()), content = bytes.up_to(4096);
  const bool is_own = make(kind, path, content, mode);
  ::chmod(folder.c_str(), of_folder);
  const bool is_own_folder = (of_folder & kOthersMayWrite) == 0;
  check_read(path, content, is_own && is_own_folder, bytes);
  check_append(path, lines, (is_own || kind == kNothing) && is_own_folder);
  // A path of any text: no folder, no slash, a 0 inside.
  read_own_file(std::string(content));
  fs::remove_all(folder);
}

}  // namespace
}  // namespace torch_blocked

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  torch_blocked::fuzz::Bytes bytes(data, size);
  torch_blocked::run(bytes);
  return 0;
}
