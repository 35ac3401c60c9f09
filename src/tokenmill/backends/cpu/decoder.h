/* A decoder's layers over paged keys and values. Included once for each kind of machine. */

#define PANEL (1 << 18) /* bytes of rounded inputs that are gone through for each block of weights */
#define QUERIES 8       /* tokens of one sequence that read keys and values together */
#define KEYS 16         /* positions that are scored together: those from a multiple of it on */
#define HEADS 4         /* of those that read the same keys, at a time */
#define WIDE (LANES / 4) /* vectors of values that are added up at a time */
#define MOST_DIM 512    /* of a head */
#define MOST_SHARED 64  /* heads that read the same keys */

/* -- products ------------------------------------------------------------------------------------------------------ */

/* Inputs of a product, rounded: tiles of records, with one record for each group of 32 columns, or of 256. */
typedef struct {
    uint8_t *tiles;
    int32_t n, cols;
    int slabs;
} rounded;

static size_t records_in_row(const rounded *r) { return (size_t)(r->cols + (r->slabs ? 255 : 31)) / (r->slabs ? 256 : 32); }

/* How many inputs the tile of an input has room for. */
static int tile_inputs(const rounded *r, int32_t input) {
    int32_t left = r->n - input / TILE * TILE;
    return left < TILE ? padded((int)left) : TILE;
}

static uint8_t *tile_at(const rounded *r, int32_t input) {
    return r->tiles + (size_t)(input / TILE) * TILE * records_in_row(r) * input_bytes(r->slabs);
}

static size_t rounded_bytes(int32_t n, int32_t cols, int slabs) {
    rounded r = {NULL, n, cols, slabs};
    return ((size_t)(n + TILE - 1) / TILE * TILE * records_in_row(&r) * input_bytes(slabs) + 63) / 64 * 64;
}

/* The same inputs for matrices of both kinds. */
typedef struct {
    rounded groups, slabs;
    int in_groups, in_slabs; /* which are wanted */
} inputs;

typedef struct {
    const tm_matrix *matrices[3];
    int32_t num_matrices;
    const inputs *in;
    float *y;
    int32_t stride; /* of y */
    int adds;       /* to what is in y */
} product;

static int32_t row_blocks(const tm_matrix *m) { return (m->rows + TM_ROWS - 1) / TM_ROWS; }

/* Outputs to where they belong, with their bias, over or upon what is there. */
static inline void put(float *y, const float *out, const float *bias, int32_t count, int adds) {
    if (count == TM_ROWS && bias == NULL) {
        for (int r = 0; r < TM_ROWS; r += LANES) store(y + r, adds ? load(y + r) + load(out + r) : load(out + r));
        return;
    }
    for (int32_t r = 0; r < count; r++) {
        float value = bias == NULL ? out[r] : out[r] + bias[r];
        y[r] = adds ? y[r] + value : value;
    }
}

/* Have the lines that outputs are written to on their way while the products are computed. */
static inline void fetch_outputs(const float *y, int32_t stride, int num, int32_t together) {
    for (int t = 0; t < num; t++)
        for (int32_t k = 0; k < together; k++) __builtin_prefetch(y + (size_t)t * stride + k * TM_ROWS, 1);
}

/* Some blocks of rows of a matrix, whose outputs begin at y. */
static void multiply_blocks(const product *p, const tm_matrix *m, float *y, int32_t first, int32_t last) {
    const rounded *in = has_slabs(m->kind) ? &p->in->slabs : &p->in->groups;
    int32_t blocks = blocks_in_row(m->kind, m->cols), n = in->n;
    size_t stride = (size_t)blocks * block_bytes(m->kind);
    int32_t panel = (int32_t)(PANEL / (records_in_row(in) * input_bytes(in->slabs))) / TILE * TILE;
    if (panel < TILE) panel = TILE;
    float out[ROW_BLOCKS * TILE][TM_ROWS] __attribute__((aligned(64)));
    for (int32_t begin = 0; begin < n; begin += panel) {
        int32_t end = begin + panel < n ? begin + panel : n;
        for (int32_t b = first; b < last; b += ROW_BLOCKS) {
            const uint8_t *weights = m->blocks + (size_t)b * stride;
            int32_t together = last - b < ROW_BLOCKS ? last - b : ROW_BLOCKS;
            for (int32_t i = begin; i < end; i += TILE) {
                int num = end - i < TILE ? (int)(end - i) : TILE;
                float *to = y + (size_t)i * p->stride + b * TM_ROWS;
                fetch_outputs(to, p->stride, num, together);
                /* A block that has no other one beside it has itself: a stride of 0. */
                product_of(m->kind, num)(weights, together < ROW_BLOCKS ? 0 : stride, blocks, tile_at(in, i), out);
                for (int32_t k = 0; k < together; k++) {
                    int32_t row = (b + k) * TM_ROWS, count = m->rows - row < TM_ROWS ? m->rows - row : TM_ROWS;
                    for (int t = 0; t < num; t++)
                        put(to + (size_t)t * p->stride + k * TM_ROWS, out[k * padded(num) + t],
                            m->bias ? m->bias + row : NULL, count, p->adds);
                }
            }
        }
    }
}

