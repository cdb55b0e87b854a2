// Lets calls of the system fail: requests for memory, threads and files. A process loads this
// library before all others (LD_PRELOAD), and says through ctypes which calls fail (__init__.py).
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <new>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// glibc's own functions, under names that nobody else defines.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void __libc_free(void*);
}

namespace {

using Address = std::uintptr_t;

// ---- sites of memory ----------------------------------------------------------------------------

// A library that is watched. Of torch's, only aligned requests are: the memory of tensors.
struct Library {
  const char* name;
  bool is_aligned_only;
  Address base = 0, end = 0;
};
Library libraries[] = {{nullptr, false}, {"/libc10.so", true}};  // ours is named by failing_watch()

// A site is a place in the code that asks for memory: the address that its call returns to.
struct Site {
  std::atomic<Address> caller{0};
  std::atomic<long> calls{0}, live{0};
};
constexpr std::size_t kSites = 1 << 15;
Site sites[kSites];

std::atomic<Address> armed{0};
std::atomic<long> left{0};  // calls of the armed site until the one that fails
std::atomic<bool> failed{false};
std::atomic<long> mapped{0};  // bytes

struct Guard {
  static inline std::atomic_flag flag = ATOMIC_FLAG_INIT;
  Guard() {
    while (flag.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Guard() { flag.clear(std::memory_order_release); }
};

bool is_watched(Address caller, bool is_aligned) {
  for (const Library& each : libraries) {
    if (caller >= each.base && caller < each.end) return is_aligned || !each.is_aligned_only;
  }
  return false;
}

Site& site_of(Address caller) {
  for (std::size_t i = caller % kSites;; i = (i + 1) % kSites) {
    Address seen = sites[i].caller.load();
    if (seen == caller) return sites[i];
    if (seen == 0 && sites[i].caller.compare_exchange_strong(seen, caller)) return sites[i];
    if (seen == caller) return sites[i];
  }
}

// The site of a request, if it is watched; nullptr: another's request.
Site* asks(const void* caller, bool is_aligned) {
  const auto address = reinterpret_cast<Address>(caller);
  if (!is_watched(address, is_aligned)) return nullptr;
  Site& site = site_of(address);
  ++site.calls;
  return &site;
}

bool fails(const Site* site) {
  if (!site || site->caller.load() != armed.load() || --left != 0) return false;
  failed = true;
  return true;
}

// Blocks that watched sites got and nobody has freed: a hash table with linear probing.
struct Block {
  void* data;
  Site* site;
};
constexpr std::size_t kBlocks = 1 << 20;
Block blocks[kBlocks];
std::size_t held = 0;

std::size_t slot_of(const void* data) {
  return (reinterpret_cast<Address>(data) >> 4) * 0x9E3779B97F4A7C15u >> 44;
}
static_assert(kBlocks == std::size_t{1} << (64 - 44));

void* noted(void* data, Site* site) {
  if (!site || !data) return data;
  const Guard guard;
  if (++held > kBlocks / 2) abort();
  std::size_t i = slot_of(data);
  while (blocks[i].data) i = (i + 1) % kBlocks;
  blocks[i] = {data, site};
  ++site->live;
  return data;
}

// Removes a block, and moves those behind it, so that no gap hides them.
Site* forgotten(const void* data) {
  const Guard guard;
  std::size_t i = slot_of(data);
  while (blocks[i].data && blocks[i].data != data) i = (i + 1) % kBlocks;
  if (!blocks[i].data) return nullptr;
  Site* const site = blocks[i].site;
  --site->live;
  --held;
  for (std::size_t j = (i + 1) % kBlocks; blocks[j].data; j = (j + 1) % kBlocks) {
    const std::size_t wanted = slot_of(blocks[j].data);
    if ((j - wanted) % kBlocks < (j - i) % kBlocks) continue;
    blocks[i] = blocks[j];
    i = j;
  }
  blocks[i] = {};
  return site;
}

void* thrown_new(std::size_t bytes, std::size_t alignment, const void* caller) {
  Site* const site = asks(caller, false);
  void* data = nullptr;
  if (!fails(site)) {
    bytes = std::max<std::size_t>(bytes, 1);
    data = alignment ? __libc_memalign(alignment, bytes) : __libc_malloc(bytes);
  }
  if (!data) throw std::bad_alloc();
  return noted(data, site);
}

void* quiet_new(std::size_t bytes, std::size_t alignment, const void* caller) {
  Site* const site = asks(caller, false);
  if (fails(site)) return nullptr;
  bytes = std::max<std::size_t>(bytes, 1);
  return noted(alignment ? __libc_memalign(alignment, bytes) : __libc_malloc(bytes), site);
}

// ---- files --------------------------------------------------------------------------------------

// Calls for files of one folder fail: `times` of them, from that of number `first`.
const char* folder = nullptr;
std::atomic<long> first_file_call{0}, file_calls{0}, times{0};
std::atomic<int> file_error{0};
char log_of_calls[1 << 16];
std::size_t logged = 0;

constexpr int kShort = -1;  // not an error: the call takes half of the bytes
constexpr int kMostFiles = 4096;
bool is_ours[kMostFiles];

bool is_below(const char* path) {
  const std::size_t size = folder ? strlen(folder) : 0;
  return size && path && strncmp(path, folder, size) == 0;
}

bool is_ours_at(int at, const char* path) {
  return is_below(path) || (path && path[0] != '/' && at >= 0 && at < kMostFiles && is_ours[at]);
}

bool is_known(int file) { return folder && file >= 0 && file < kMostFiles && is_ours[file]; }

int noted_file(int file, bool ours) {
  if (file >= 0 && file < kMostFiles) is_ours[file] = ours;
  return file;
}

// What becomes of this call: 0, an error, or kShort.
int verdict(const char* name) {
  const long call = ++file_calls;
  {
    const Guard guard;
    const std::size_t room = sizeof log_of_calls - logged;
    const int size = snprintf(log_of_calls + logged, room, "%s ", name);
    logged += std::min(static_cast<std::size_t>(size), room - 1);
  }
  const long first = first_file_call;
  if (first == 0 || call < first || call >= first + times) return 0;
  failed = true;
  return file_error;
}

template <class Result>
Result failure(int error, Result result) {
  errno = error;
  return result;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// The bytes of a call that reads or writes `bytes`; -1 with errno where it fails.
ssize_t allowed(const char* name, std::size_t bytes) {
  const int error = verdict(name);
  if (error == 0) return static_cast<ssize_t>(bytes);
  if (error == kShort) return static_cast<ssize_t>(bytes > 1 ? bytes / 2 : bytes);
  return failure<ssize_t>(error, -1);
}

mode_t mode_of(int how, va_list rest) {
  return how & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY)) ? va_arg(rest, mode_t) : 0;
}

int opened(const char* name, int at, const char* path, int how, mode_t mode) {
  const bool ours = folder && is_ours_at(at, path);
  if (const int error = ours ? verdict(name) : 0; error > 0) return failure(error, -1);
  return noted_file(static_cast<int>(syscall(SYS_openat, at, path, how, mode)), ours);
}

FILE* opened_stream(const char* name, const char* path, const char* how) {
  static auto* const real = next<FILE*(const char*, const char*)>("fopen64");
  const bool ours = is_below(path);
  if (const int error = ours ? verdict(name) : 0; error > 0) {
    return failure<FILE*>(error, nullptr);
  }
  FILE* const file = real(path, how);
  if (file) noted_file(fileno(file), ours);
  return file;
}

// ---- threads ------------------------------------------------------------------------------------

// Of the threads that are made while this is armed, so many may live at once; -1: any number.
std::atomic<long> most_threads{-1}, living{0};

struct Work {
  void* (*run)(void*);
  void* argument;
};

// Counts a thread until it ends, also where it is cancelled.
void* counted(void* given) {
  struct Life {
    ~Life() { --living; }
  } life;
  const Work work = *static_cast<Work*>(given);
  __libc_free(given);
  return work.run(work.argument);
}

}  // namespace

// ---- what tests call ----------------------------------------------------------------------------

// Finds the libraries: the one at the path `module`, and c10. Returns how many are loaded.
EXPORTED int failing_watch(const char* module) {
  libraries[0].name = strdup(module);
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void*) {
        for (Library& each : libraries) {
          if (!strstr(info->dlpi_name, each.name)) continue;
          each.base = info->dlpi_addr;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& part = info->dlpi_phdr[i];
            if (part.p_type != PT_LOAD) continue;
            each.end = std::max(each.end, each.base + part.p_vaddr + part.p_memsz);
          }
        }
        return 0;
      },
      nullptr);
  return static_cast<int>(
      std::count_if(std::begin(libraries), std::end(libraries), [](auto& l) { return l.end > 0; }));
}

