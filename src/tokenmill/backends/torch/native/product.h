/* Products of quantised weights: 16 outputs at a time, for one to eight inputs. Included once for each kind of machine.
 *
 * Inside a group the products of bytes are whole numbers, summed exactly; groups are added up in order, in float32. So
 * an output does not depend on how many inputs are computed beside it.
 */

#define TILE 8  /* inputs that share unpacked weights */
#define AHEAD 5 /* blocks between the one that is fetched and the one that is used */

/* A rounded input row: numbers, and for each group its scale and the scaled sum of its numbers. */
typedef struct {
    const int8_t *q;
    const float *scale, *sum;
} input_row;

static int32_t groups_of(int32_t cols) { return (cols + TM_GROUP - 1) / TM_GROUP; }

static size_t block_bytes(int32_t kind) { return kind == TM_INT4 ? TM_INT4_BLOCK : TM_INT8_BLOCK; }

/* Weights are read once, in order: have those on their way that come some blocks later. */
static inline __attribute__((always_inline)) void fetch_ahead(const uint8_t *w, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(w + AHEAD * bytes + i);
}

/* Round one group, or the beginning of one, to numbers of -127 to 127; the rest is zeros. */
static inline void quantise_group(const float *x, int32_t cols, int8_t *q, float *scale, float *total) {
    float filled[TM_GROUP];
    if (cols < TM_GROUP) {
        memset(filled, 0, sizeof filled);
        memcpy(filled, x, (size_t)cols * 4);
        x = filled;
    }
    vf most = splat(0), bad = splat(0);
    for (int i = 0; i < TM_GROUP; i += LANES) {
        vf v = load(x + i);
        most = larger(most, (vf)((vi)v & 0x7fffffff));
        bad += v * 0.0f; /* NaN, if one of them is no number */
    }
    float amax = largest(most) + sum(bad);
    float inverse = amax > 1e-30f ? 127.0f / amax : 0.0f; /* less is nothing, and its inverse would be infinite */
    vf count = splat(0);
    for (int i = 0; i < TM_GROUP; i += LANES) {
        vf v = load(x + i) * inverse;
        vf whole = (v + splat(12582912.0f)) - splat(12582912.0f); /* to the nearest, ties to even */
        store_bytes(q + i, __builtin_convertvector(whole, vi));
        count += whole; /* small whole numbers: exact in any order */
    }
    *scale = amax / 127.0f;
    *total = *scale * sum(count);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

static inline __m512 halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline __m512i four(const int8_t *q) {
    int32_t v;
    memcpy(&v, q, 4);
    return _mm512_set1_epi32(v);
}

/* Four of a group's inputs, from `at` on, for 16 outputs: their products with unsigned bytes are added to the sums.
 * All inputs in turn, so that no addition waits for the one before it.
 */
static inline __attribute__((always_inline)) void add_four(
    __m512i u, int32_t at, const input_row *in, int n, __m512i *whole) {
    for (int t = 0; t < n; t++) whole[t] = _mm512_dpbusd_epi32(whole[t], u, four(in[t].q + at));
}

/* A group's sums, scaled, and shifted by the inputs' own sum. */
static inline __attribute__((always_inline)) void add_group(
    const __m512i *whole, __m512 scale, __m512 shift, int32_t g, const input_row *in, int n, __m512 *acc) {
    for (int t = 0; t < n; t++) {
        __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(in[t].scale[g]));
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[t]), by, acc[t]);
        acc[t] = _mm512_fmadd_ps(shift, _mm512_set1_ps(in[t].sum[g]), acc[t]);
    }
}

static inline __attribute__((always_inline)) void product_int4(
    const uint8_t *w, int32_t groups, const input_row *in, int n, float *const *y) {
    __m512 acc[TILE];
    const __m512i low = _mm512_set1_epi8(15);
    for (int t = 0; t < n; t++) acc[t] = _mm512_setzero_ps();
    for (int32_t g = 0; g < groups; g++, w += TM_INT4_BLOCK) {
        fetch_ahead(w, TM_INT4_BLOCK);
        __m512i whole[TILE];
        for (int t = 0; t < n; t++) whole[t] = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) {
            __m512i both = _mm512_loadu_si512(w + 64 * i);
            add_four(_mm512_and_si512(both, low), g * TM_GROUP + 4 * i, in, n, whole);
            add_four(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), g * TM_GROUP + 16 + 4 * i, in, n, whole);
        }
        add_group(whole, halves(w + 256), halves(w + 288), g, in, n, acc);
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y[t], acc[t]);
}

static inline __attribute__((always_inline)) void product_int8(
    const uint8_t *w, int32_t groups, const input_row *in, int n, float *const *y) {
    __m512 acc[TILE];
    for (int t = 0; t < n; t++) acc[t] = _mm512_setzero_ps();
    for (int32_t g = 0; g < groups; g++, w += TM_INT8_BLOCK) {
        fetch_ahead(w, TM_INT8_BLOCK);
        __m512i whole[TILE];
        for (int t = 0; t < n; t++) whole[t] = _mm512_setzero_si512();
        for (int i = 0; i < 8; i++) add_four(_mm512_loadu_si512(w + 64 * i), g * TM_GROUP + 4 * i, in, n, whole);
        __m512 scale = halves(w + 512);
        /* numbers are stored 128 too large */
        add_group(whole, scale, _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f)), g, in, n, acc);
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y[t], acc[t]);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

static inline __m256 halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

static inline __m256i four(const int8_t *q) {
    int32_t v;
    memcpy(&v, q, 4);
    return _mm256_set1_epi32(v);
}