static void product_blocks(void *context, int32_t first, int32_t last) {
    const product *p = context;
    float *y = p->y;
    int32_t before = 0;
    for (int32_t i = 0; i < p->num_matrices; i++) {
        const tm_matrix *m = p->matrices[i];
        int32_t begin = first - before, end = last - before, blocks = row_blocks(m);
        if (begin < 0) begin = 0;
        if (end > blocks) end = blocks;
        if (begin < end) multiply_blocks(p, m, y, begin, end);
        before += blocks;
        y += m->rows;
    }
}

/* The products of some matrices with the same inputs, side by side in y. */
static void multiply(product p, tm_pool *pool) {
    int32_t blocks = 0;
    for (int32_t i = 0; i < p.num_matrices; i++) blocks += row_blocks(p.matrices[i]);
    int32_t grain = blocks / (16 * tm_pool_threads(pool)) / ROW_BLOCKS * ROW_BLOCKS;
    tm_parallel(pool, product_blocks, &p, blocks, grain < ROW_BLOCKS ? ROW_BLOCKS : grain);
}

/* Room for inputs of these matrices, in the forms that they want. */
static inputs inputs_at(char *at, int32_t n, int32_t cols, const tm_matrix *const *matrices, int32_t count) {
    inputs in = {{NULL, n, cols, 0}, {NULL, n, cols, 1}, 0, 0};
    for (int32_t i = 0; i < count; i++)
        if (matrices[i]->rows) *(has_slabs(matrices[i]->kind) ? &in.in_slabs : &in.in_groups) = 1;
    in.groups.tiles = (uint8_t *)at;
    in.slabs.tiles = (uint8_t *)at + rounded_bytes(n, cols, 0);
    return in;
}

/* Bytes of inputs in both forms. */
static size_t inputs_bytes(int32_t n, int32_t cols) { return rounded_bytes(n, cols, 0) + rounded_bytes(n, cols, 1); }

/* -- rows of activations ------------------------------------------------------------------------------------------- */

static float root_mean_square_inverse(const float *x, float eps, int32_t width) {
    int32_t i = 0;
    vf total = splat(0);
    for (; i + LANES <= width; i += LANES) {
        vf v = load(x + i);
        total += v * v;
    }
    float squares = sum(total);
    for (; i < width; i++) squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / (float)width + eps);
}

static inline void scale_row(const float *x, const float *weight, float by, int32_t width, float *y) {
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES) store(y + i, load(x + i) * by * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * by * weight[i];
}

/* Add a row, with a norm if there are weights, times a factor. */
static void add_row(const float *row, const float *weight, float eps, float by, int32_t width, float *x) {
    float scale = weight ? root_mean_square_inverse(row, eps, width) * by : by;
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vf v = load(row + i) * scale;
        store(x + i, load(x + i) + (weight ? v * load(weight + i) : v));
    }
    for (; i < width; i++) x[i] += row[i] * scale * (weight ? weight[i] : 1.0f);
}

static void norm_row(const float *x, const float *weight, float eps, int32_t width, float *y) {
    scale_row(x, weight, root_mean_square_inverse(x, eps, width), width, y);
}

typedef struct {
    const float *x, *weight;
    float eps;
    int32_t width;
    const inputs *out;
    int32_t activation;
} row_work;

