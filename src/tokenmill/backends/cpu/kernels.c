/* Chooses the variant for this machine, and does what is the same on all of them. */
#include "kernels.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "lanes.h"

typedef struct {
    const char *name;
    size_t (*scratch_bytes)(const tm_decoder *, int32_t);
    size_t (*product_bytes)(const tm_matrix *, int32_t);
    void (*run)(const tm_decoder *, const tm_step *, float *, void *, tm_pool *);
    void (*product)(const tm_matrix *, const float *, int32_t, float *, void *, tm_pool *);
    void (*norm)(const float *, const float *, float, int32_t, int32_t, float *);
    size_t (*sample_bytes)(int32_t, const tm_pool *);
    void (*sample)(const tm_sampling *, void *, tm_pool *);
    int64_t (*peak)(int32_t);
} variant;

#define DECLARE(v)                                                                              \
    size_t tm_scratch_bytes_##v(const tm_decoder *, int32_t);                                   \
    size_t tm_product_bytes_##v(const tm_matrix *, int32_t);                                    \
    void tm_run_##v(const tm_decoder *, const tm_step *, float *, void *, tm_pool *);           \
    void tm_product_##v(const tm_matrix *, const float *, int32_t, float *, void *, tm_pool *); \
    void tm_norm_##v(const float *, const float *, float, int32_t, int32_t, float *);           \
    size_t tm_sample_bytes_##v(int32_t, const tm_pool *);                                       \
    void tm_sample_##v(const tm_sampling *, void *, tm_pool *);                                 \
    int64_t tm_peak_##v(int32_t);                                                               \
    static const variant v = {#v,          tm_scratch_bytes_##v, tm_product_bytes_##v, tm_run_##v,    tm_product_##v, \
                              tm_norm_##v, tm_sample_bytes_##v,  tm_sample_##v,        tm_peak_##v};
#define ADDRESS(v) &v,

/* TM_VARIANTS(X): those that were compiled, the fastest first (build.py). */
TM_VARIANTS(DECLARE)
static const variant *const VARIANTS[] = {TM_VARIANTS(ADDRESS)};

static int can_use(const variant *v) {
    if (strcmp(v->name, "plain") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(v->name, "avx512vnni") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
    unsigned a, b, c, d; /* older compilers do not know "f16c" by its name */
    int has_halves = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (strcmp(v->name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_halves;
#elif defined(__aarch64__) && defined(__linux__)
    if (strcmp(v->name, "neon") == 0) return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP: dot products of bytes */
#elif defined(__aarch64__)
    if (strcmp(v->name, "neon") == 0) return 1; /* every Apple processor has them */
#endif
    return 0;
}

static const variant *_Atomic chosen = NULL;

static const variant *use(void) {
    const variant *found = chosen;
    for (size_t i = 0; found == NULL; i++)
        if (can_use(VARIANTS[i])) chosen = found = VARIANTS[i];
    return found;
}

#ifndef TM_SOURCES
#define TM_SOURCES "unknown"
#endif

const char *tm_sources(void) { return TM_SOURCES; }

int32_t tm_size_of(const char *structure) {
    if (strcmp(structure, "matrix") == 0) return (int32_t)sizeof(tm_matrix);
    if (strcmp(structure, "layer") == 0) return (int32_t)sizeof(tm_layer);
    if (strcmp(structure, "decoder") == 0) return (int32_t)sizeof(tm_decoder);
    if (strcmp(structure, "draw") == 0) return (int32_t)sizeof(tm_draw);
    if (strcmp(structure, "sampling") == 0) return (int32_t)sizeof(tm_sampling);
    return strcmp(structure, "step") == 0 ? (int32_t)sizeof(tm_step) : 0;
}

const char *tm_variant(void) { return use()->name; }

int32_t tm_use(const char *name) {
    for (size_t i = 0; i < sizeof VARIANTS / sizeof *VARIANTS; i++)
        if (strcmp(VARIANTS[i]->name, name) == 0 && can_use(VARIANTS[i])) {
            chosen = VARIANTS[i];
            return 1;
        }
    return 0;
}

size_t tm_scratch_bytes(const tm_decoder *d, int32_t n) { return use()->scratch_bytes(d, n); }
size_t tm_product_bytes(const tm_matrix *m, int32_t n) { return use()->product_bytes(m, n); }

void tm_run(const tm_decoder *d, const tm_step *step, float *x, void *scratch, tm_pool *pool) {
    use()->run(d, step, x, scratch, pool);
}

void tm_product(const tm_matrix *m, const float *x, int32_t n, float *y, void *scratch, tm_pool *pool) {
    use()->product(m, x, n, y, scratch, pool);
}

size_t tm_sample_bytes(int32_t vocab, const tm_pool *pool) { return use()->sample_bytes(vocab, pool); }
void tm_sample(const tm_sampling *step, void *memory, tm_pool *pool) { use()->sample(step, memory, pool); }

void tm_norm(const float *x, const float *weight, float eps, int32_t n, int32_t width, float *y) {
    use()->norm(x, weight, eps, n, width, y);
}

void tm_copy_blocks(const uintptr_t *arrays, const size_t *block_bytes, int32_t num_arrays, const int32_t *from,
    const int32_t *to, int32_t count) {
    for (int32_t a = 0; a < num_arrays; a++)
        for (int32_t i = 0; i < count; i++) {
            uint8_t *cells = (uint8_t *)arrays[a];
            memcpy(cells + block_bytes[a] * (size_t)to[i], cells + block_bytes[a] * (size_t)from[i], block_bytes[a]);
        }
}

int64_t tm_peak(int32_t rounds) { return use()->peak(rounds); }
