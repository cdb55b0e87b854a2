// Redirects standard output to a file, takes oneDNN's lines from there, and passes all others on.
#include "runtime/onednn/verbose_stream.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <string_view>

#include "runtime/fork.h"

namespace torch_blocked::verbose_stream {
namespace {

constexpr std::string_view kPrefix = "onednn_verbose";

std::atomic<int> openings{0};
std::FILE* caught = nullptr;
int own_stdout = -1;
off_t taken = 0;                           // how much of the file was read
std::string unread;                        // the beginning of a line that is not complete yet
ForkMutex mutex([] { abandon(unread); });  // guards the variables above

void pass_on(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(own_stdout, text.data(), text.size());
    if (count <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

std::vector<std::string> take_locked() {
  std::fflush(stdout);
  struct stat now = {};
  if (!caught || ::fstat(::fileno(caught), &now) != 0 || now.st_size <= taken) return {};
  std::string text(static_cast<std::size_t>(now.st_size - taken), '\0');
  const ssize_t count = ::pread(::fileno(caught), text.data(), text.size(), taken);
  if (count <= 0) return {};
  taken += count;
  unread.append(text, 0, static_cast<std::size_t>(count));
  std::vector<std::string> lines;
  for (std::size_t end = unread.find('\n'); end != std::string::npos; end = unread.find('\n')) {
    if (unread.starts_with(kPrefix)) {
      lines.push_back(unread.substr(0, end));
    } else {
      pass_on(std::string_view(unread).substr(0, end + 1));
    }
    unread.erase(0, end + 1);
  }
  return lines;
}

}  // namespace

bool is_open() { return openings.load(std::memory_order_relaxed) > 0; }

bool open() {
  const std::lock_guard lock(mutex);
  if (openings > 0) return ++openings > 0;
  std::fflush(stdout);
  caught = std::tmpfile();
  own_stdout = ::dup(STDOUT_FILENO);
  if (!caught || own_stdout < 0 || ::dup2(::fileno(caught), STDOUT_FILENO) < 0) {
    if (caught) std::fclose(caught);
    if (own_stdout >= 0) ::close(own_stdout);
    caught = nullptr;
    return false;
  }
  taken = 0;
  ++openings;
  return true;
}

void close() {
  const std::lock_guard lock(mutex);
  if (--openings > 0) return;
  std::fflush(stdout);
  ::dup2(own_stdout, STDOUT_FILENO);
  take_locked();
  if (!unread.starts_with(kPrefix)) pass_on(unread);
  unread.clear();
  std::fclose(caught);
  ::close(own_stdout);
  caught = nullptr;
}

std::vector<std::string> take() {
  const std::lock_guard lock(mutex);
  return take_locked();
}

}  // namespace torch_blocked::verbose_stream