/* Round a slab of a row, or the rest of the row, to where it belongs. */
static void round_values(const inputs *out, int32_t row, int32_t at, const float *values, int32_t count) {
    float filled[TM_SLAB];
    if (count % TM_GROUP) {
        memset(filled, 0, sizeof filled);
        memcpy(filled, values, (size_t)count * 4);
        values = filled;
    }
    if (out->in_groups) {
        const rounded *r = &out->groups;
        int n = tile_inputs(r, row);
        uint8_t *record = tile_at(r, row) + (size_t)(at / TM_GROUP) * n * GROUP_INPUT;
        quantise_groups(values, (count + TM_GROUP - 1) / TM_GROUP, record, n, row % TILE);
    }
    if (out->in_slabs) {
        const rounded *r = &out->slabs;
        int n = tile_inputs(r, row);
        quantise_slab(values, tile_at(r, row) + (size_t)(at / TM_SLAB) * n * SLAB_INPUT, n, row % TILE);
    }
}

static void round_rows(void *context, int32_t begin, int32_t end) {
    const row_work *w = context;
    for (int32_t i = begin; i < end; i++)
        for (int32_t at = 0; at < w->width; at += TM_SLAB) {
            int32_t count = w->width - at < TM_SLAB ? w->width - at : TM_SLAB;
            round_values(w->out, i, at, w->x + (size_t)i * w->width + at, count);
        }
}

static void norm_and_round(void *context, int32_t begin, int32_t end) {
    const row_work *w = context;
    float values[TM_SLAB];
    for (int32_t i = begin; i < end; i++) {
        const float *x = w->x + (size_t)i * w->width;
        float by = root_mean_square_inverse(x, w->eps, w->width);
        for (int32_t at = 0; at < w->width; at += TM_SLAB) {
            int32_t count = w->width - at < TM_SLAB ? w->width - at : TM_SLAB;
            scale_row(x + at, w->weight + at, by, count, values);
            round_values(w->out, i, at, values, count);
        }
    }
}

/* The tanh approximation of gelu(v) is v / (1 + exp(-GELU_SLOPE * (v + GELU_CUBE * v^3))); silu(v), v / (1 + exp(-v)). */
#define GELU_SLOPE 1.5957691216057308f /* 2 * sqrt(2 / pi) */
#define GELU_CUBE 0.044715f

/* x is [n, 2 * width]: gate and up. */
static void gate_and_round(void *context, int32_t begin, int32_t end) {
    const row_work *w = context;
    float values[TM_SLAB];
    for (int32_t i = begin; i < end; i++) {
        const float *gate = w->x + (size_t)i * 2 * w->width, *up = gate + w->width;
        for (int32_t at = 0; at < w->width; at += TM_SLAB) {
            int32_t count = w->width - at < TM_SLAB ? w->width - at : TM_SLAB;
            for (int32_t k = 0; k < count; k += LANES) { /* the width is a multiple of 16 */
                vf v = load(gate + at + k), slope = v;
                if (w->activation == TM_GELU_TANH) slope = GELU_SLOPE * (v + GELU_CUBE * v * v * v);
                store(values + k, v / (splat(1.0f) + vexp(-slope)) * load(up + at + k));
            }
            round_values(w->out, i, at, values, count);
        }
    }
}

typedef struct {
    const float *rows, *weight;
    float eps, by;
    int32_t width;
    float *x;
} add_work;

static void add_rows(void *context, int32_t begin, int32_t end) {
    const add_work *w = context;
    for (int32_t i = begin; i < end; i++)
        add_row(w->rows + (size_t)i * w->width, w->weight, w->eps, w->by, w->width, w->x + (size_t)i * w->width);
}

#define ROW_GRAIN TILE /* so few rows are not worth waking anybody; and two threads never write to one tile of inputs */

/* -- attention ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t run, first, count;
} tile; /* tokens of one sequence, one after the other */

typedef struct {
    const tm_decoder *decoder;
    const tm_layer *layer;
    const tm_step *step;
    float *qkv, *out;
    uint8_t *keys, *values;
    const tile *tiles;
} attention;

