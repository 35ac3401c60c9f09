/* Sampling: from rows of logits to ids, bit for bit as `tokenmill/sampling/definition.py` says it.
 *
 * Compiled once for each kind of machine, always without contraction. Weights are multiples of 2^-33, at most 1, so
 * sums of weights in double are exact in any order: block by block here, in one go there.
 *
 * A row is weighed in one pass, which also leaves the sum of each block of columns. From these sums follows in which
 * block a random number falls, and which blocks can't hold a token of some weight: likely tokens are gathered from few
 * blocks. They are put into buckets by their logits; only buckets in which a cut or a draw falls are sorted.
 */
#include <float.h>
#include <stdatomic.h>

#include "kernels.h"
#include "lanes.h"
#include "pool.h"

#define PASTE(function, variant) function##_##variant
#define EXPAND(function, variant) PASTE(function, variant)
#define NAME(function) EXPAND(function, TM_VARIANT)

#define BLOCK 64 /* columns */
#define LEAST (-24.0f)
#define TO_INTEGER 12582912.0f
#define TO_UNIT 0x1p-10f
#define MOMENT_TO_UNIT 0x1.8p19

#define BUCKETS 2048
#define PER_UNIT 64 /* buckets of a unit of cooled logits */

/* A thread's memory. Likely tokens are in `keys`: a number in the order wanted, ascending; the token below it. */
typedef struct {
    float *z, *w;  /* [vocab]: cooled logits, at most 0; their weights */
    double *sums;  /* [blocks] of weights */
    uint64_t *keys, *spare;
    int32_t *counts; /* [vocab] */
    /* `keys` by buckets, each of them sorted or not yet */
    int32_t num_buckets, begin[BUCKETS + 1];
    double mass[BUCKETS]; /* sum of weights */
    uint8_t is_sorted[BUCKETS];
} scratch;

/* -- random numbers ------------------------------------------------------------------------------------------------ */

static void uniforms(const tm_draw *draw, double *first, double *second) {
    uint32_t c0 = (uint32_t)draw->position, c1 = (uint32_t)draw->choice, c2 = (uint32_t)draw->attempt, c3 = 0;
    uint32_t k0 = (uint32_t)draw->seed, k1 = (uint32_t)((uint64_t)draw->seed >> 32);
    for (int i = 0; i < 10; i++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c0, product1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    *first = (double)((uint64_t)(c0 >> 5) << 26 | c1 >> 6) * 0x1p-53;
    *second = (double)((uint64_t)(c2 >> 5) << 26 | c3 >> 6) * 0x1p-53;
}

/* -- weights ------------------------------------------------------------------------------------------------------- */

static inline vf choose(vi which, vf yes, vf no) { return (vf)((which & (vi)yes) | (~which & (vi)no)); }

/* exp(z) for z <= 0, as a multiple of 2^-33. */
static inline vf weight(vf z) {
    vi live = (vi)(z >= splat(LEAST));
    vf x = (vf)(live & (vi)z);
    vf n = (x * 1.44269504f + splat(TO_INTEGER)) - splat(TO_INTEGER);
    vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f) * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = (p * (r * r) + r) + splat(1.0f);
    vf w = (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
    w = choose((vi)(w < splat(TO_UNIT)), (w + splat(TO_UNIT)) - splat(TO_UNIT), w);
    return (vf)(live & (vi)w);
}

static float weight_of(float z) {
    float lanes[LANES];
    store(lanes, weight(splat(z)));
    return lanes[0];
}

/* The largest logit; NaN if one of them is. */
static float top_of(const float *x, int32_t n) {
    vf top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)}; /* none waits for another */
    vi nan[4] = {{0}, {0}, {0}, {0}};
    int32_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            vf v = load(x + i + k * LANES);
            nan[k] |= (vi)(v != v);
            top[k] = larger(v, top[k]);
        }
    float lanes[LANES], found = -INFINITY;
    vi any = (nan[0] | nan[1]) | (nan[2] | nan[3]);
    int32_t bad = 0;
    store(lanes, larger(larger(top[0], top[1]), larger(top[2], top[3])));
    for (int j = 0; j < LANES; j++) {
        found = lanes[j] > found ? lanes[j] : found;
        bad |= any[j];
    }
    for (; i < n; i++) {
        found = x[i] > found ? x[i] : found;
        bad |= x[i] != x[i];
    }
    return bad ? NAN : found;
}

