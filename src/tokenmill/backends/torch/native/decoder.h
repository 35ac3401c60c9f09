/* A decoder's layers over paged keys and values. Included once for each kind of machine. */

#define PANEL (1 << 18) /* bytes of rounded inputs that are gone through for each block of weights */
#define QUERIES 4       /* tokens of one sequence that read keys and values together */
#define KEYS 16         /* positions that are scored together: those from a multiple of it on */
#define HEADS 4         /* of those that read the same keys, at a time */
#define WIDE (LANES / 4) /* vectors of values that are added up at a time */
#define MOST_DIM 512    /* of a head */
#define MOST_SHARED 64  /* heads that read the same keys */

/* -- products ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const tm_matrix *matrix;
    int32_t num_rows;
    float *y;
    int adds; /* to what is in y */
    const int8_t *q;
    const float *scale, *sum;
} product;

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

static void product_blocks(void *context, int32_t first, int32_t last) {
    const product *p = context;
    const tm_matrix *m = p->matrix;
    int32_t groups = groups_of(m->cols), width = groups * TM_GROUP;
    size_t stride = (size_t)groups * block_bytes(m->kind);
    int32_t panel = PANEL / width / TILE * TILE;
    if (panel < TILE) panel = TILE;
    float out[TILE][TM_ROWS];
    float *outs[TILE];
    for (int t = 0; t < TILE; t++) outs[t] = out[t];
    for (int32_t begin = 0; begin < p->num_rows; begin += panel) {
        int32_t end = begin + panel < p->num_rows ? begin + panel : p->num_rows;
        for (int32_t b = first; b < last; b++) {
            int32_t row = b * TM_ROWS, count = m->rows - row < TM_ROWS ? m->rows - row : TM_ROWS;
            for (int32_t i = begin; i < end; i += TILE) {
                int n = end - i < TILE ? (int)(end - i) : TILE;
                input_row in[TILE];
                for (int t = 0; t < n; t++) {
                    size_t at = (size_t)(i + t);
                    in[t] = (input_row){p->q + at * width, p->scale + at * groups, p->sum + at * groups};
                }
                product_tile(m->kind, m->blocks + (size_t)b * stride, groups, in, n, outs);
                for (int t = 0; t < n; t++)
                    put(p->y + (size_t)(i + t) * m->rows + row, out[t], m->bias ? m->bias + row : NULL, count, p->adds);
            }
        }
    }
}

/* Room for the rounded inputs of a product. */
typedef struct {
    int8_t *q;
    float *scale, *sum;
} rounded;

static rounded rounded_at(char **at, int32_t n, int32_t cols) {
    int32_t groups = groups_of(cols);
    rounded r;
    r.scale = (float *)*at;
    *at += (size_t)n * groups * 4;
    r.sum = (float *)*at;
    *at += (size_t)n * groups * 4;
    r.q = (int8_t *)*at;
    *at += ((size_t)n * groups * TM_GROUP + 63) / 64 * 64;
    return r;
}

static void multiply(const tm_matrix *m, const rounded *in, int32_t n, float *y, int adds, tm_pool *pool) {
    product p = {m, n, y, adds, in->q, in->scale, in->sum};
    int32_t blocks = (m->rows + TM_ROWS - 1) / TM_ROWS;
    int32_t grain = blocks / (16 * tm_pool_threads(pool));
    tm_parallel(pool, product_blocks, &p, blocks, grain < 1 ? 1 : grain);
}

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
    rounded out;
    int32_t activation;
} row_work;

/* Round one group of a row to where it belongs. */
static inline void round_group(const row_work *w, int32_t row, int32_t g, const float *values, int32_t count) {
    size_t at = (size_t)row * groups_of(w->width) + g;
    quantise_group(values, count, w->out.q + at * TM_GROUP, w->out.scale + at, w->out.sum + at);
}

static void round_rows(void *context, int32_t begin, int32_t end) {
    const row_work *w = context;
    int32_t groups = groups_of(w->width);
    for (int32_t i = begin; i < end; i++)
        for (int32_t g = 0; g < groups; g++) {
            int32_t at = g * TM_GROUP, count = w->width - at < TM_GROUP ? w->width - at : TM_GROUP;
            round_group(w, i, g, w->x + (size_t)i * w->width + at, count);
        }
}

static void norm_and_round(void *context, int32_t begin, int32_t end) {
    const row_work *w = context;
    float values[TM_GROUP];
    for (int32_t i = begin; i < end; i++) {
        const float *x = w->x + (size_t)i * w->width;
        float by = root_mean_square_inverse(x, w->eps, w->width);
        int32_t groups = groups_of(w->width);
        for (int32_t g = 0; g < groups; g++) {
            int32_t at = g * TM_GROUP, count = w->width - at < TM_GROUP ? w->width - at : TM_GROUP;
            scale_row(x + at, w->weight + at, by, count, values);
            round_group(w, i, g, values, count);
        }
    }
}