/* Bytes of a head of a token's keys or values. */
CONSTANT size_t head_bytes(int32_t dtype, int32_t dim) { return dtype == TM_KV_INT8 ? (size_t)dim + 4 : (size_t)dim * 2; }

/* Where a head of a cell is. */
static inline size_t head_at(const attention *a, size_t cell, int32_t kv_head) {
    return (cell * a->decoder->num_kv_heads + kv_head) * head_bytes(a->step->kv_dtype, a->decoder->head_dim);
}

static void put_head(int32_t dtype, const float *x, int32_t dim, uint8_t *to) {
    if (dtype == TM_KV_INT8) {
        float scale;
        quantise_numbers(x, dim, (int8_t *)to, &scale);
        memcpy(to + dim, &scale, 4);
    } else /* heads are multiples of 16 wide */
        for (int32_t i = 0; i < dim; i += LANES) store_halves((uint16_t *)to + i, load(x + i));
}

/* Some numbers of a head. */
INLINE vf head_numbers(int32_t dtype, const uint8_t *head, int32_t dim, int32_t at) {
    if (dtype == TM_KV_INT8) return load_bytes((const int8_t *)head + at) * splat(float_at(head + dim));
    return load_halves((const uint16_t *)head + at);
}

/* Rotate a head's pairs (i, i + half) by their angles, and scale it. */
static inline void turn(float *head, const float *cos, const float *sin, int32_t half, float by) {
    int32_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, (a * c - b * s) * by);
        store(head + half + i, (b * c + a * s) * by);
    }
    for (; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = (a * cos[i] - b * sin[i]) * by;
        head[i + half] = (b * cos[i] + a * sin[i]) * by;
    }
}

static inline float attention_scale(const tm_decoder *d, const tm_layer *layer) {
    return layer->scale ? layer->scale : 1.0f / sqrtf((float)d->head_dim);
}

/* Norms and rotations of new queries and keys; keys and values go into their cells. Queries are scaled for attention,
 * with a soft cap so that a score of 1 is at the cap. */
static void place_tokens(void *context, int32_t begin, int32_t end) {
    const attention *a = context;
    const tm_decoder *d = a->decoder;
    const tm_layer *layer = a->layer;
    int32_t dim = d->head_dim, heads = d->num_heads, kv = d->num_kv_heads;
    int32_t half = d->rope_dim / 2;
    float by = attention_scale(d, layer) / (layer->softcap ? layer->softcap : 1.0f);
    size_t angles = layer->rope < 0 ? 0 : (size_t)layer->rope * a->step->num_tokens * half;
    for (int32_t t = begin; t < end; t++) {
        float *row = a->qkv + (size_t)t * (heads + 2 * kv) * dim;
        const float *cos = a->step->cos + angles + (size_t)t * half, *sin = a->step->sin + angles + (size_t)t * half;
        if (layer->whole_norms) {
            norm_row(row, layer->q_norm, d->eps, heads * dim, row);
            norm_row(row + heads * dim, layer->k_norm, d->eps, kv * dim, row + heads * dim);
        }
        for (int32_t h = 0; h < heads + kv; h++) {
            const float *weight = h < heads ? layer->q_norm : layer->k_norm;
            float *head = row + h * dim, scale = h < heads ? by : 1.0f;
            if (weight && !layer->whole_norms) norm_row(head, weight, d->eps, dim, head);
            int32_t turned = 0;
            if (layer->rope >= 0) {
                turn(head, cos, sin, half, scale);
                turned = 2 * half;
            }
            for (int32_t i = turned; i < dim; i++) head[i] *= scale;
        }
        const float *key = row + heads * dim, *value = key + kv * dim;
        for (int32_t h = 0; h < kv; h++) {
            size_t at = head_at(a, (size_t)a->step->slot[t], h);
            put_head(a->step->kv_dtype, key + h * dim, dim, a->keys + at);
            put_head(a->step->kv_dtype, value + h * dim, dim, a->values + at);
        }
    }
}

