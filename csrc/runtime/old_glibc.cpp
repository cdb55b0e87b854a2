// Keeps a module that was built on a new system loadable on an old one.
//
// The linker takes the newest version of each glibc symbol, and the module then requires that
// glibc. manylinux_2_28 allows versions up to 2.28; the symbols below have newer ones.
// CMakeLists.txt makes the linker send calls of f to __wrap_f. `auditwheel` tells when another
// symbol is needed.
#include <pthread.h>
#include <sys/stat.h>

// The newer versions of the functions of numbers differ only in that they call no System V error
// handlers: the values are the same. Those of threads are newer only because their library moved.
#define TORCH_BLOCKED_OLD(name, version) __asm__(".symver old_" #name ", " #name "@GLIBC_" #version)

extern "C" {

TORCH_BLOCKED_OLD(exp, 2.2.5);
TORCH_BLOCKED_OLD(exp2, 2.2.5);
TORCH_BLOCKED_OLD(log, 2.2.5);
TORCH_BLOCKED_OLD(log2, 2.2.5);
TORCH_BLOCKED_OLD(pow, 2.2.5);
TORCH_BLOCKED_OLD(pthread_mutex_trylock, 2.2.5);
TORCH_BLOCKED_OLD(pthread_rwlock_rdlock, 2.2.5);
TORCH_BLOCKED_OLD(pthread_rwlock_wrlock, 2.2.5);
TORCH_BLOCKED_OLD(pthread_rwlock_unlock, 2.2.5);

double old_exp(double);
double old_exp2(double);
double old_log(double);
double old_log2(double);
double old_pow(double, double);
int old_pthread_mutex_trylock(pthread_mutex_t*);
int old_pthread_rwlock_rdlock(pthread_rwlock_t*);
int old_pthread_rwlock_wrlock(pthread_rwlock_t*);
int old_pthread_rwlock_unlock(pthread_rwlock_t*);
int __fxstat(int version, int file, struct stat* result);

double __wrap_exp(double x) { return old_exp(x); }
double __wrap_exp2(double x) { return old_exp2(x); }
double __wrap_log(double x) { return old_log(x); }
double __wrap_log2(double x) { return old_log2(x); }
double __wrap_pow(double x, double y) { return old_pow(x, y); }
int __wrap_pthread_mutex_trylock(pthread_mutex_t* m) { return old_pthread_mutex_trylock(m); }
int __wrap_pthread_rwlock_rdlock(pthread_rwlock_t* l) { return old_pthread_rwlock_rdlock(l); }
int __wrap_pthread_rwlock_wrlock(pthread_rwlock_t* l) { return old_pthread_rwlock_wrlock(l); }
int __wrap_pthread_rwlock_unlock(pthread_rwlock_t* l) { return old_pthread_rwlock_unlock(l); }
// Until 2.33 fstat was an inline function that called this one.
int __wrap_fstat(int file, struct stat* result) { return __fxstat(1, file, result); }

// With glibc 2.32 or newer, libstdc++ asks here whether a shared_ptr may count without atomics. It
// may not: a process with torch has threads.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

}  // extern "C"
