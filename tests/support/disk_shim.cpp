// A library to preload: logs a process's changes to the files below a folder, and lets a test make
// that disk full, slow or bad. Linux, glibc.
//
// DISK_SHIM_ROOT    the folder; calls for other files are passed through
// DISK_SHIM_LOG     the log, see disk_log.py for its records; without it nothing is logged
// DISK_SHIM_CONTROL a file of four 64-bit numbers, which the test writes while the process runs:
//                   [0] not 0: writes and syncs wait; [1] bytes left, -1 for no bound;
//                   [2] the number of next syncs that fail with EIO; [3] the number of waiting
//                   calls (written by this library)

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

char root[PATH_MAX];
size_t root_length = 0;
int log_descriptor = -1;
volatile int64_t* control = nullptr;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

__attribute__((constructor)) void begin() {
  const char* folder = getenv("DISK_SHIM_ROOT");
  if (!folder || !realpath(folder, root)) return;
  root_length = strlen(root);
  if (const char* path = getenv("DISK_SHIM_LOG"))
    log_descriptor = real<int (*)(const char*, int, ...)>("open")(
        path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (const char* path = getenv("DISK_SHIM_CONTROL")) {
    int descriptor = real<int (*)(const char*, int, ...)>("open")(path, O_RDWR | O_CLOEXEC);
    void* mapped = mmap(nullptr, 32, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped != MAP_FAILED) control = static_cast<int64_t*>(mapped);
    close(descriptor);
  }
}

bool inside(const char* path) {
  return root_length && !strncmp(path, root, root_length) &&
         (path[root_length] == '/' || !path[root_length]);
}

// The path of an open file below the root; false for any other descriptor.
bool path_of(int descriptor, char* path) {
  if (!root_length) return false;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < 0) return false;
  path[length] = 0;
  return inside(path);
}

// The absolute path of a name; its last part need not exist.
bool absolute(const char* name, char* path) {
  char copy[PATH_MAX], folder[PATH_MAX];
  snprintf(copy, sizeof copy, "%s", name);
  char* slash = strrchr(copy, '/');
  const char* last = slash ? slash + 1 : copy;
  if (slash == copy) return false;
  if (slash) *slash = 0;
  if (!realpath(slash ? copy : ".", folder)) return false;
  if (snprintf(path, PATH_MAX, "%s/%s", folder, last) >= PATH_MAX) return false;
  return inside(path);
}

uint64_t inode_of(int descriptor) {
  struct stat found;
  return fstat(descriptor, &found) ? 0 : found.st_ino;
}

int64_t size_of(int descriptor) {
  struct stat found;
  return fstat(descriptor, &found) ? 0 : found.st_size;
}

// A record: the kind, two numbers, and bytes.
void record(char what, uint64_t first, uint64_t second, const void* data, size_t length) {
  if (log_descriptor < 0) return;
  struct __attribute__((packed)) {
    char what;
    uint64_t first, second;
    uint32_t length;
  } head = {what, first, second, static_cast<uint32_t>(length)};
  struct iovec parts[2] = {{&head, sizeof head}, {const_cast<void*>(data), length}};
  pthread_mutex_lock(&lock);
  if (writev(log_descriptor, parts, 2) < 0) abort();
  pthread_mutex_unlock(&lock);
}

void wait_for_disk() {
  if (!control || !control[0]) return;
  __atomic_add_fetch(const_cast<int64_t*>(&control[3]), 1, __ATOMIC_SEQ_CST);
  while (control[0]) usleep(500);
  __atomic_sub_fetch(const_cast<int64_t*>(&control[3]), 1, __ATOMIC_SEQ_CST);
}

// Takes room for the growth of a file by a write; false if the disk is full.
bool take_room(int64_t more) {
  if (!control || control[1] < 0 || more <= 0) return true;
  if (control[1] < more) return false;
  control[1] = control[1] - more;
  return true;
}

void give_room(int64_t less) {
  if (control && control[1] >= 0 && less > 0) control[1] = control[1] + less;
}

bool sync_fails() {
  if (!control || control[2] <= 0) return false;
  control[2] = control[2] - 1;
  errno = EIO;
  return true;
}

int synced(int descriptor, const char* name) {
  char path[PATH_MAX];
  auto function = real<int (*)(int)>(name);
  if (!path_of(descriptor, path)) return function(descriptor);
  wait_for_disk();
  if (sync_fails()) return -1;
  int result = function(descriptor);
  struct stat found;
  if (!result && !fstat(descriptor, &found)) {
    if (S_ISDIR(found.st_mode))
      record('D', 0, 0, path, strlen(path));
    else
      record('S', found.st_ino, 0, nullptr, 0);
  }
  return result;
}

