/* Reads of *.safetensors below FAILING fail with ERRNO after COUNT of them, as those of a server that is gone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int calls;

static int fails(int file) {
    char link[64], path[4096];
    const char *folder = getenv("FAILING");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || !folder) return 0;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) || !strstr(path, ".safetensors")) return 0;
    if (__sync_fetch_and_add(&calls, 1) < atoi(getenv("COUNT"))) return 0;
    errno = atoi(getenv("ERRNO"));
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int file, void *data, size_t size) {
    return fails(file) ? -1 : NEXT(read)(file, data, size);
}

ssize_t pread(int file, void *data, size_t size, off_t at) {
    return fails(file) ? -1 : NEXT(pread)(file, data, size, at);
}

ssize_t pread64(int file, void *data, size_t size, off64_t at) {
    return fails(file) ? -1 : NEXT(pread64)(file, data, size, at);
}

ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *to_at, size_t size, unsigned flags) {
    return fails(from) ? -1 : NEXT(copy_file_range)(from, at, to, to_at, size, flags);
}