// The next four are indexed by the number of a place in the table of sites.
EXPORTED std::size_t failing_places() { return kSites; }
EXPORTED Address failing_caller(std::size_t place) { return sites[place].caller; }
EXPORTED long failing_calls(std::size_t place) { return sites[place].calls; }
EXPORTED long failing_live(std::size_t place) { return sites[place].live; }

EXPORTED void failing_count_anew() {
  for (Site& each : sites) each.calls = 0;
}
EXPORTED long failing_held() { return static_cast<long>(held); }
EXPORTED long failing_mapped() { return mapped; }
// An address as one in the file of its library; with the library's number above 48 bits.
EXPORTED Address failing_offset(Address caller) {
  for (std::size_t i = 0; i < std::size(libraries); ++i) {
    if (caller >= libraries[i].base && caller < libraries[i].end) {
      return (static_cast<Address>(i) << 48) + caller - libraries[i].base;
    }
  }
  return 0;
}
EXPORTED void failing_arm(Address caller, long call) {
  failed = false;
  left = call;
  armed = caller;
}
EXPORTED void failing_arm_files(const char* below, long first, long calls, int error) {
  static char kept[4096];
  snprintf(kept, sizeof kept, "%s", below);
  folder = *kept ? kept : nullptr;
  failed = false;
  file_calls = 0;
  logged = 0;
  file_error = error;
  times = calls;
  first_file_call = first;
}
EXPORTED const char* failing_log() { return logged ? log_of_calls : ""; }
EXPORTED void failing_arm_threads(long most) {
  failed = false;
  living = 0;
  most_threads = most;
}
// Whether a call failed since the last time that calls were armed. Nothing is armed afterwards.
EXPORTED int failing_disarm() {
  armed = 0;
  first_file_call = 0;
  most_threads = -1;
  return failed;
}