/* Sums of four, and of all of them: the order in which a vector's own numbers were added up, if it was one. */
INLINE vf sum_of_four(const vf *p) { return LANES == 8 ? (p[0] + p[1]) + (p[2] + p[3]) : (p[0] + p[2]) + (p[1] + p[3]); }
INLINE vf sum_of_quads(const vf *s) {
    return LANES == 16 ? (s[0] + s[1]) + (s[LANES / 4 - 2] + s[LANES / 4 - 1]) : LANES == 8 ? s[0] + s[LANES / 4 - 1] : s[0];
}

/* Scores of some heads' queries against KEYS keys, which lie side by side: [dim][KEYS]. A product is summed up in LANES
 * parts, every LANES dimensions. */
INLINE void score_heads(const float *q, int heads, const float *keys, int32_t dim, float scores[HEADS][KEYS]) {
    for (int k = 0; k < KEYS; k += LANES) {
        vf quads[HEADS][LANES / 4];
        for (int i = 0; i < LANES / 4; i++) {
            vf part[HEADS][4];
            for (int h = 0; h < heads; h++)
                for (int c = 0; c < 4; c++) part[h][c] = splat(0);
            for (int32_t d = 4 * i; d < dim; d += LANES)
                for (int c = 0; c < 4; c++) {
                    vf key = load(keys + (d + c) * KEYS + k);
                    for (int h = 0; h < heads; h++) part[h][c] += q[h * dim + d + c] * key;
                }
            for (int h = 0; h < heads; h++) quads[h][i] = sum_of_four(part[h]);
        }
        for (int h = 0; h < heads; h++) store(scores[h] + k, sum_of_quads(quads[h]));
    }
}

typedef struct {
    float most, total;
} softmax;

/* From the scores of KEYS cells to their weights; what was read before is scaled down where one is larger than all. */
static inline void weigh(float *scores, int32_t dim, softmax *s, float *out) {
    vf top = load(scores);
    for (int k = LANES; k < KEYS; k += LANES) top = larger(top, load(scores + k));
    float most = largest(top); /* of those that are numbers: one that is not makes the sum of weights none either */
    if (most == -INFINITY) most = s->most == -INFINITY ? 0.0f : s->most;
    if (!(most <= s->most)) {
        float by = s->most == -INFINITY ? 0.0f : expf(s->most - most);
        s->most = most;
        s->total *= by;
        for (int32_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) * by);
    }
    vf total = splat(0);
    for (int k = 0; k < KEYS; k += LANES) {
        vf w = vexp(load(scores + k) - splat(s->most));
        total += w;
        store(scores + k, w);
    }
    s->total += sum(total);
}

/* Add the values of the cells from `low` to `high`, weighted, to what some heads have read. */
static inline __attribute__((always_inline)) void read_cells(
    float weights[HEADS][KEYS], int heads, const float *values, int32_t dim, int low, int high, float *out) {
    for (int32_t at = 0; at < dim; at += WIDE * LANES) {
        int wide = dim - at < WIDE * LANES ? (int)(dim - at) / LANES : WIDE;
        vf acc[HEADS][WIDE];
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < wide; i++) acc[h][i] = load(out + h * dim + at + i * LANES);
        if (wide == WIDE)
            for (int k = low; k <= high; k++)
                for (int i = 0; i < WIDE; i++) {
                    vf v = load(values + k * dim + at + i * LANES);
                    for (int h = 0; h < heads; h++) acc[h][i] += weights[h][k] * v;
                }
        else
            for (int k = low; k <= high; k++)
                for (int i = 0; i < wide; i++)
                    for (int h = 0; h < heads; h++) acc[h][i] += weights[h][k] * load(values + k * dim + at + i * LANES);
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < wide; i++) store(out + h * dim + at + i * LANES, acc[h][i]);
    }
}

/* Scores in units of the cap -> capped smoothly: tanh(s) = 1 - 2 / (1 + exp(2 s)). */
static void cap_scores(int heads, float softcap, float scores[HEADS][KEYS]) {
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < KEYS; k += LANES) {
            vf s = load(scores[h] + k);
            store(scores[h] + k, softcap * (splat(1.0f) - splat(2.0f) / (splat(1.0f) + vexp(s + s))));
        }
}

