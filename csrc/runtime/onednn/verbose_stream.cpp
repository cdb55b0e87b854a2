// Lets C's standard output be a file, takes oneDNN's lines from there, and passes all others on.
#include "runtime/onednn/verbose_stream.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "runtime/fork.h"

namespace torch_blocked::verbose_stream {
namespace {

constexpr std::string_view kPrefix = "onednn_verbose";

std::atomic<int> openings{0};
int holds = 0;                // ops that run, and may print after the last closing
std::FILE* caught = nullptr;  // stays for the next stream: a thread may be about to write to it
std::FILE* own_stdout = nullptr;
off_t taken = 0;     // how much of the file was read
std::string unread;  // the beginning of a line that is not complete yet

ForkMutex mutex([] { abandon(unread); });  // guards the variables above

// A child of fork() has a file of its own, and none of the ops of other threads.
thread_local int own_holds = 0;
void leave_file_to_parent() {
  holds = own_holds;
  if (!caught) return;
  const bool is_used = stdout == caught;
  caught = std::tmpfile();
  taken = 0;
  if (is_used) stdout = caught ? caught : own_stdout;
}
const bool at_fork = (in_forked_children(leave_file_to_parent), true);

void pass_on(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), own_stdout);
  std::fflush(own_stdout);
}

std::vector<std::string> take_locked() {
  if (stdout != caught) return {};
  std::fflush(caught);
  struct stat now = {};
  if (::fstat(::fileno(caught), &now) != 0 || now.st_size <= taken) return {};
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

// Standard output is the process's own again, unless a stream or an op still needs the file.
void end_unless_used() noexcept {
  if (openings > 0 || holds > 0 || stdout != caught) return;
  try {
    take_locked();
    if (!unread.starts_with(kPrefix)) pass_on(unread);
  } catch (const std::bad_alloc&) {  // what others printed meanwhile is lost
  }
  stdout = own_stdout;
  unread.clear();
  std::rewind(caught);
  if (::ftruncate(::fileno(caught), 0) == 0) taken = 0;
}

}  // namespace

bool is_open() { return openings.load(std::memory_order_relaxed) > 0; }

void open() {
  const std::lock_guard lock(mutex);
  ++openings;
  if (!caught) caught = std::tmpfile();
  if (caught && stdout != caught) own_stdout = std::exchange(stdout, caught);
}

void close() {
  const std::lock_guard lock(mutex);
  --openings;
  end_unless_used();
}

Hold::Hold() {
  if (!is_open()) return;
  const std::lock_guard lock(mutex);
  holds_ = openings > 0;
  if (!holds_) return;
  ++holds;
  ++own_holds;
}

Hold::~Hold() {
  if (!holds_) return;
  const std::lock_guard lock(mutex);
  --holds;
  --own_holds;
  end_unless_used();
}

std::vector<std::string> take() {
  const std::lock_guard lock(mutex);
  return take_locked();
}

}  // namespace torch_blocked::verbose_stream
