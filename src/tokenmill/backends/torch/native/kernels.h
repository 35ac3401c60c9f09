/* The kernels' plain C interface: a quantised decoder on the CPU.
 *
 * Weights are 4-bit or 8-bit numbers in groups of 32 inputs, each group with a scale (and 4-bit ones with a minimum);
 * activations are float32, rounded to 8 bits by groups of 32 for each product. Everything about a token depends on
 * that token and on what it sees, in an order that does not depend on what else is in the step: results are the same
 * alone and in any crowd, for any number of threads.
 */
#ifndef TOKENMILL_KERNELS_H
#define TOKENMILL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define TM_GROUP 32 /* inputs that share a scale */
#define TM_ROWS 16  /* outputs that are stored side by side */

enum { TM_INT4 = 4, TM_INT8 = 8 };
enum { TM_SILU = 0, TM_GELU_TANH = 1 };

/* Bytes of 16 rows x 32 columns: numbers, scales, minima. */
#define TM_INT4_BLOCK (TM_ROWS * TM_GROUP / 2 + 2 * 2 * TM_ROWS)
#define TM_INT8_BLOCK (TM_ROWS * TM_GROUP + 2 * TM_ROWS)

typedef struct tm_pool tm_pool;

/* Threads that wait without burning: they spin for a few microseconds, then sleep. */
tm_pool *tm_pool_new(int32_t num_threads);
void tm_pool_free(tm_pool *pool);

/* A matrix of weights [rows, cols]; blocks of 16 rows, in each of them all groups of columns. */
typedef struct {
    const uint8_t *blocks;
    const float *bias; /* [rows], or NULL */
    int32_t kind;
    int32_t rows;
    int32_t cols;
} tm_matrix;

typedef struct {
    tm_matrix qkv, o, gate_up, down;
    const float *attn_norm, *mlp_norm;           /* [hidden], before attention and MLP, or NULL */
    const float *attn_post_norm, *mlp_post_norm; /* [hidden], of what they add to x, or NULL */
    const float *q_norm, *k_norm; /* [head_dim]; with whole_norms of all heads, [heads * head_dim]; or NULL */
    int32_t window;               /* positions a token sees, itself included; 0: all */
    int32_t rope;                 /* which of the step's rotations; -1: none */
    int32_t whole_norms;
    int32_t activation;
    float scale;          /* of attention scores; 0: 1 / sqrt(head_dim) */
    float softcap;        /* of attention scores; 0: none */
    float residual_scale; /* of what attention and MLP add to x */
} tm_layer;

typedef struct {
    const tm_layer *layers;
    int32_t num_layers, hidden, inner, num_heads, num_kv_heads, head_dim;
    int32_t rope_dim; /* dimensions of a head that are rotated: the first ones */
    float eps;
} tm_decoder;

/* One step: tokens of any sequences, and where their keys and values are. */
typedef struct {
    int32_t num_tokens;
    int32_t num_runs;
    const int32_t *order; /* [tokens]: by sequence, then by position */
    const int32_t *begin; /* [runs + 1]: where in `order` the tokens of each sequence begin */
    const int32_t *seq;   /* [runs]: its row in the tables */
    const int32_t *pos;   /* [tokens] */
    const int64_t *slot;  /* [tokens]: the cell for its key and value */
    const float *cos, *sin; /* [rotations, tokens, rope_dim / 2] */
    const int32_t *table;   /* [sequences, table_width]: blocks */
    const int32_t *base, *start; /* [sequences]: the first cell's position; the first position held */
    int32_t table_width, block_size;
    uint16_t *const *keys, *const *values; /* [layers] -> [cells, kv heads, head_dim], in half precision */
} tm_step;

/* A hash of the sources it was built from; and how large "matrix", "layer", "decoder" and "step" are. */
const char *tm_sources(void);
int32_t tm_size_of(const char *structure);

/* "avx512vnni", "avx2" or "plain": what this machine can do; `tm_use` chooses another one (for tests), 0 if it can't. */
const char *tm_variant(void);
int32_t tm_use(const char *variant);

/* Bytes of scratch memory for `tm_run` or `tm_product` with so many tokens. */
size_t tm_scratch_bytes(const tm_decoder *decoder, int32_t num_tokens);
size_t tm_product_bytes(const tm_matrix *matrix, int32_t num_rows);

/* All layers: x [tokens, hidden] is what goes in and what comes out. */
void tm_run(const tm_decoder *decoder, const tm_step *step, float *x, void *scratch, tm_pool *pool);

/* y [n, rows] = x [n, cols] times the matrix, plus its bias. */
void tm_product(const tm_matrix *matrix, const float *x, int32_t n, float *y, void *scratch, tm_pool *pool);

/* y [n, hidden]: x, each row divided by its root mean square, times the weights. */
void tm_norm(const float *x, const float *weight, float eps, int32_t n, int32_t width, float *y);

/* y [n, cols]: some rows of a matrix, as float32. */
void tm_rows(const tm_matrix *matrix, const int64_t *rows, int32_t n, float *y);

/* Numbers [rows, cols] (0 to 15, or signed bytes), scales and minima [rows, cols / 32], rounded up, into blocks. */
void tm_pack_int4(const uint8_t *q, const float *scale, const float *min, int32_t rows, int32_t cols, uint8_t *blocks);
void tm_pack_int8(const int8_t *q, const float *scale, int32_t rows, int32_t cols, uint8_t *blocks);

#endif