// ---- what the process calls ---------------------------------------------------------------------

#define CALLER __builtin_return_address(0)
using Alignment = std::align_val_t;
using Quiet = std::nothrow_t;

void* operator new(std::size_t n) { return thrown_new(n, 0, CALLER); }
void* operator new[](std::size_t n) { return thrown_new(n, 0, CALLER); }
void* operator new(std::size_t n, const Quiet&) noexcept { return quiet_new(n, 0, CALLER); }
void* operator new[](std::size_t n, const Quiet&) noexcept { return quiet_new(n, 0, CALLER); }
void* operator new(std::size_t n, Alignment to) {
  return thrown_new(n, static_cast<std::size_t>(to), CALLER);
}
void* operator new[](std::size_t n, Alignment to) {
  return thrown_new(n, static_cast<std::size_t>(to), CALLER);
}
void* operator new(std::size_t n, Alignment to, const Quiet&) noexcept {
  return quiet_new(n, static_cast<std::size_t>(to), CALLER);
}
void* operator new[](std::size_t n, Alignment to, const Quiet&) noexcept {
  return quiet_new(n, static_cast<std::size_t>(to), CALLER);
}

EXPORTED void* malloc(std::size_t bytes) {
  Site* const site = asks(CALLER, false);
  return fails(site) ? failure<void*>(ENOMEM, nullptr) : noted(__libc_malloc(bytes), site);
}
EXPORTED void* realloc(void* data, std::size_t bytes) {
  Site* const site = data ? forgotten(data) : nullptr;
  return noted(__libc_realloc(data, bytes), site);
}
EXPORTED void free(void* data) {
  if (data) forgotten(data);
  __libc_free(data);
}
EXPORTED void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  Site* const site = asks(CALLER, true);
  if (fails(site)) return failure<void*>(ENOMEM, nullptr);
  return noted(__libc_memalign(alignment, bytes), site);
}
EXPORTED int posix_memalign(void** result, std::size_t alignment, std::size_t bytes) {
  Site* const site = asks(CALLER, true);
  void* const data = fails(site) ? nullptr : __libc_memalign(alignment, bytes);
  if (!data) return ENOMEM;
  *result = noted(data, site);
  return 0;
}

EXPORTED void* mmap(void* at, std::size_t bytes, int access, int how, int file, off_t from) {
  const Site* const site = asks(CALLER, false);
  if (fails(site)) return failure<void*>(ENOMEM, MAP_FAILED);
  const auto data = reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, access, how, file, from));
  if (site && data != MAP_FAILED) mapped += static_cast<long>(bytes);
  return data;
}
EXPORTED int munmap(void* at, std::size_t bytes) {
  if (is_watched(reinterpret_cast<Address>(CALLER), false)) mapped -= static_cast<long>(bytes);
  return static_cast<int>(syscall(SYS_munmap, at, bytes));
}

EXPORTED int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                            void* (*run)(void*), void* argument) {
  static auto* const real = next<decltype(pthread_create)>("pthread_create");
  const long most = most_threads;
  if (most < 0) return real(thread, attributes, run, argument);
  if (++living > most) {
    --living;
    failed = true;
    return EAGAIN;
  }
  void* const work = new (__libc_malloc(sizeof(Work))) Work{run, argument};
  return real(thread, attributes, counted, work);
}

