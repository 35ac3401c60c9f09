/* Chooses the variant for this machine, and does what is the same on all of them. */
#include "kernels.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "lanes.h"

typedef struct {
    const char *name;
    size_t (*scratch_bytes)(const tm_decoder *, int32_t);
    size_t (*product_bytes)(const tm_matrix *, int32_t);
    void (*run)(const tm_decoder *, const tm_step *, float *, void *, tm_pool *);
    void (*product)(const tm_matrix *, const float *, int32_t, float *, void *, tm_pool *);
    void (*norm)(const float *, const float *, float, int32_t, int32_t, float *);
} variant;

#define DECLARE(v)                                                                              \
    size_t tm_scratch_bytes_##v(const tm_decoder *, int32_t);                                   \
    size_t tm_product_bytes_##v(const tm_matrix *, int32_t);                                    \
    void tm_run_##v(const tm_decoder *, const tm_step *, float *, void *, tm_pool *);           \
    void tm_product_##v(const tm_matrix *, const float *, int32_t, float *, void *, tm_pool *); \
    void tm_norm_##v(const float *, const float *, float, int32_t, int32_t, float *);           \
    static const variant v = {#v, tm_scratch_bytes_##v, tm_product_bytes_##v, tm_run_##v, tm_product_##v, tm_norm_##v};

DECLARE(plain)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512vnni)
#endif

static int can_use(const variant *v) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (v == &avx512vnni)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
    unsigned a, b, c, d; /* older compilers do not know "f16c" by its name */
    int has_halves = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (v == &avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_halves;
#endif
    return v == &plain;
}

static const variant *const VARIANTS[] = {
#if defined(__x86_64__)
    &avx512vnni, &avx2,
#endif
    &plain,
};

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

void tm_norm(const float *x, const float *weight, float eps, int32_t n, int32_t width, float *y) {
    use()->norm(x, weight, eps, n, width, y);
}

/* -- packing ------------------------------------------------------------------------------------------------------- */

static void put_half(uint8_t *at, float value) {
    uint16_t half = float_to_half(value);
    memcpy(at, &half, 2);
}

void tm_pack_int4(const uint8_t *q, const float *scale, const float *min, int32_t rows, int32_t cols, uint8_t *blocks) {
    int32_t groups = (cols + TM_GROUP - 1) / TM_GROUP;
    for (int32_t b = 0; b * TM_ROWS < rows; b++)
        for (int32_t g = 0; g < groups; g++, blocks += TM_INT4_BLOCK) {
            memset(blocks, 0, TM_INT4_BLOCK);
            for (int32_t r = 0; r < TM_ROWS && b * TM_ROWS + r < rows; r++) {
                size_t row = (size_t)b * TM_ROWS + r;
                for (int32_t i = 0; i < TM_GROUP && g * TM_GROUP + i < cols; i++) {
                    uint8_t value = q[row * cols + g * TM_GROUP + i] & 15;
                    int32_t half = i % 16;
                    blocks[64 * (half / 4) + 4 * r + half % 4] |= (uint8_t)(i < 16 ? value : value << 4);
                }
                put_half(blocks + 256 + 2 * r, scale[row * groups + g]);
                put_half(blocks + 288 + 2 * r, min[row * groups + g]);
            }
        }
}

void tm_pack_int8(const int8_t *q, const float *scale, int32_t rows, int32_t cols, uint8_t *blocks) {
    int32_t groups = (cols + TM_GROUP - 1) / TM_GROUP;
    for (int32_t b = 0; b * TM_ROWS < rows; b++)
        for (int32_t g = 0; g < groups; g++, blocks += TM_INT8_BLOCK) {
            memset(blocks, 128, TM_ROWS * TM_GROUP);
            memset(blocks + 512, 0, 2 * TM_ROWS);
            for (int32_t r = 0; r < TM_ROWS && b * TM_ROWS + r < rows; r++) {
                size_t row = (size_t)b * TM_ROWS + r;
                for (int32_t i = 0; i < TM_GROUP && g * TM_GROUP + i < cols; i++)
                    blocks[64 * (i / 4) + 4 * r + i % 4] = (uint8_t)(q[row * cols + g * TM_GROUP + i] + 128);
                put_half(blocks + 512 + 2 * r, scale[row * groups + g]);
            }
        }
}

void tm_rows(const tm_matrix *m, const int64_t *rows, int32_t n, float *y) {
    int32_t groups = (m->cols + TM_GROUP - 1) / TM_GROUP;
    size_t size = m->kind == TM_INT4 ? TM_INT4_BLOCK : TM_INT8_BLOCK;
    for (int32_t i = 0; i < n; i++) {
        int32_t r = (int32_t)(rows[i] % TM_ROWS);
        const uint8_t *block = m->blocks + (size_t)(rows[i] / TM_ROWS) * groups * size;
        for (int32_t c = 0; c < m->cols; c++) {
            const uint8_t *group = block + (size_t)(c / TM_GROUP) * size;
            int32_t k = c % TM_GROUP, half = k % 16;
            if (m->kind == TM_INT4) {
                uint8_t both = group[64 * (half / 4) + 4 * r + half % 4];
                float value = (float)(k < 16 ? both & 15 : both >> 4);
                y[(size_t)i * m->cols + c] = half_at(group + 256 + 2 * r) * value + half_at(group + 288 + 2 * r);
            } else {
                float value = (float)((int32_t)group[64 * (k / 4) + 4 * r + k % 4] - 128);
                y[(size_t)i * m->cols + c] = half_at(group + 512 + 2 * r) * value;
            }
        }
    }
}