/* The tanh approximation of gelu(v) is v / (1 + exp(-GELU_SLOPE * (v + GELU_CUBE * v^3))); silu(v), v / (1 + exp(-v)). */
#define GELU_SLOPE 1.5957691216057308f /* 2 * sqrt(2 / pi) */
#define GELU_CUBE 0.044715f

/* x is [n, 2 * width]: gate and up. */
static void gate_and_round(void *context, int32_t begin, int32_t end) {
    const row_work *w = context;
    float values[TM_GROUP];
    for (int32_t i = begin; i < end; i++) {
        const float *gate = w->x + (size_t)i * 2 * w->width, *up = gate + w->width;
        int32_t groups = groups_of(w->width);
        for (int32_t g = 0; g < groups; g++) {
            int32_t at = g * TM_GROUP, count = w->width - at < TM_GROUP ? w->width - at : TM_GROUP;
            for (int32_t k = 0; k < count; k += LANES) { /* the width is a multiple of 16 */
                vf v = load(gate + at + k), slope = v;
                if (w->activation == TM_GELU_TANH) slope = GELU_SLOPE * (v + GELU_CUBE * v * v * v);
                store(values + k, v / (splat(1.0f) + vexp(-slope)) * load(up + at + k));
            }
            round_group(w, i, g, values, count);
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

#define ROW_GRAIN 4 /* so few rows are not worth waking anybody */

/* -- attention ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t run, first, count;
} tile; /* tokens of one sequence, one after the other */

typedef struct {
    const tm_decoder *decoder;
    const tm_layer *layer;
    const tm_step *step;
    float *qkv, *out;
    uint16_t *keys, *values;
    const tile *tiles;
} attention;

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
        size_t cell = (size_t)a->step->slot[t] * kv * dim;
        const float *key = row + heads * dim, *value = key + kv * dim;
        for (int32_t i = 0; i < kv * dim; i += LANES) { /* heads are multiples of 16 wide */
            store_halves(a->keys + cell + i, load(key + i));
            store_halves(a->values + cell + i, load(value + i));
        }
    }
}

#if LANES == 16
/* The sum of each of sixteen vectors. */
static inline vf sums(const vf *v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) {
        __m512 x = (__m512)v[2 * i], y = (__m512)v[2 * i + 1];
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(
            _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
#elif LANES == 8
static inline vf sums(const vf *v) {
    __m256 a = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), b = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    __m256 c = _mm256_hadd_ps((__m256)v[4], (__m256)v[5]), d = _mm256_hadd_ps((__m256)v[6], (__m256)v[7]);
    __m256 ab = _mm256_hadd_ps(a, b), cd = _mm256_hadd_ps(c, d);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(ab, cd, 0x20), _mm256_permute2f128_ps(ab, cd, 0x31));
}
#else
static inline vf sums(const vf *v) { return (vf){sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])}; }
#endif