/* Some heads of a token and KEYS cells, of which it sees those from `low` to `high`: what it has read, with these. */
INLINE void attend_heads(const float *q, int heads, const float *keys, const float *values, int32_t dim, int low, int high,
    float softcap, softmax *state, float *out) {
    float scores[HEADS][KEYS];
    score_heads(q, heads, keys, dim, scores);
    if (softcap) cap_scores(heads, softcap, scores);
    for (int h = 0; h < heads; h++) {
        for (int k = 0; k < low; k++) scores[h][k] = -INFINITY; /* a cell it does not see may hold anything */
        for (int k = high + 1; k < KEYS; k++) scores[h][k] = -INFINITY;
        weigh(scores[h], dim, &state[h], out + h * dim);
    }
    read_cells(scores, heads, values, dim, low, high, out);
}

/* The cells of KEYS positions from a multiple of it on; positions that are not held get the nearest one that is. */
static inline void find_cells(const tm_step *step, int32_t seq, int32_t begin, int32_t last, size_t *cells) {
    const int32_t *blocks = step->table + (size_t)seq * step->table_width;
    int32_t base = step->base[seq], start = step->start[seq], size = step->block_size;
    if (size % KEYS == 0 && base % KEYS == 0) { /* they lie in one block */
        int32_t at = begin - base;
        size_t first = (size_t)blocks[at / size] * size + at % size;
        for (int32_t k = 0; k < KEYS; k++) cells[k] = first + k;
        return;
    }
    for (int32_t k = 0; k < KEYS; k++) {
        int32_t at = (begin + k < start ? start : begin + k > last ? last : begin + k) - base;
        cells[k] = (size_t)blocks[at / size] * size + at % size;
    }
}

/* Keys and values of KEYS cells as floats: keys side by side, values one after the other. */
INLINE void widen(const attention *a, int32_t dtype, const size_t *cells, int32_t kv_head, float *keys, float *values) {
    int32_t dim = a->decoder->head_dim;
    const uint8_t *key[KEYS];
    for (int k = 0; k < KEYS; k++) {
        size_t at = head_at(a, cells[k], kv_head);
        key[k] = a->keys + at;
        for (int32_t i = 0; i < dim; i += LANES) store(values + k * dim + i, head_numbers(dtype, a->values + at, dim, i));
    }
    for (int k = 0; k < KEYS; k += LANES)
        for (int32_t i = 0; i < dim; i += LANES) {
            vf square[LANES];
            for (int c = 0; c < LANES; c++) square[c] = head_numbers(dtype, key[k + c], dim, i);
            transpose(square);
            for (int c = 0; c < LANES; c++) store(keys + (i + c) * KEYS + k, square[c]);
        }
}

static void fetch_cells(const attention *a, const size_t *cells, int32_t kv_head) {
    size_t bytes = head_bytes(a->step->kv_dtype, a->decoder->head_dim);
    for (int32_t k = 0; k < KEYS; k++) {
        size_t at = head_at(a, cells[k], kv_head);
        for (size_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(a->keys + at + i);
            __builtin_prefetch(a->values + at + i);
        }
    }
}