#define HALF (LANES / 2)
typedef float half_vf __attribute__((vector_size(4 * HALF)));
typedef double vd __attribute__((vector_size(8 * HALF)));

static double sum_of(const float *w, int32_t n) {
    vd sum = {0};
    int32_t i = 0;
    for (; i + HALF <= n; i += HALF) {
        half_vf part;
        memcpy(&part, w + i, sizeof part);
        sum += __builtin_convertvector(part, vd);
    }
    double total = 0;
    for (int j = 0; j < HALF; j++) total += sum[j];
    for (; i < n; i++) total += w[i];
    return total;
}

/* The sum of each block, and of all. */
static double sum_blocks(const scratch *s, int32_t n) {
    double total = 0;
    for (int32_t b = 0; b * BLOCK < n; b++) {
        int32_t begin = b * BLOCK, width = n - begin < BLOCK ? n - begin : BLOCK;
        total += s->sums[b] = sum_of(s->w + begin, width);
    }
    return total;
}

/* z = (x - top) / temperature and what it weighs; returns the sum. x may be z. */
static double weigh(const scratch *s, const float *x, float top, float temperature, int32_t n) {
    vf tops = splat(top), divisors = splat(temperature);
    double total = 0;
    for (int32_t begin = 0; begin < n; begin += BLOCK) {
        float *z = s->z + begin, *w = s->w + begin;
        int32_t width = n - begin < BLOCK ? n - begin : BLOCK, i = 0;
        for (; i + LANES <= width; i += LANES) {
            vf cooled = (load(x + begin + i) - tops) / divisors;
            store(z + i, cooled);
            store(w + i, weight(cooled));
        }
        for (; i < width; i++) {
            z[i] = (x[begin + i] - top) / temperature;
            w[i] = weight_of(z[i]);
        }
        total += s->sums[begin / BLOCK] = sum_of(w, width);
    }
    return total;
}

/* -- tokens in order ----------------------------------------------------------------------------------------------- */

static inline uint64_t key_of(float number, int32_t token) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return (uint64_t)(bits & 0x7fffffffu) << 32 | (uint32_t)token; /* by its magnitude: z is at most 0 */
}

static inline int32_t token_of(uint64_t key) { return (int32_t)(uint32_t)key; }

/* Ascending. Tokens of equal numbers must come in order already. */
static void sort_keys(uint64_t *keys, uint64_t *spare, int32_t n) {
    if (n <= 32) {
        for (int32_t i = 1; i < n; i++) {
            uint64_t key = keys[i];
            int32_t j = i;
            for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
            keys[j] = key;
        }
        return;
    }
    uint64_t *from = keys, *to = spare;
    for (int shift = 32; shift < 64; shift += 8) {
        int32_t place[256] = {0}, sum = 0;
        for (int32_t i = 0; i < n; i++) place[from[i] >> shift & 255]++;
        if (place[from[0] >> shift & 255] == n) continue;
        for (int digit = 0; digit < 256; digit++) {
            int32_t count = place[digit];
            place[digit] = sum;
            sum += count;
        }
        for (int32_t i = 0; i < n; i++) to[place[from[i] >> shift & 255]++] = from[i];
        uint64_t *swapped = from;
        from = to;
        to = swapped;
    }
    if (from != keys) memcpy(keys, from, sizeof *keys * (size_t)n);
}

static inline int32_t bucket_of(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    float number;
    memcpy(&number, &bits, 4);
    return number < (float)(BUCKETS - 1) / PER_UNIT ? (int32_t)(number * PER_UNIT) : BUCKETS - 1;
}

