/* The kernels' plain C interface: a quantized decoder on the CPU.
 *
 * Weights are in the types of GGUF files, value for value (blocks.h); activations are float32, rounded to 8 bits for each
 * product, by groups of 32, or of 256 for types with superblocks. Everything about a token depends on that token and on
 * what it sees, in an order that does not depend on what else is in the step: results are the same alone and in any
 * crowd, for any number of threads.
 */
#ifndef TOKENMILL_KERNELS_H
#define TOKENMILL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define TM_GROUP 32 /* inputs that share a scale */
#define TM_ROWS 16  /* outputs that are stored side by side */

/* Types of weights, under the numbers that they have in GGUF files. */
enum {
    TM_Q4_0 = 2, TM_Q4_1 = 3, TM_Q5_0 = 6, TM_Q5_1 = 7, TM_Q8_0 = 8,
    TM_Q2_K = 10, TM_Q3_K = 11, TM_Q4_K = 12, TM_Q5_K = 13, TM_Q6_K = 14, TM_IQ4_NL = 20, TM_IQ4_XS = 23,
};
enum { TM_SILU = 0, TM_GELU_TANH = 1 };

/* How keys and values are stored: in half precision; or a head of a token as signed bytes, followed by their scale, a float. */
enum { TM_KV_HALF = 0, TM_KV_INT8 = 1 };

typedef struct tm_pool tm_pool;

/* Threads that wait without burning: they spin for a few microseconds, then sleep. */
tm_pool *tm_pool_new(int32_t num_threads);
void tm_pool_free(tm_pool *pool);

/* A matrix of weights [rows, cols]; blocks of 16 rows, in each of them all groups of columns. */
typedef struct {
    const uint8_t *blocks;
    const float *bias; /* [rows], or NULL */
    int32_t kind;      /* its type */
    int32_t rows;
    int32_t cols;
} tm_matrix;

typedef struct {
    tm_matrix q, k, v, o, gate, up, down; /* q may have the rows of k and v, too, and gate those of up: no rows then */
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
    void *const *keys, *const *values; /* [layers] -> [cells, kv heads, head_dim] */
    int32_t kv_dtype;
} tm_step;

/* One draw, as `tokenmill.contract.draws.DRAW` has it. */
typedef struct {
    int64_t seed, choice, attempt, position; /* the key of its random numbers */
    int64_t top_k, num_prompt;
    float temperature, top_p, min_p, typical_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
    float xtc_probability, xtc_threshold;
    int32_t num_logprobs; /* -1: none */
    int32_t is_filtered, has_penalties;
} tm_draw;

/* Tokens of each row: those of row i from begin[i] to begin[i + 1]; begin is NULL where no row has any. */
typedef struct {
    const int64_t *begin;
    const int32_t *token;
    const float *value;
} tm_tokens;

typedef struct {
    const float *logits;  /* [rows, vocab] */
    const tm_draw *draws; /* [rows] */
    const uint32_t *mask; /* [rows, mask_words] bits, or NULL: all is allowed */
    tm_tokens allowed, edits, history, taxes;
    int32_t *ids;                           /* [rows]; what can't be drawn is left as it is, and so are its logprobs */
    float *logprob, *top_logprobs;          /* [rows], [rows, num_logprobs] */
    int32_t *top_ids;
    int32_t num_rows, vocab, mask_words, num_logprobs;
} tm_sampling;

/* A hash of the sources it was built from; and how large its structures are, by their names without "tm_". */
const char *tm_sources(void);
int32_t tm_size_of(const char *structure);

/* "avx512vnni", "avx2", "neon" or "plain": what this machine can do; `tm_use` chooses another one (for tests), 0 if it can't. */
const char *tm_variant(void);
int32_t tm_use(const char *variant);

/* Bytes of scratch memory for `tm_run` or `tm_product` with so many tokens. */
size_t tm_scratch_bytes(const tm_decoder *decoder, int32_t num_tokens);
size_t tm_product_bytes(const tm_matrix *matrix, int32_t num_rows);

/* All layers: x [tokens, hidden] is what goes in and what comes out. */
void tm_run(const tm_decoder *decoder, const tm_step *step, float *x, void *scratch, tm_pool *pool);

/* y [n, rows] = x [n, cols] times the matrix, plus its bias. */
void tm_product(const tm_matrix *matrix, const float *x, int32_t n, float *y, void *scratch, tm_pool *pool);

/* Keys and values of blocks: from[i] to to[i], in each of so many arrays, of so many bytes a block. */
void tm_copy_blocks(const uintptr_t *arrays, const size_t *block_bytes, int32_t num_arrays, const int32_t *from,
    const int32_t *to, int32_t count);

/* An id for each row of logits; memory: as many bytes as `tm_sample_bytes` says. */
size_t tm_sample_bytes(int32_t vocab, const tm_pool *pool);
void tm_sample(const tm_sampling *step, void *memory, tm_pool *pool);

/* y [n, hidden]: x, each row divided by its root mean square, times the weights. */
void tm_norm(const float *x, const float *weight, float eps, int32_t n, int32_t width, float *y);

/* Products of bytes as fast as this machine can do them, so many rounds; how many operations those were, a multiplication
 * and an addition each. */
int64_t tm_peak(int32_t rounds);

/* y [n, cols]: some rows of a matrix, as float32. */
void tm_rows(const tm_matrix *matrix, const int64_t *rows, int32_t n, float *y);

/* Bytes of a matrix in blocks; 0 for a type that there are no kernels for. */
size_t tm_matrix_bytes(int32_t kind, int32_t rows, int32_t cols);

/* Rows of a GGUF file's bytes into blocks, in the order given (or as they are: NULL). 0 if a scale is not finite. */
int32_t tm_pack(int32_t kind, const uint8_t *raw, const int64_t *order, int32_t rows, int32_t cols, uint8_t *blocks,
    tm_pool *pool);

/* The same for numbers that were rounded elsewhere, [rows, cols] (0 to 15 as Q4_1, or signed bytes as Q8_0), with scales
 * and minima [rows, cols / 32], rounded up. */
void tm_pack_int4(const uint8_t *q, const float *scale, const float *min, int32_t rows, int32_t cols, uint8_t *blocks);
void tm_pack_int8(const int8_t *q, const float *scale, int32_t rows, int32_t cols, uint8_t *blocks);

#endif