/* Eight of the sixteen rows. Products of 4-bit numbers fit into 16 bits, 16 of them: they are widened once a group. */
static inline __attribute__((always_inline)) void half_int4(
    const uint8_t *w, int part, int32_t groups, const input_row *in, int n, float *const *y) {
    __m256 acc[TILE];
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int t = 0; t < n; t++) acc[t] = _mm256_setzero_ps();
    for (int32_t g = 0; g < groups; g++, w += TM_INT4_BLOCK) {
        fetch_ahead(w, TM_INT4_BLOCK);
        __m256i u[8];
        for (int i = 0; i < 4; i++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(w + 64 * i + 32 * part));
            u[i] = _mm256_and_si256(both, low);
            u[i + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        __m256 scale = halves(w + 256 + 16 * part), min = halves(w + 288 + 16 * part);
        for (int t = 0; t < n; t++) {
            const int8_t *q = in[t].q + g * TM_GROUP;
            __m256i a = _mm256_setzero_si256();
            for (int i = 0; i < 4; i++) {
                a = _mm256_add_epi16(a, _mm256_maddubs_epi16(u[i], four(q + 4 * i)));
                a = _mm256_add_epi16(a, _mm256_maddubs_epi16(u[i + 4], four(q + 16 + 4 * i)));
            }
            __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(a, ones));
            acc[t] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scale, _mm256_set1_ps(in[t].scale[g])), acc[t]);
            acc[t] = _mm256_fmadd_ps(min, _mm256_set1_ps(in[t].sum[g]), acc[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm256_storeu_ps(y[t] + 8 * part, acc[t]);
}

static inline __attribute__((always_inline)) void product_int4(
    const uint8_t *w, int32_t groups, const input_row *in, int n, float *const *y) {
    half_int4(w, 0, groups, in, n, y);
    half_int4(w, 1, groups, in, n, y);
}

static inline __attribute__((always_inline)) void half_int8(
    const uint8_t *w, int part, int32_t groups, const input_row *in, int n, float *const *y) {
    __m256 acc[TILE];
    const __m256i ones = _mm256_set1_epi16(1), sign = _mm256_set1_epi8((char)0x80);
    for (int t = 0; t < n; t++) acc[t] = _mm256_setzero_ps();
    for (int32_t g = 0; g < groups; g++, w += TM_INT8_BLOCK) {
        fetch_ahead(w, TM_INT8_BLOCK);
        __m256i u[8];
        for (int i = 0; i < 8; i++)
            u[i] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(w + 64 * i + 32 * part)), sign);
        __m256 scale = halves(w + 512 + 16 * part);
        for (int t = 0; t < n; t++) {
            const int8_t *q = in[t].q + g * TM_GROUP;
            __m256i a = _mm256_setzero_si256();
            for (int i = 0; i < 8; i++) {
                __m256i product = _mm256_maddubs_epi16(_mm256_abs_epi8(u[i]), _mm256_sign_epi8(four(q + 4 * i), u[i]));
                a = _mm256_add_epi32(a, _mm256_madd_epi16(product, ones));
            }
            __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(in[t].scale[g]));
            acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), by, acc[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm256_storeu_ps(y[t] + 8 * part, acc[t]);
}

static inline __attribute__((always_inline)) void product_int8(
    const uint8_t *w, int32_t groups, const input_row *in, int n, float *const *y) {
    half_int8(w, 0, groups, in, n, y);
    half_int8(w, 1, groups, in, n, y);
}

#else

static void product_int4(const uint8_t *w, int32_t groups, const input_row *in, int n, float *const *y) {
    for (int t = 0; t < n; t++) memset(y[t], 0, TM_ROWS * sizeof(float));
    for (int32_t g = 0; g < groups; g++, w += TM_INT4_BLOCK) {
        for (int r = 0; r < TM_ROWS; r++) {
            float s = half_at(w + 256 + 2 * r), m = half_at(w + 288 + 2 * r);
            for (int t = 0; t < n; t++) {
                const int8_t *q = in[t].q + g * TM_GROUP;
                int32_t a = 0;
                for (int i = 0; i < 16; i++) {
                    uint8_t both = w[64 * (i / 4) + 4 * r + i % 4];
                    a += (both & 15) * q[i] + (both >> 4) * q[16 + i];
                }
                y[t][r] += (float)a * (s * in[t].scale[g]) + m * in[t].sum[g];
            }
        }
    }
}

static void product_int8(const uint8_t *w, int32_t groups, const input_row *in, int n, float *const *y) {
    for (int t = 0; t < n; t++) memset(y[t], 0, TM_ROWS * sizeof(float));
    for (int32_t g = 0; g < groups; g++, w += TM_INT8_BLOCK) {
        for (int r = 0; r < TM_ROWS; r++) {
            float s = half_at(w + 512 + 2 * r);
            for (int t = 0; t < n; t++) {
                const int8_t *q = in[t].q + g * TM_GROUP;
                int32_t a = 0;
                for (int i = 0; i < TM_GROUP; i++) a += ((int32_t)w[64 * (i / 4) + 4 * r + i % 4] - 128) * q[i];
                y[t][r] += (float)a * (s * in[t].scale[g]);
            }
        }
    }
}

#endif

/* Sixteen outputs of up to eight inputs. The number is a constant in each call: loops unroll. */
static void product_tile(int32_t kind, const uint8_t *w, int32_t groups, const input_row *in, int n, float *const *y) {
#define CASE(N)                                                 \
    case N:                                                     \
        if (kind == TM_INT4) product_int4(w, groups, in, N, y); \
        else product_int8(w, groups, in, N, y);                 \
        break;
    switch (n) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
#undef CASE
}