/* The n keys are in order. */
static void one_bucket(scratch *s, int32_t n) {
    s->num_buckets = 1;
    s->begin[0] = 0;
    s->begin[1] = n;
    s->is_sorted[0] = 1;
    s->mass[0] = 0;
    for (int32_t i = 0; i < n; i++) s->mass[0] += s->w[token_of(s->keys[i])];
}

/* The n keys, in order of their tokens, into buckets. */
static void fill_buckets(scratch *s, int32_t n) {
    if (n <= 2 * PER_UNIT) {
        sort_keys(s->keys, s->spare, n);
        one_bucket(s, n);
        return;
    }
    int32_t place[BUCKETS] = {0}, sum = 0;
    s->num_buckets = BUCKETS;
    memset(s->mass, 0, sizeof s->mass);
    for (int32_t i = 0; i < n; i++) {
        int32_t b = bucket_of(s->keys[i]);
        place[b]++;
        s->mass[b] += s->w[token_of(s->keys[i])];
    }
    for (int32_t b = 0; b < BUCKETS; b++) {
        s->is_sorted[b] = place[b] < 2;
        s->begin[b] = sum;
        sum += place[b];
        place[b] = s->begin[b];
    }
    s->begin[BUCKETS] = n;
    for (int32_t i = 0; i < n; i++) s->spare[place[bucket_of(s->keys[i])]++] = s->keys[i];
    uint64_t *swapped = s->keys;
    s->keys = s->spare;
    s->spare = swapped;
}

static inline void sort_bucket(scratch *s, int32_t b) {
    int32_t begin = s->begin[b];
    if (!s->is_sorted[b]) sort_keys(s->keys + begin, s->spare + begin, s->begin[b + 1] - begin);
    s->is_sorted[b] = 1;
}

/* Bring the first n keys into order. */
static void sort_first(scratch *s, int32_t n) {
    for (int32_t b = 0; b < s->num_buckets && s->begin[b] < n; b++) sort_bucket(s, b);
}

/* A block that weighs less than this has no token with z >= least; those of -24 and less may weigh nothing. */
static double lightest_block(float least) { return least > LEAST ? 0.99 * weight_of(least) : -1; }

/* How many tokens have z >= least, and what they weigh. */
static int64_t count_from(const scratch *s, float least, int32_t vocab, double *mass) {
    double light = lightest_block(least);
    int64_t count = 0;
    *mass = 0;
    for (int32_t b = 0; b * BLOCK < vocab; b++) {
        if (s->sums[b] < light) continue;
        const float *z = s->z + b * BLOCK, *w = s->w + b * BLOCK;
        int32_t width = vocab - b * BLOCK < BLOCK ? vocab - b * BLOCK : BLOCK, i = 0;
        float inside[BLOCK];
        vi counts = {0};
        for (; i + LANES <= width; i += LANES) {
            vi is_inside = (vi)(load(z + i) >= splat(least));
            counts -= is_inside;
            store(inside + i, (vf)(is_inside & (vi)load(w + i)));
        }
        for (int j = 0; j < LANES; j++) count += counts[j];
        for (; i < width; i++) {
            count += z[i] >= least;
            inside[i] = z[i] >= least ? w[i] : 0;
        }
        *mass += sum_of(inside, width);
    }
    return count;
}

/* Tokens with z >= least into `keys`, in order of their ids; returns how many. */
static int32_t gather(const scratch *s, float least, int32_t vocab) {
    double light = lightest_block(least);
    int32_t n = 0;
    for (int32_t b = 0; b * BLOCK < vocab; b++) {
        if (s->sums[b] < light) continue;
        int32_t end = (b + 1) * BLOCK < vocab ? (b + 1) * BLOCK : vocab;
        for (int32_t i = b * BLOCK; i < end; i++) { /* without a branch: which way it goes is hard to guess */
            s->keys[n] = key_of(s->z[i], i);
            n += s->z[i] >= least;
        }
    }
    return n;
}

/* The likeliest tokens into buckets: at least `count`, and more than `mass` in weight (or all there are: with `banned`
 * also those of minus infinity); returns how many. */
