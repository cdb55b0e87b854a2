// Opens files only if this user or root alone can change them; then reads or appends.
#include "runtime/own_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

namespace torch_blocked {
namespace {

// 22,000 lines of measurements take 3 MB.
constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;

class File {
 public:
  explicit File(int file) : file_(file) {}
  File(File&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  ~File() {
    if (file_ >= 0) ::close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  File& operator=(File&&) = delete;

  int get() const { return file_; }

 private:
  int file_;
};

// Whether a file or folder can be trusted: only this user or root may change it.
bool is_own(const struct stat& status) {
  const bool ours = status.st_uid == ::geteuid() || status.st_uid == 0;
  return ours && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// A file with a second name could be another file, which our lines would change.
bool is_own_file(const struct stat& status) {
  return S_ISREG(status.st_mode) && status.st_nlink == 1 && is_own(status);
}

// Opens a file without blocking on a pipe. A link as the last part of the path is not followed;
// somebody who may write to the folder could plant only that.
File opened(const std::string& path, int how) {
  const std::size_t slash = path.rfind('/');
  if (slash == path.npos) return File(-1);
  const File folder(::open(path.substr(0, slash + 1).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  struct stat status{};
  if (folder.get() < 0 || ::fstat(folder.get(), &status) != 0 || !is_own(status)) return File(-1);
  constexpr int kAlways = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY;
  constexpr mode_t kForAll = S_IRUSR | S_IWUSR | S_IRGRP | S_IROTH;
  File file(::openat(folder.get(), path.substr(slash + 1).c_str(), how | kAlways, kForAll));
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) return File(-1);
  return is_own_file(status) && status.st_size <= kMostBytes ? std::move(file) : File(-1);
}

bool ends_in_line(int file) {
  const off_t size = ::lseek(file, 0, SEEK_END);
  char last = '\n';
  return size <= 0 || (::pread(file, &last, 1, size - 1) == 1 && last == '\n');
}

}  // namespace

std::optional<std::string> read_own_file(const std::string& path, std::int64_t from) {
  const File file = opened(path, O_RDONLY);
  if (file.get() < 0) return std::nullopt;
  std::string content;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::pread(file.get(), buffer, sizeof buffer, from + std::ssize(content));
    if (got < 0) return std::nullopt;
    if (got == 0 || std::ssize(content) > kMostBytes) return content;
    content.append(buffer, static_cast<std::size_t>(got));
  }
}

bool append_to_own_file(const std::string& path, std::string_view lines) {
  const File file = opened(path, O_RDWR | O_APPEND | O_CREAT);
  if (file.get() < 0) return false;
  // A process that was killed, or a full disk, may have left part of a line.
  std::string content(ends_in_line(file.get()) ? "" : "\n");
  content += lines;
  return ::write(file.get(), content.data(), content.size()) == std::ssize(content);
}

}  // namespace torch_blocked