/* One tile of tokens and one KV head: the cells in order, KEYS at a time, widened once for all queries of the tile. */
static void attend_tile(const attention *a, const tile *tile, int32_t kv_head) {
    const tm_step *step = a->step;
    const tm_decoder *d = a->decoder;
    int32_t dim = d->head_dim, shared = d->num_heads / d->num_kv_heads;
    int32_t seq = step->seq[tile->run], window = a->layer->window;
    int32_t start = step->start[seq];
    float softcap = a->layer->softcap;
    const int32_t *tokens = step->order + tile->first;
    size_t row = (size_t)(d->num_heads + 2 * d->num_kv_heads) * dim;
    int32_t first = start, last = step->pos[tokens[tile->count - 1]];
    if (window && step->pos[tokens[0]] - window + 1 > first) first = step->pos[tokens[0]] - window + 1;
    softmax state[QUERIES][MOST_SHARED];
    for (int32_t t = 0; t < tile->count; t++)
        for (int32_t h = 0; h < shared; h++) {
            state[t][h] = (softmax){-INFINITY, 0.0f};
            memset(a->out + ((size_t)tokens[t] * d->num_heads + kv_head * shared + h) * dim, 0, (size_t)dim * 4);
        }
    float keys[KEYS * MOST_DIM], values[KEYS * MOST_DIM];
    for (int32_t begin = first & ~(KEYS - 1); begin <= last; begin += KEYS) {
        size_t cells[KEYS], next[KEYS];
        find_cells(step, seq, begin, last, cells);
        if (begin + KEYS <= last) { /* have the next ones on their way */
            find_cells(step, seq, begin + KEYS, last, next);
            fetch_cells(a, next, kv_head);
        }
        if (step->kv_dtype == TM_KV_INT8) widen(a, TM_KV_INT8, cells, kv_head, keys, values);
        else widen(a, TM_KV_HALF, cells, kv_head, keys, values);
        for (int32_t t = 0; t < tile->count; t++) {
            int32_t pos = step->pos[tokens[t]];
            int32_t low = start - begin, high = pos - begin;
            if (window && pos - window + 1 - begin > low) low = pos - window + 1 - begin;
            if (high < 0 || low >= KEYS) continue;
            if (low < 0) low = 0;
            if (high > KEYS - 1) high = KEYS - 1;
            for (int32_t h = 0; h < shared; h += HEADS) {
                int32_t head = kv_head * shared + h;
                const float *q = a->qkv + tokens[t] * row + head * dim;
                float *out = a->out + ((size_t)tokens[t] * d->num_heads + head) * dim;
                softmax *s = state[t] + h;
                switch (shared - h) { /* a constant in each call: loops unroll */
                    case 1: attend_heads(q, 1, keys, values, dim, low, high, softcap, s, out); break;
                    case 2: attend_heads(q, 2, keys, values, dim, low, high, softcap, s, out); break;
                    case 3: attend_heads(q, 3, keys, values, dim, low, high, softcap, s, out); break;
                    default: attend_heads(q, HEADS, keys, values, dim, low, high, softcap, s, out);
                }
            }
        }
    }
    for (int32_t t = 0; t < tile->count; t++)
        for (int32_t h = 0; h < shared; h++) {
            float *out = a->out + ((size_t)tokens[t] * d->num_heads + kv_head * shared + h) * dim;
            float inverse = 1.0f / state[t][h].total;
            for (int32_t i = 0; i < dim; i += LANES) store(out + i, load(out + i) * inverse);
        }
}

static void attend(void *context, int32_t begin, int32_t end) {
    const attention *a = context;
    for (int32_t i = begin; i < end; i++)
        attend_tile(a, &a->tiles[i / a->decoder->num_kv_heads], i % a->decoder->num_kv_heads);
}

/* -- the whole ----------------------------------------------------------------------------------------------------- */

static int32_t cut_tiles(const tm_step *step, tile *tiles) {
    int32_t count = 0;
    for (int32_t run = 0; run < step->num_runs; run++)
        for (int32_t at = step->begin[run]; at < step->begin[run + 1]; at += QUERIES) {
            int32_t left = step->begin[run + 1] - at;
            tiles[count++] = (tile){run, at, left < QUERIES ? left : QUERIES};
        }
    return count;
}

static int32_t wider(int32_t a, int32_t b) { return a > b ? a : b; }

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t NAME(tm_scratch_bytes)(const tm_decoder *d, int32_t n) {
    size_t query = (size_t)d->num_heads * d->head_dim, kv = (size_t)d->num_kv_heads * d->head_dim;
    int32_t widest = wider(wider(d->hidden, d->inner), (int32_t)query);
    return inputs_bytes(n, widest) + aligned(n * (query + 2 * kv) * 4) + aligned(n * query * 4) +
           aligned((size_t)n * 2 * d->inner * 4) + aligned((size_t)n * d->hidden * 4) +
           aligned((size_t)n * sizeof(tile)) + 64;
}

/* What attention or MLP add to x: a product, with a norm and a factor where the layer has them. */
static void add_product(const tm_decoder *d, const tm_layer *layer, const tm_matrix *m, const float *post_norm,
    const inputs *in, int32_t n, float *added, float *x, tm_pool *pool) {
    int is_plain = !post_norm && layer->residual_scale == 1.0f;
    multiply((product){{m}, 1, in, is_plain ? x : added, d->hidden, is_plain}, pool);
    if (is_plain) return;
    add_work work = {added, post_norm, d->eps, layer->residual_scale, d->hidden, x};
    tm_parallel(pool, add_rows, &work, n, ROW_GRAIN);
}