static int32_t likeliest(scratch *s, int64_t count, double mass, int32_t banned, int32_t vocab) {
    static const float LADDER[] = {-2, -4, -6, -8, -11, -15, LEAST};
    float least = banned ? -INFINITY : -FLT_MAX;
    for (size_t i = 0; i < sizeof LADDER / sizeof *LADDER && count <= vocab; i++) {
        double found;
        if (count_from(s, LADDER[i], vocab, &found) >= count && found > mass) {
            least = LADDER[i];
            break;
        }
    }
    int32_t n = gather(s, least, vocab);
    fill_buckets(s, n);
    return n;
}

/* -- edits --------------------------------------------------------------------------------------------------------- */

static inline float saturated(float edited, float before) {
    if (before == -INFINITY) return before;
    edited = edited > FLT_MAX ? FLT_MAX : edited;
    return edited < -FLT_MAX ? -FLT_MAX : edited;
}

static inline int is_allowed(const uint32_t *mask, int32_t token) {
    return mask == NULL || (mask[token / 32] >> (token % 32) & 1);
}

static void copy_masked(const float *x, const uint32_t *mask, int32_t n, float *y) {
    if (mask == NULL) {
        memcpy(y, x, sizeof(float) * (size_t)n);
        return;
    }
    for (int32_t begin = 0; begin < n; begin += 32) {
        uint32_t word = mask[begin / 32];
        int32_t width = n - begin < 32 ? n - begin : 32;
        for (int32_t i = 0; i < width; i++) y[begin + i] = word >> i & 1 ? x[begin + i] : -INFINITY;
    }
}

static void penalize(const scratch *s, const tm_draw *draw, const int32_t *log, int64_t length, float *z) {
    float repetition = draw->repetition_penalty, *before = (float *)s->spare;
    /* A token may occur repeatedly: all logits are read before the first one is written. */
    for (int64_t i = 0; i < length; i++) {
        before[log[i]] = z[log[i]];
        s->counts[log[i]] = 0;
    }
    for (int64_t i = draw->num_prompt; i < length; i++) s->counts[log[i]]++;
    for (int64_t i = 0; i < length; i++) {
        float v = before[log[i]], count = (float)s->counts[log[i]];
        float repeated = saturated(v > 0 ? v / repetition : v * repetition, v);
        float presence = draw->presence_penalty * (count > 0 ? 1.0f : 0.0f);
        z[log[i]] = saturated((repeated - draw->frequency_penalty * count) - presence, v);
    }
}

static inline int has_tokens(const tm_tokens *tokens, int32_t row) {
    return tokens->begin != NULL && tokens->begin[row] < tokens->begin[row + 1];
}

/* The row with mask, allow-list, bias and bans, penalties and rules applied, in z; NULL if it has none of them. */
static const float *edited(const tm_sampling *step, int32_t row, const float *x, const scratch *s) {
    const tm_draw *draw = step->draws + row;
    const tm_tokens *allowed = &step->allowed, *edits = &step->edits, *history = &step->history, *taxes = &step->taxes;
    const uint32_t *mask = step->mask ? step->mask + (size_t)row * step->mask_words : NULL;
    int penalizes = draw->has_penalties && has_tokens(history, row);
    if (mask == NULL && !has_tokens(allowed, row) && !has_tokens(edits, row) && !penalizes && !has_tokens(taxes, row))
        return NULL;
    float *z = s->z;
    if (has_tokens(allowed, row)) {
        for (int32_t i = 0; i < step->vocab; i++) z[i] = -INFINITY;
        for (int64_t i = allowed->begin[row]; i < allowed->begin[row + 1]; i++) {
            int32_t token = allowed->token[i];
            if (is_allowed(mask, token)) z[token] = x[token];
        }
    } else copy_masked(x, mask, step->vocab, z);
    if (has_tokens(edits, row))
        for (int64_t i = edits->begin[row]; i < edits->begin[row + 1]; i++) z[edits->token[i]] += edits->value[i];
    if (penalizes) {
        int64_t begin = history->begin[row];
        penalize(s, draw, history->token + begin, history->begin[row + 1] - begin, z);
    }
    if (has_tokens(taxes, row))
        for (int64_t i = taxes->begin[row]; i < taxes->begin[row + 1]; i++) {
            float *at = z + taxes->token[i], tax = taxes->value[i];
            *at = tax == INFINITY ? -INFINITY : saturated(*at - tax, *at);
        }
    return z;
}