/* Scores of some heads' queries, `row` floats apart, against KEYS keys: a vector of sums is four keys of each head. */
static inline __attribute__((always_inline)) void score_heads(
    const float *q, int heads, const float *keys, int32_t dim, float scores[HEADS][KEYS]) {
    for (int h = 0; h < heads; h += LANES / 4)
        for (int k = 0; k < KEYS; k += 4) {
            vf acc[LANES];
            for (int i = 0; i < LANES; i++) acc[i] = splat(0);
            for (int32_t d = 0; d < dim; d += LANES)
                for (int i = 0; i < 4; i++) {
                    vf key = load(keys + (k + i) * dim + d);
                    for (int j = 0; j < LANES / 4 && h + j < heads; j++) acc[4 * j + i] += load(q + (h + j) * dim + d) * key;
                }
            float found[LANES];
            store(found, sums(acc));
            for (int j = 0; j < LANES / 4 && h + j < heads; j++) memcpy(scores[h + j] + k, found + 4 * j, 16);
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
static inline __attribute__((always_inline)) void attend_heads(const float *q, int heads, const float *keys,
    const float *values, int32_t dim, int low, int high, float softcap, softmax *state, float *out) {
    float scores[HEADS][KEYS];
    score_heads(q, heads, keys, dim, scores);
    if (softcap) cap_scores(heads, softcap, scores);
    for (int h = 0; h < heads; h++) {
        for (int k = 0; k < KEYS; k++)
            if (k < low || k > high) scores[h][k] = -INFINITY; /* a cell it does not see may hold anything */
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

/* One tile of tokens and one KV head: the cells in order, KEYS at a time, widened once for all queries. */
static void attend_tile(const attention *a, const tile *tile, int32_t kv_head) {
    const tm_step *step = a->step;
    const tm_decoder *d = a->decoder;
    int32_t dim = d->head_dim, shared = d->num_heads / d->num_kv_heads;
    int32_t seq = step->seq[tile->run], window = a->layer->window;
    int32_t start = step->start[seq];
    float softcap = a->layer->softcap;
    const int32_t *tokens = step->order + tile->first;
    size_t stride = (size_t)d->num_kv_heads * dim, row = (size_t)(d->num_heads + 2 * d->num_kv_heads) * dim;
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
            for (int32_t k = 0; k < KEYS; k++)
                for (int32_t i = 0; i < dim; i += 32) {
                    __builtin_prefetch(a->keys + next[k] * stride + kv_head * dim + i);
                    __builtin_prefetch(a->values + next[k] * stride + kv_head * dim + i);
                }
        }
        for (int32_t k = 0; k < KEYS; k++) {
            size_t cell = cells[k] * stride + kv_head * dim;
            for (int32_t i = 0; i < dim; i += LANES) {
                store(keys + k * dim + i, load_halves(a->keys + cell + i));
                store(values + k * dim + i, load_halves(a->values + cell + i));
            }
        }
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

static size_t rounded_bytes(int32_t n, int32_t cols) {
    int32_t groups = groups_of(cols);
    return aligned((size_t)n * groups * 8 + ((size_t)n * groups * TM_GROUP + 63) / 64 * 64);
}

size_t NAME(tm_scratch_bytes)(const tm_decoder *d, int32_t n) {
    size_t query = (size_t)d->num_heads * d->head_dim, kv = (size_t)d->num_kv_heads * d->head_dim;
    int32_t widest = wider(wider(d->hidden, d->inner), (int32_t)query);
    return rounded_bytes(n, widest) + aligned(n * (query + 2 * kv) * 4) + aligned(n * query * 4) +
           aligned((size_t)n * 2 * d->inner * 4) + aligned((size_t)n * d->hidden * 4) +
           aligned((size_t)n * sizeof(tile)) + 64;
}

/* What attention or MLP add to x: a product, with a norm and a factor where the layer has them. */
static void add_product(const tm_decoder *d, const tm_layer *layer, const tm_matrix *m, const float *post_norm,
    const rounded *in, int32_t n, float *added, float *x, tm_pool *pool) {
    if (!post_norm && layer->residual_scale == 1.0f) {
        multiply(m, in, n, x, 1, pool);
        return;
    }
    multiply(m, in, n, added, 0, pool);
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
        char *room = at;
        row_work rows = {x, layer->attn_norm, d->eps, d->hidden, rounded_at(&room, n, d->hidden), 0};
        tm_parallel(pool, layer->attn_norm ? norm_and_round : round_rows, &rows, n, ROW_GRAIN);
        multiply(&layer->qkv, &rows.out, n, qkv, 0, pool);
        attention a = {d, layer, step, qkv, read, step->keys[i], step->values[i], tiles};
        tm_parallel(pool, place_tokens, &a, n, ROW_GRAIN);
        tm_parallel(pool, attend, &a, num_tiles * d->num_kv_heads, grain);
        room = at;
        rows = (row_work){read, NULL, 0, query, rounded_at(&room, n, query), 0};
        tm_parallel(pool, round_rows, &rows, n, ROW_GRAIN);
        add_product(d, layer, &layer->o, layer->attn_post_norm, &rows.out, n, added, x, pool);
        room = at;
        rows = (row_work){x, layer->mlp_norm, d->eps, d->hidden, rounded_at(&room, n, d->hidden), 0};
        tm_parallel(pool, layer->mlp_norm ? norm_and_round : round_rows, &rows, n, ROW_GRAIN);
        multiply(&layer->gate_up, &rows.out, n, inner, 0, pool);
        room = at;
        rows = (row_work){inner, NULL, 0, d->inner, rounded_at(&room, n, d->inner), layer->activation};
        tm_parallel(pool, gate_and_round, &rows, n, ROW_GRAIN);
        add_product(d, layer, &layer->down, layer->mlp_post_norm, &rows.out, n, added, x, pool);
    }
}

size_t NAME(tm_product_bytes)(const tm_matrix *m, int32_t n) { return rounded_bytes(n, m->cols) + 64; }

void NAME(tm_product)(const tm_matrix *m, const float *x, int32_t n, float *y, void *scratch, tm_pool *pool) {
    char *at = (char *)aligned((size_t)scratch);
    row_work rows = {x, NULL, 0, m->cols, rounded_at(&at, n, m->cols), 0};
    tm_parallel(pool, round_rows, &rows, n, ROW_GRAIN);
    multiply(m, &rows.out, n, y, 0, pool);
}

void NAME(tm_norm)(const float *x, const float *weight, float eps, int32_t n, int32_t width, float *y) {
    for (int32_t i = 0; i < n; i++) norm_row(x + (size_t)i * width, weight, eps, width, y + (size_t)i * width);
}