void NAME(tm_run)(const tm_decoder *d, const tm_step *step, float *x, void *scratch, tm_pool *pool) {
    int32_t n = step->num_tokens, query = d->num_heads * d->head_dim, kv = d->num_kv_heads * d->head_dim;
    char *at = (char *)aligned((size_t)scratch);
    float *qkv = (float *)at;
    at += aligned((size_t)n * (query + 2 * kv) * 4);
    float *read = (float *)at;
    at += aligned((size_t)n * query * 4);
    float *inner = (float *)at;
    at += aligned((size_t)n * 2 * d->inner * 4);
    float *added = (float *)at;
    at += aligned((size_t)n * d->hidden * 4);
    tile *tiles = (tile *)at;
    at += aligned((size_t)n * sizeof(tile));
    int32_t num_tiles = cut_tiles(step, tiles);
    /* Heads of a token lie side by side: one thread reads them all, where there are tokens enough for every thread. */
    int32_t grain = num_tiles > 2 * tm_pool_threads(pool) ? d->num_kv_heads : 1;
    for (int32_t i = 0; i < d->num_layers; i++) {
        const tm_layer *layer = &d->layers[i];
        const tm_matrix *qkv_parts[] = {&layer->q, &layer->k, &layer->v}, *gate_up[] = {&layer->gate, &layer->up};
        const tm_matrix *o = &layer->o, *down = &layer->down;
        inputs in = inputs_at(at, n, d->hidden, qkv_parts, 3);
        row_work rows = {x, layer->attn_norm, d->eps, d->hidden, &in, 0};
        tm_parallel(pool, layer->attn_norm ? norm_and_round : round_rows, &rows, n, ROW_GRAIN);
        multiply((product){{&layer->q, &layer->k, &layer->v}, 3, &in, qkv, query + 2 * kv, 0}, pool);
        attention a = {d, layer, step, qkv, read, step->keys[i], step->values[i], tiles};
        tm_parallel(pool, place_tokens, &a, n, ROW_GRAIN);
        tm_parallel(pool, attend, &a, num_tiles * d->num_kv_heads, grain);
        in = inputs_at(at, n, query, &o, 1);
        rows = (row_work){read, NULL, 0, query, &in, 0};
        tm_parallel(pool, round_rows, &rows, n, ROW_GRAIN);
        add_product(d, layer, o, layer->attn_post_norm, &in, n, added, x, pool);
        in = inputs_at(at, n, d->hidden, gate_up, 2);
        rows = (row_work){x, layer->mlp_norm, d->eps, d->hidden, &in, 0};
        tm_parallel(pool, layer->mlp_norm ? norm_and_round : round_rows, &rows, n, ROW_GRAIN);
        multiply((product){{&layer->gate, &layer->up}, 2, &in, inner, 2 * d->inner, 0}, pool);
        in = inputs_at(at, n, d->inner, &down, 1);
        rows = (row_work){inner, NULL, 0, d->inner, &in, layer->activation};
        tm_parallel(pool, gate_and_round, &rows, n, ROW_GRAIN);
        add_product(d, layer, down, layer->mlp_post_norm, &in, n, added, x, pool);
    }
}

size_t NAME(tm_product_bytes)(const tm_matrix *m, int32_t n) { return inputs_bytes(n, m->cols) + 64; }

void NAME(tm_product)(const tm_matrix *m, const float *x, int32_t n, float *y, void *scratch, tm_pool *pool) {
    inputs in = inputs_at((char *)aligned((size_t)scratch), n, m->cols, &m, 1);
    row_work rows = {x, NULL, 0, m->cols, &in, 0};
    tm_parallel(pool, round_rows, &rows, n, ROW_GRAIN);
    multiply((product){{m}, 1, &in, y, m->rows, 0}, pool);
}

void NAME(tm_norm)(const float *x, const float *weight, float eps, int32_t n, int32_t width, float *y) {
    for (int32_t i = 0; i < n; i++) norm_row(x + (size_t)i * width, weight, eps, width, y + (size_t)i * width);
}

int64_t NAME(tm_peak)(int32_t rounds) { return peak_products(rounds); }