/* -- draws --------------------------------------------------------------------------------------------------------- */

/* In order of the vocabulary: the token that a number in [0, 1) falls on. */
static int32_t draw_plain(const scratch *s, float min_p, double total, double uniform, int32_t vocab) {
    if (min_p > 0) {
        for (int32_t i = 0; i < vocab; i++) s->w[i] = s->w[i] >= min_p ? s->w[i] : 0;
        total = sum_blocks(s, vocab);
    }
    double wanted = uniform * total, before = 0;
    int32_t last = 0;
    for (int32_t b = 0; b * BLOCK < vocab; b++) {
        int32_t end = (b + 1) * BLOCK < vocab ? (b + 1) * BLOCK : vocab;
        if (s->sums[b] > 0) last = b;
        if (before + s->sums[b] > wanted)
            for (int32_t i = b * BLOCK; i < end; i++)
                if ((before += s->w[i]) > wanted) return i;
        before += s->sums[b];
    }
    /* Rounding has pointed past the last one that weighs anything. */
    int32_t i = (last + 1) * BLOCK < vocab ? (last + 1) * BLOCK - 1 : vocab - 1;
    while (i > 0 && s->w[i] == 0) i--;
    return i;
}

/* Of the first n tokens in order, how many come before the mass is reached; never none. */
static int32_t num_inside(scratch *s, int32_t n, double mass) {
    double before = 0;
    for (int32_t b = 0; b < s->num_buckets && s->begin[b] < n; b++) {
        if (s->begin[b + 1] <= n && before + s->mass[b] < mass) { /* all of its tokens are inside */
            before += s->mass[b];
            continue;
        }
        sort_bucket(s, b);
        for (int32_t i = s->begin[b]; i < s->begin[b + 1] && i < n; i++) {
            if (i > 0 && before >= mass) return i;
            before += s->w[token_of(s->keys[i])];
        }
    }
    return n;
}

/* Drops the tokens whose surprise is not near the entropy; returns the sum of weights that are left. */
static double keep_typical(scratch *s, float typical_p, double total, int32_t vocab) {
    double moments[8] = {0}, moment = 0; /* sums are exact in any order */
    for (int32_t i = 0; i < vocab; i++) {
        double z = s->w[i] > 0 ? s->z[i] : 0; /* not minus infinity */
        moments[i % 8] += (s->w[i] * z + MOMENT_TO_UNIT) - MOMENT_TO_UNIT;
    }
    for (int j = 0; j < 8; j++) moment += moments[j];
    float mean = (float)(moment / total);
    int32_t n = 0;
    for (int32_t i = 0; i < vocab; i++) {
        s->keys[n] = key_of(s->z[i] - mean, i);
        n += s->z[i] > -INFINITY;
    }
    fill_buckets(s, n);
    n = num_inside(s, n, (double)typical_p * total);
    float *kept = (float *)s->spare, top = -INFINITY;
    for (int32_t i = 0; i < vocab; i++) kept[i] = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        float z = kept[token_of(s->keys[i])] = s->z[token_of(s->keys[i])];
        top = z > top ? z : top;
    }
    return weigh(s, kept, top, 1.0f, vocab);
}

/* XTC: of the n tokens in order, drop those above the threshold but the least likely one; returns how many are left. */
static int32_t exclude_top_choices(const scratch *s, int32_t n, double floor) {
    int32_t left = 0;
    for (int32_t i = 0; i < n; i++) {
        int is_above = s->w[token_of(s->keys[i])] >= floor;
        if (is_above && i + 1 < n && s->w[token_of(s->keys[i + 1])] >= floor) continue;
        s->keys[left++] = s->keys[i];
    }
    return left;
}