ssize_t written(int descriptor, const void* data, size_t count, off64_t offset, const char* name) {
  char path[PATH_MAX];
  auto function = real<ssize_t (*)(int, const void*, size_t, off64_t)>(name);
  if (!path_of(descriptor, path)) return function(descriptor, data, count, offset);
  wait_for_disk();
  if (!take_room(offset + static_cast<int64_t>(count) - size_of(descriptor))) {
    errno = ENOSPC;
    return -1;
  }
  ssize_t result = function(descriptor, data, count, offset);
  if (result > 0) record('W', inode_of(descriptor), offset, data, result);
  return result;
}

int truncated(int descriptor, off64_t length, const char* name) {
  char path[PATH_MAX];
  auto function = real<int (*)(int, off64_t)>(name);
  if (!path_of(descriptor, path)) return function(descriptor, length);
  int64_t before = size_of(descriptor);
  int result = function(descriptor, length);
  if (!result) {
    give_room(before - length);
    record('T', inode_of(descriptor), length, nullptr, 0);
  }
  return result;
}

int opened(const char* name, int flags, mode_t mode, const char* symbol) {
  int descriptor = real<int (*)(const char*, int, ...)>(symbol)(name, flags, mode);
  char path[PATH_MAX];
  if (descriptor >= 0 && (flags & O_CREAT) && path_of(descriptor, path))
    record('O', inode_of(descriptor), (flags & O_TRUNC) != 0, path, strlen(path));
  return descriptor;
}

}  // namespace

extern "C" {

// Called by the process itself: adds a mark to the log.
void disk_shim_mark(const char* text, size_t length) { record('M', 0, 0, text, length); }

#define OPEN(name)                                  \
  int name(const char* path, int flags, ...) {      \
    va_list rest;                                   \
    va_start(rest, flags);                          \
    mode_t mode = va_arg(rest, mode_t);             \
    va_end(rest);                                   \
    return opened(path, flags, mode, #name);        \
  }
OPEN(open)
OPEN(open64)

int fsync(int descriptor) { return synced(descriptor, "fsync"); }
int fdatasync(int descriptor) { return synced(descriptor, "fdatasync"); }

ssize_t pwrite(int descriptor, const void* data, size_t count, off_t offset) {
  return written(descriptor, data, count, offset, "pwrite");
}
ssize_t pwrite64(int descriptor, const void* data, size_t count, off64_t offset) {
  return written(descriptor, data, count, offset, "pwrite64");
}
int ftruncate(int descriptor, off_t length) { return truncated(descriptor, length, "ftruncate"); }
int ftruncate64(int descriptor, off64_t length) {
  return truncated(descriptor, length, "ftruncate64");
}

int posix_fallocate(int descriptor, off_t offset, off_t length) {
  char path[PATH_MAX];
  if (path_of(descriptor, path) && !take_room(offset + length - size_of(descriptor))) return ENOSPC;
  return real<int (*)(int, off_t, off_t)>("posix_fallocate")(descriptor, offset, length);
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t length) {
  char path[PATH_MAX];
  if (path_of(descriptor, path) && !take_room(offset + length - size_of(descriptor))) return ENOSPC;
  return real<int (*)(int, off64_t, off64_t)>("posix_fallocate64")(descriptor, offset, length);
}

int unlink(const char* name) {
  char path[PATH_MAX];
  bool mine = absolute(name, path);
  struct stat found;
  int64_t size = mine && !stat(path, &found) ? found.st_size : 0;
  int result = real<int (*)(const char*)>("unlink")(name);
  if (!result && mine) {
    give_room(size);
    record('U', 0, 0, path, strlen(path));
  }
  return result;
}

int mkdir(const char* name, mode_t mode) {
  char path[PATH_MAX];
  int result = real<int (*)(const char*, mode_t)>("mkdir")(name, mode);
  if (!result && absolute(name, path)) record('K', 0, 0, path, strlen(path));
  return result;
}

int rename(const char* from, const char* to) {
  char paths[2 * PATH_MAX], target[PATH_MAX];
  bool mine = absolute(from, paths) && absolute(to, target);
  int result = real<int (*)(const char*, const char*)>("rename")(from, to);
  if (!result && mine) {
    size_t first = strlen(paths);
    memcpy(paths + first + 1, target, strlen(target));
    record('R', first, 0, paths, first + 1 + strlen(target));
  }
  return result;
}

}  // extern "C"
