/* Vectors of floats, as wide as the machine has them, and the few things that differ between machines. */
#ifndef TOKENMILL_LANES_H
#define TOKENMILL_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

static inline vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

static inline vf splat(float x) { return x - (vf){0}; }

/* Larger of each pair; NaN where b is NaN. */
static inline vf larger(vf a, vf b) {
    vi keep = (vi)(a > b);
    return (vf)((keep & (vi)a) | (~keep & (vi)b));
}

static inline float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
    __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/* NaN counts for nothing here. */
static inline float largest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
    __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
#else
    float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
#endif
}

/* Numbers of -127 to 127 as bytes. */
static inline void store_bytes(int8_t *p, vi n) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)n));
#elif defined(__AVX2__)
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)n), _mm256_extracti128_si256((__m256i)n, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(halves, halves));
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)n[i];
#endif
}

/* e to the x: exact to about 2 units in the last place; 0 far below, infinity far above, NaN for NaN. */
static inline vf vexp(vf x) {
    vi low = (vi)(x < splat(-87.3f)), high = (vi)(x > splat(88.37f)), bad = (vi)(x != x);
    vf clipped = (vf)((~(low | high | bad)) & (vi)x);
    vf scaled = clipped * 1.44269504088896341f;
    vf rounded = (scaled + splat(12582912.0f)) - splat(12582912.0f);
    vf r = clipped - rounded * 0.693359375f;
    r = r - rounded * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    vi exponent = (__builtin_convertvector(rounded, vi) + 127) << 23;
    vf y = p * (vf)exponent;
    y = (vf)((~low & (vi)y));
    y = (vf)((high & (vi)splat(INFINITY)) | (~high & (vi)y));
    return (vf)((bad & (vi)x) | (~bad & (vi)y));
}

static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff, bits;
    if (exponent == 31) bits = sign | 0x7f800000u | (fraction << 13);
    else if (exponent) bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    else {
        float f = (float)fraction * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline float half_at(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return half_to_float(half);
}

/* To the nearest half, ties to even. */
static inline uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000u) { /* subnormal: the float's own rounding does it */
        float tiny;
        memcpy(&tiny, &magnitude, 4);
        tiny += 0.5f;
        uint32_t t;
        memcpy(&t, &tiny, 4);
        return (uint16_t)(sign | (t - 0x3f000000u));
    }
    uint32_t odd = (magnitude >> 13) & 1;
    return (uint16_t)(sign | ((magnitude + 0xfff + odd - 0x38000000u) >> 13));
}

static inline vf load_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON)
    return (vf)vcvt_f32_f16(vld1_f16((const __fp16 *)p));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

/* Signed bytes. */
static inline vf load_bytes(const int8_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = (float)p[i];
    return v;
#endif
}

/* Rows to columns of a square. */
static inline void transpose(vf *v) {
#if defined(__AVX512F__)
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            __m512d x = _mm512_castps_pd(a[i + k]), y = _mm512_castps_pd(a[i + k + 2]);
            b[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            b[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    for (int k = 0; k < 4; k++) { /* b[4 * i + k] has columns k, k + 4, k + 8 and k + 12 of rows 4 * i to 4 * i + 3 */
        __m512 low = _mm512_shuffle_f32x4(b[k], b[4 + k], 0x88), high = _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0x88);
        v[k] = (vf)_mm512_shuffle_f32x4(low, high, 0x88);
        v[8 + k] = (vf)_mm512_shuffle_f32x4(low, high, 0xdd);
        low = _mm512_shuffle_f32x4(b[k], b[4 + k], 0xdd), high = _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0xdd);
        v[4 + k] = (vf)_mm512_shuffle_f32x4(low, high, 0x88);
        v[12 + k] = (vf)_mm512_shuffle_f32x4(low, high, 0xdd);
    }
#elif defined(__AVX2__)
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
            b[i + 2 * k] = _mm256_shuffle_ps(a[i + k], a[i + k + 2], 0x44);
            b[i + 2 * k + 1] = _mm256_shuffle_ps(a[i + k], a[i + k + 2], 0xee);
        }
    for (int k = 0; k < 4; k++) {
        v[k] = (vf)_mm256_permute2f128_ps(b[k], b[4 + k], 0x20);
        v[4 + k] = (vf)_mm256_permute2f128_ps(b[k], b[4 + k], 0x31);
    }
#else
    float from[LANES][LANES], to[LANES][LANES];
    memcpy(from, v, sizeof from);
    for (int i = 0; i < LANES; i++)
        for (int k = 0; k < LANES; k++) to[k][i] = from[i][k];
    memcpy(v, to, sizeof to);
#endif
}

static inline void store_halves(uint16_t *p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__ARM_NEON)
    vst1_f16((__fp16 *)p, vcvt_f16_f32((float32x4_t)v));
#else
    for (int i = 0; i < LANES; i++) p[i] = float_to_half(v[i]);
#endif
}

#endif
