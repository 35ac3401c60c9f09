/* A disk of limited size, for LD_PRELOAD: no file under $FULL_DISK_DIRECTORY grows once all of them together have as many
   bytes as the file $FULL_DISK_LIMIT says. Writes that fit nowhere fail with ENOSPC, as a file system's do. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *directory(void) { return getenv("FULL_DISK_DIRECTORY"); }

static long long capacity(void) {
    long long bytes = LLONG_MAX;
    FILE *file = fopen(getenv("FULL_DISK_LIMIT"), "r");
    if (file != NULL) {
        if (fscanf(file, "%lld", &bytes) != 1) bytes = LLONG_MAX;
        fclose(file);
    }
    return bytes;
}

static long long used(void) {
    long long sum = 0;
    DIR *entries = opendir(directory());
    for (struct dirent *entry; entries != NULL && (entry = readdir(entries)) != NULL;) {
        struct stat about;
        if (fstatat(dirfd(entries), entry->d_name, &about, 0) == 0 && S_ISREG(about.st_mode)) sum += about.st_size;
    }
    if (entries != NULL) closedir(entries);
    return sum;
}

/* Would the file be too long for the disk if it ended there? */
static int is_full(int file, long long end) {
    char link[64], path[PATH_MAX];
    struct stat about;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || directory() == NULL || strncmp(path, directory(), strlen(directory())) != 0) return 0;
    return fstat(file, &about) == 0 && end > about.st_size && used() + end - about.st_size > capacity();
}

static int refuse(void) {
    errno = ENOSPC;
    return -1;
}

ssize_t write(int file, const void *data, size_t size) {
    off_t at = lseek(file, 0, SEEK_CUR);
    return at >= 0 && is_full(file, at + (long long)size) ? refuse() : NEXT(write)(file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return is_full(file, at + (long long)size) ? refuse() : NEXT(pwrite)(file, data, size, at);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return is_full(file, at + (long long)size) ? refuse() : NEXT(pwrite64)(file, data, size, at);
}

int ftruncate(int file, off_t size) { return is_full(file, size) ? refuse() : NEXT(ftruncate)(file, size); }

int ftruncate64(int file, off64_t size) { return is_full(file, size) ? refuse() : NEXT(ftruncate64)(file, size); }

int posix_fallocate(int file, off_t at, off_t size) {
    return is_full(file, at + size) ? ENOSPC : NEXT(posix_fallocate)(file, at, size);
}

int posix_fallocate64(int file, off64_t at, off64_t size) {
    return is_full(file, at + size) ? ENOSPC : NEXT(posix_fallocate64)(file, at, size);
}

int statvfs(const char *path, struct statvfs *about) {
    int failed = NEXT(statvfs)(path, about);
    long long left = capacity() - used();
    if (failed == 0 && directory() != NULL && strncmp(path, directory(), strlen(directory())) == 0)
        about->f_bavail = about->f_bfree = left < 0 ? 0 : left / about->f_frsize;
    return failed;
}

int statvfs64(const char *path, struct statvfs64 *about) {
    return statvfs(path, (struct statvfs *)about);
}
