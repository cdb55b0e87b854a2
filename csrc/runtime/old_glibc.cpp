// Keeps a module that was built on a new system loadable on an old one.
//
// The linker takes the newest version of each glibc symbol, and the module then requires that
// glibc. manylinux_2_28 allows versions up to 2.28; the symbols below have newer ones.
// CMakeLists.txt makes the linker send calls of f to __wrap_f. `auditwheel` tells when another
// symbol is needed.
#include <sys/stat.h>

// The newer versions of these differ only in that they call no System V error handlers. The values
// are the same.
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

// With glibc 2.32 or newer, libstdc++ asks here whether a shared_ptr may count without atomics. It
// may not: a process with torch has threads.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

}  // extern "C"