/* What the first n tokens weigh beside another one. */
static void weigh_again(const scratch *s, int32_t n, float top) {
    for (int32_t begin = 0; begin < n; begin += LANES) {
        int32_t width = n - begin < LANES ? n - begin : LANES;
        float lanes[LANES] = {0};
        for (int32_t i = 0; i < width; i++) lanes[i] = s->z[token_of(s->keys[begin + i])] - top;
        store(lanes, weight(load(lanes)));
        for (int32_t i = 0; i < width; i++) s->w[token_of(s->keys[begin + i])] = lanes[i];
    }
}

/* What the first n tokens in order weigh. */
static double mass_of(scratch *s, int32_t n) {
    double mass = 0;
    for (int32_t b = 0; b < s->num_buckets && s->begin[b] < n; b++) {
        if (s->begin[b + 1] <= n) {
            mass += s->mass[b];
            continue;
        }
        sort_bucket(s, b);
        for (int32_t i = s->begin[b]; i < n; i++) mass += s->w[token_of(s->keys[i])];
    }
    return mass;
}

/* Of the first n tokens in order, the one that a number falls on. */
static int32_t falls_on(scratch *s, int32_t n, double wanted) {
    double running = 0;
    int32_t last = 0; /* bucket with weight */
    for (int32_t b = 0; b < s->num_buckets && s->begin[b] < n; b++) {
        if (s->mass[b] > 0) last = b;
        if (s->begin[b + 1] <= n && running + s->mass[b] <= wanted) {
            running += s->mass[b];
            continue;
        }
        sort_bucket(s, b);
        for (int32_t i = s->begin[b]; i < s->begin[b + 1] && i < n; i++)
            if ((running += s->w[token_of(s->keys[i])]) > wanted) return token_of(s->keys[i]);
    }
    /* Rounding has pointed past the last one that weighs anything. */
    sort_bucket(s, last);
    int32_t i = s->begin[last + 1] < n ? s->begin[last + 1] - 1 : n - 1;
    while (i > s->begin[last] && s->w[token_of(s->keys[i])] == 0) i--;
    return token_of(s->keys[i]);
}

/* In order of likelihood: among what top-k, then top-p, then min-p, then XTC leave. */
static int32_t draw_filtered(scratch *s, const tm_draw *draw, double total, double first, double second,
                             int32_t vocab) {
    int has_top_k = draw->top_k < vocab, has_top_p = draw->top_p < 1, is_struck = second < draw->xtc_probability;
    int is_whole = !has_top_k && !has_top_p && draw->min_p <= 0;
    if (draw->typical_p < 1) total = keep_typical(s, draw->typical_p, total, vocab);
    double needed = has_top_k ? 0 : has_top_p ? (double)draw->top_p * total : first * total;
    int32_t everything = !has_top_k && !has_top_p && (is_struck || !is_whole);
    int32_t n = likeliest(s, everything ? INT64_MAX : has_top_k ? draw->top_k : 0, needed, 0, vocab);
    if (has_top_k && draw->top_k < n) n = (int32_t)draw->top_k;
    if (has_top_p) n = num_inside(s, n, (double)draw->top_p * (has_top_k ? mass_of(s, n) : total));
    if (draw->min_p > 0) {
        int32_t left = 0;
        sort_first(s, n);
        for (int32_t i = 0; i < n; i++)
            if (s->w[token_of(s->keys[i])] >= draw->min_p) s->keys[left++] = s->keys[i];
        one_bucket(s, n = left);
    }
    double kept = is_whole ? total : mass_of(s, n);
    if (is_struck) {
        sort_first(s, n);
        n = exclude_top_choices(s, n, (double)draw->xtc_threshold * kept);
        float top = s->z[token_of(s->keys[0])];
        weigh_again(s, n, top);
        one_bucket(s, n);
        kept = s->mass[0];
    }
    return falls_on(s, n, first * kept);
}

