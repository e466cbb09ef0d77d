// A handler of NumPy's allocator API whose k-th allocation fails, once.

#include <stdint.h>
#include <stdlib.h>

// A scalar gets memory even where arrays do not. Units: bytes
#define SMALL 64

long allocations, fails_at;

static int fails(size_t size) { return size > SMALL && ++allocations == fails_at; }

static void *get(void *context, size_t size) {
    return fails(size) ? NULL : malloc(size);
}

static void *get_zeros(void *context, size_t count, size_t size) {
    return fails(count * size) ? NULL : calloc(count, size);
}

static void *resize(void *context, void *old, size_t size) {
    return fails(size) ? NULL : realloc(old, size);
}

static void give_back(void *context, void *old, size_t size) { free(old); }

struct {
    char name[127];
    uint8_t version;
    void *context;
    void *(*get)(void *, size_t);
    void *(*get_zeros)(void *, size_t, size_t);
    void *(*resize)(void *, void *, size_t);
    void (*give_back)(void *, void *, size_t);
} handler = {"failing", 1, NULL, get, get_zeros, resize, give_back};
