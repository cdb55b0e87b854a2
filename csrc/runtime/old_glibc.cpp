// What keeps a module that was built on a new system loadable on an old one.
//
// The linker takes the newest version of each symbol of glibc, and the module then asks for that
// glibc. These few are the ones newer than 2.28, which manylinux_2_28 allows; CMakeLists.txt has
// the linker send calls of f to __wrap_f. `auditwheel` tells when another is needed.
#include <sys/stat.h>

// The newer versions of these only leave out error handlers of System V; the values are the same.
#define TORCH_BLOCKED_OLD(name, version) __asm__(".symver old_" #name ", " #name "@GLIBC_" #version)

extern "C" {

TORCH_BLOCKED_OLD(exp, 2.2.5);
TORCH_BLOCKED_OLD(exp2, 2.2.5);
TORCH_BLOCKED_OLD(log, 2.2.5);
TORCH_BLOCKED_OLD(log2, 2.2.5);
TORCH_BLOCKED_OLD(pow, 2.2.5);

double old_exp(double);
double old_exp2(double);
double old_log(double);
double old_log2(double);
double old_pow(double, double);
int __fxstat(int version, int file, struct stat* result);

double __wrap_exp(double x) { return old_exp(x); }
double __wrap_exp2(double x) { return old_exp2(x); }
double __wrap_log(double x) { return old_log(x); }
double __wrap_log2(double x) { return old_log2(x); }
double __wrap_pow(double x, double y) { return old_pow(x, y); }
// Until 2.33 fstat was an inline function that called this one.
int __wrap_fstat(int file, struct stat* result) { return __fxstat(1, file, result); }

// Since 2.32 libstdc++ asks whether a shared_ptr may count without atomics. A process with torch in
// it has threads.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

}  // extern "C"