static int32_t draw_row(scratch *s, const tm_draw *draw, const float *x, float top, int32_t vocab) {
    if (draw->temperature == 0) {
        int32_t id = 0;
        while (x[id] != top) id++;
        return id;
    }
    double first, second, total = weigh(s, x, top, draw->temperature, vocab);
    uniforms(draw, &first, &second);
    if (draw->is_filtered) return draw_filtered(s, draw, total, first, second, vocab);
    return draw_plain(s, draw->min_p, total, first, vocab);
}

/* Log-probabilities of the model's own distribution: of the drawn token and the likeliest ones. */
static void tell_logprobs(const tm_sampling *step, int32_t row, const float *raw, float top, scratch *s) {
    double log_total = log(weigh(s, raw, top, 1.0f, step->vocab));
    int32_t wanted = step->draws[row].num_logprobs, count = wanted < step->vocab ? wanted : step->vocab;
    step->logprob[row] = (float)((double)s->z[step->ids[row]] - log_total);
    if (count) likeliest(s, count, 0, 1, step->vocab), sort_first(s, count);
    for (int32_t i = 0; i < count; i++) {
        size_t at = (size_t)row * step->num_logprobs + i;
        step->top_ids[at] = token_of(s->keys[i]);
        step->top_logprobs[at] = (float)((double)s->z[step->top_ids[at]] - log_total);
    }
}

static void sample_row(const tm_sampling *step, int32_t row, scratch *s) {
    const float *raw = step->logits + (size_t)row * step->vocab;
    float top = top_of(raw, step->vocab);
    if (!isfinite(top)) return;
    const float *changed = edited(step, row, raw, s);
    float top_left = changed ? top_of(changed, step->vocab) : top;
    if (!isfinite(top_left)) return;
    step->ids[row] = draw_row(s, step->draws + row, changed ? changed : raw, top_left, step->vocab);
    if (step->draws[row].num_logprobs >= 0) tell_logprobs(step, row, raw, top, s);
}

/* -- a step -------------------------------------------------------------------------------------------------------- */

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t bytes_of_row(int32_t vocab) {
    size_t n = (size_t)vocab, blocks = (n + BLOCK - 1) / BLOCK;
    return 2 * aligned(4 * n) + aligned(8 * blocks) + 2 * aligned(8 * (n + 1)) + aligned(4 * n);
}

size_t NAME(tm_sample_bytes)(int32_t vocab, const tm_pool *pool) {
    return 64 + (size_t)tm_pool_threads(pool) * bytes_of_row(vocab);
}

typedef struct {
    const tm_sampling *step;
    uint8_t *memory;
    _Atomic uint32_t *is_taken; /* [threads]: whether a part of the memory is in use */
} sampling_context;

static void sample_rows(void *argument, int32_t begin, int32_t end) {
    const sampling_context *context = argument;
    int32_t vocab = context->step->vocab, part = 0;
    while (atomic_exchange_explicit(context->is_taken + part, 1, memory_order_acquire)) part++;
    uint8_t *at = context->memory + (size_t)part * bytes_of_row(vocab);
    scratch s;
    s.z = (float *)at, at += aligned(4 * (size_t)vocab);
    s.w = (float *)at, at += aligned(4 * (size_t)vocab);
    s.sums = (double *)at, at += aligned(8 * (((size_t)vocab + BLOCK - 1) / BLOCK));
    s.keys = (uint64_t *)at, at += aligned(8 * ((size_t)vocab + 1)); /* `gather` writes one more */
    s.spare = (uint64_t *)at, at += aligned(8 * ((size_t)vocab + 1));
    s.counts = (int32_t *)at;
    for (int32_t row = begin; row < end; row++) sample_row(context->step, row, &s);
    atomic_store_explicit(context->is_taken + part, 0, memory_order_release);
}

#define MOST_THREADS 1024

void NAME(tm_sample)(const tm_sampling *step, void *memory, tm_pool *pool) {
    _Atomic uint32_t is_taken[MOST_THREADS] = {0};
    sampling_context context = {step, (uint8_t *)aligned((size_t)memory), is_taken};
    tm_parallel(tm_pool_threads(pool) > MOST_THREADS ? NULL : pool, sample_rows, &context, step->num_rows, 1);
}
