/* flock() that is refused, with ENOLCK, for files under the folder named by NO_FLOCK_UNDER. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int flock(int fd, int operation) {
    static int (*real)(int, int);
    const char *under = getenv("NO_FLOCK_UNDER");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (under && !strncmp(path, under, strlen(under))) {
        errno = ENOLCK;
        return -1;
    }
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "flock");
    return real(fd, operation);
}