#define OPENS(name)                                   \
  EXPORTED int name(const char* path, int how, ...) { \
    va_list rest;                                     \
    va_start(rest, how);                              \
    const mode_t mode = mode_of(how, rest);           \
    va_end(rest);                                     \
    return opened("open", AT_FDCWD, path, how, mode); \
  }
#define OPENS_AT(name)                                        \
  EXPORTED int name(int at, const char* path, int how, ...) { \
    va_list rest;                                             \
    va_start(rest, how);                                      \
    const mode_t mode = mode_of(how, rest);                   \
    va_end(rest);                                             \
    return opened("openat", at, path, how, mode);             \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

EXPORTED FILE* fopen(const char* path, const char* how) {
  return opened_stream("fopen", path, how);
}
EXPORTED FILE* fopen64(const char* path, const char* how) {
  return opened_stream("fopen", path, how);
}

EXPORTED ssize_t write(int file, const void* data, std::size_t bytes) {
  const ssize_t some = is_known(file) ? allowed("write", bytes) : static_cast<ssize_t>(bytes);
  return some < 0 ? some : syscall(SYS_write, file, data, some);
}
EXPORTED ssize_t read(int file, void* data, std::size_t bytes) {
  const ssize_t some = is_known(file) ? allowed("read", bytes) : static_cast<ssize_t>(bytes);
  return some < 0 ? some : syscall(SYS_read, file, data, some);
}
EXPORTED ssize_t pread(int file, void* data, std::size_t bytes, off_t from) {
  const ssize_t some = is_known(file) ? allowed("pread", bytes) : static_cast<ssize_t>(bytes);
  return some < 0 ? some : syscall(SYS_pread64, file, data, some, from);
}
EXPORTED ssize_t pread64(int file, void* data, std::size_t bytes, off64_t from) {
  return pread(file, data, bytes, from);
}
EXPORTED ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t to) {
  const ssize_t some = is_known(file) ? allowed("pwrite", bytes) : static_cast<ssize_t>(bytes);
  return some < 0 ? some : syscall(SYS_pwrite64, file, data, some, to);
}
EXPORTED ssize_t pwrite64(int file, const void* data, std::size_t bytes, off64_t to) {
  return pwrite(file, data, bytes, to);
}
// A short one writes its first part alone.
EXPORTED ssize_t writev(int file, const iovec* parts, int count) {
  const int error = is_known(file) ? verdict("writev") : 0;
  if (error > 0) return failure<ssize_t>(error, -1);
  return syscall(SYS_writev, file, parts, error == kShort ? 1 : count);
}
EXPORTED std::size_t fread(void* data, std::size_t size, std::size_t count, FILE* file) {
  static auto* const real = next<decltype(fread)>("fread");
  if (const int error = is_known(fileno(file)) ? verdict("fread") : 0; error != 0) {
    return error > 0 ? failure<std::size_t>(error, 0) : real(data, size, count / 2, file);
  }
  return real(data, size, count, file);
}

EXPORTED int rename(const char* from, const char* to) {
  const int error = is_below(to) ? verdict("rename") : 0;
  return error > 0 ? failure(error, -1) : static_cast<int>(syscall(SYS_rename, from, to));
}
EXPORTED int fsync(int file) {
  const int error = is_known(file) ? verdict("fsync") : 0;
  return error > 0 ? failure(error, -1) : static_cast<int>(syscall(SYS_fsync, file));
}
EXPORTED int fdatasync(int file) {
  const int error = is_known(file) ? verdict("fdatasync") : 0;
  return error > 0 ? failure(error, -1) : static_cast<int>(syscall(SYS_fdatasync, file));
}
EXPORTED int ftruncate(int file, off_t size) {
  const int error = is_known(file) ? verdict("ftruncate") : 0;
  return error > 0 ? failure(error, -1) : static_cast<int>(syscall(SYS_ftruncate, file, size));
}
EXPORTED int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }
EXPORTED int mkdir(const char* path, mode_t mode) {
  const int error = is_below(path) ? verdict("mkdir") : 0;
  return error > 0 ? failure(error, -1) : static_cast<int>(syscall(SYS_mkdir, path, mode));
}

// The system closes a file whatever it says of the last bytes.
EXPORTED int close(int file) {
  const int error = is_known(file) ? verdict("close") : 0;
  noted_file(file, false);
  const int result = static_cast<int>(syscall(SYS_close, file));
  return error > 0 ? failure(error, -1) : result;
}
EXPORTED int fclose(FILE* file) {
  static auto* const real = next<decltype(fclose)>("fclose");
  const int error = is_known(fileno(file)) ? verdict("fclose") : 0;
  noted_file(fileno(file), false);
  const int result = real(file);
  return error > 0 ? failure(error, EOF) : result;
}
