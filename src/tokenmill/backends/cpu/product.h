/* Products of quantized weights: 16 outputs at a time, for one to eight inputs. Included once for each kind of machine.
 *
 * Inside a group the products of bytes are whole numbers, summed exactly; groups are added up in order, in float32. So
 * an output does not depend on how many inputs are computed beside it.
 */

#define TILE 8      /* inputs that share unpacked weights */
#define AHEAD 4096  /* bytes between the weights that are fetched and those that are used */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define NO_UNROLL _Pragma("GCC unroll 1")

/* -- rounded inputs ------------------------------------------------------------------------------------------------
 *
 * Up to TILE inputs are a tile. In a tile, four numbers of each input lie side by side, and so do their scales: all that
 * a kernel reads is one stream. A record is, for n inputs and 32 columns,
 *     float scale[n], sum[n]; int32_t minus_sum[n]; int8_t q[8][n][4]
 * with the scaled sum of the numbers and the whole one, and for 256 columns, with whole sums of 32 and of 16 numbers, in pairs,
 *     float scale[n]; int16_t sum32[4][n][2], sum16[8][n][2]; int8_t q[64][n][4]
 */

#define GROUP_INPUT (4 + 4 + 4 + TM_GROUP)
#define SLAB_INPUT (4 + 2 * 8 + 2 * 16 + TM_SLAB)

CONSTANT size_t input_bytes(int slabs) { return slabs ? SLAB_INPUT : GROUP_INPUT; }

/* Kernels are made for some sizes of a tile; the others have inputs that nobody asks for. */
CONSTANT int padded(int n) { return n == 5 ? 6 : n == 7 ? 8 : n; }

static void quantise_numbers(const float *x, int count, int8_t *q, float *scale) {
    vf most = splat(0), bad = splat(0);
    for (int i = 0; i < count; i += LANES) {
        vf v = load(x + i);
        most = larger(most, (vf)((vi)v & 0x7fffffff));
        bad += v * 0.0f; /* NaN, if one of them is no number */
    }
    float amax = largest(most) + sum(bad);
    float inverse = amax > 1e-30f ? 127.0f / amax : 0.0f; /* less is nothing, and its inverse would be infinite */
    for (int i = 0; i < count; i += LANES) {
        vf v = load(x + i) * inverse;
        vf whole = (v + splat(12582912.0f)) - splat(12582912.0f); /* to the nearest, ties to even */
        store_bytes(q + i, __builtin_convertvector(whole, vi));
    }
    *scale = amax / 127.0f;
}

/* Sums of 16 numbers each, of a slab. */
INLINE void sums_of_16(const int8_t *q, int16_t *sums) {
#if defined(__AVX512BW__)
    int16_t eight[TM_SLAB / 8];
    for (int i = 0; i < 4; i++) { /* 128 larger, so that they have no sign */
        __m512i u = _mm512_xor_si512(_mm512_loadu_si512(q + 64 * i), _mm512_set1_epi8((char)0x80));
        _mm_storeu_si128((__m128i *)(eight + 8 * i), _mm512_cvtepi64_epi16(_mm512_sad_epu8(u, _mm512_setzero_si512())));
    }
    __m512i two = _mm512_madd_epi16(_mm512_loadu_si512(eight), _mm512_set1_epi16(1));
    two = _mm512_sub_epi32(two, _mm512_set1_epi32(16 * 128));
    _mm256_storeu_si256((__m256i *)sums, _mm512_cvtepi32_epi16(two));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
        __m256i four[4];
        for (int k = 0; k < 4; k++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(q + 128 * i + 32 * k));
            four[k] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), _mm256_set1_epi16(1));
        }
        __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(four[0], four[1]), _mm256_hadd_epi32(four[2], four[3]));
        __m128i first = _mm_and_si128(_mm256_castsi256_si128(all), _mm_set1_epi32(0xffff)); /* halves of each 32 */
        __m128i second = _mm_slli_epi32(_mm256_extracti128_si256(all, 1), 16);
        _mm_storeu_si128((__m128i *)(sums + 8 * i), _mm_or_si128(first, second));
    }
#else
    for (int g = 0; g < TM_SLAB / 16; g++) {
        int32_t total = 0;
        for (int i = 0; i < 16; i++) total += q[16 * g + i];
        sums[g] = (int16_t)total;
    }
#endif
}

INLINE void put_words(uint8_t *to, const void *words, int count, int n) {
    for (int i = 0; i < count; i++) memcpy(to + 4 * i * n, (const uint8_t *)words + 4 * i, 4);
}

/* Round the numbers of a slab, by groups of 32, to -127 to 127. Input t of n in its tile; so many of its groups. */
static void quantise_groups(const float *x, int groups, uint8_t *record, int n, int t) {
    int8_t q[TM_SLAB];
    int16_t sums[TM_SLAB / 16];
    float scale[SPANS];
    for (int g = 0; g < groups; g++) quantise_numbers(x + TM_GROUP * g, TM_GROUP, q + TM_GROUP * g, &scale[g]);
    if (groups < SPANS) memset(q + TM_GROUP * groups, 0, (size_t)TM_GROUP * (SPANS - groups));
    sums_of_16(q, sums);
    for (int g = 0; g < groups; g++, record += n * GROUP_INPUT) {
        int32_t minus = -(sums[2 * g] + sums[2 * g + 1]);
        float total = scale[g] * (float)-minus;
        memcpy(record + 4 * t, &scale[g], 4);
        memcpy(record + 4 * (n + t), &total, 4);
        memcpy(record + 4 * (2 * n + t), &minus, 4);
        put_words(record + 12 * n + 4 * t, q + TM_GROUP * g, TM_GROUP / 4, n);
    }
}

/* The same by 256. */
static void quantise_slab(const float *x, uint8_t *record, int n, int t) {
    int8_t q[TM_SLAB];
    int16_t sums[TM_SLAB / 16], pairs[SPANS];
    float scale;
    quantise_numbers(x, TM_SLAB, q, &scale);
    sums_of_16(q, sums);
    for (int i = 0; i < SPANS; i++) pairs[i] = (int16_t)(sums[2 * i] + sums[2 * i + 1]);
    memcpy(record + 4 * t, &scale, 4);
    put_words(record + 4 * n + 4 * t, pairs, SPANS / 2, n);
    put_words(record + 20 * n + 4 * t, sums, SPANS, n);
    put_words(record + 52 * n + 4 * t, q, TM_SLAB / 4, n);
}

static inline int32_t word_at(const uint8_t *at) {
    int32_t v;
    memcpy(&v, at, 4);
    return v;
}

static inline float float_at(const uint8_t *at) {
    float v;
    memcpy(&v, at, 4);
    return v;
}

/* -- weights ------------------------------------------------------------------------------------------------------- */

/* Weights are read once, in order: have those on their way that come some time later. */
INLINE void fetch_ahead(const uint8_t *w, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(w + AHEAD + i);
}

/* The code of zero is a power of two. */
CONSTANT int log_of_zero(int32_t kind) { return __builtin_ctz((unsigned)code_of_zero(kind)); }

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

#define ROW_BLOCKS 2 /* that are multiplied together */

/* Is what comes AHEAD of a block past the row's end? The next pair of rows begins a row later than there. */
CONSTANT int is_last(int kind, int32_t block, int32_t blocks) { return block + AHEAD / (int)block_bytes(kind) >= blocks; }

INLINE void fetch_pair_ahead(const uint8_t *w, size_t stride, int bytes) {
    fetch_ahead(w, bytes);
    fetch_ahead(w + stride, bytes);
}

/* What the products of a group begin with, so that codes count from the code of zero. */
INLINE __m512i offset(int kind, int32_t minus_sum) {
    return _mm512_slli_epi32(_mm512_set1_epi32(minus_sum), log_of_zero(kind));
}

INLINE __m512 halves(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

/* The codes of a span's quad j as bytes. */
INLINE __m512i unpack(int kind, const uint8_t *w, int j) {
    int bits = code_bits(kind);
    if (bits == 8) return _mm512_loadu_si512(w + 64 * j);
    __m512i u;
    if (bits >= 4) {
        u = _mm512_loadu_si512(w + 64 * (j % 4));
        u = _mm512_and_si512(j < 4 ? u : _mm512_srli_epi16(u, 4), _mm512_set1_epi8(15));
        if (is_table(kind))
            u = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)IQ4_VALUES)), u);
        w += 256;
    } else {
        u = _mm512_srli_epi16(_mm512_loadu_si512(w + 64 * (j / 4)), 2 * (j % 4));
        u = _mm512_and_si512(u, _mm512_set1_epi8(3));
        w += 128;
    }
    if (bits == 6) { /* u | (two bits << 4) */
        __m512i two = _mm512_loadu_si512(w + 64 * (j / 4));
        int shift = 4 - 2 * (j % 4);
        two = shift >= 0 ? _mm512_slli_epi16(two, shift) : _mm512_srli_epi16(two, -shift);
        return _mm512_ternarylogic_epi32(u, two, _mm512_set1_epi8(0x30), 0xf8);
    }
    if (bits % 2) {
        int to = bits - 1;
        __m512i one = _mm512_loadu_si512(w);
        one = j <= to ? _mm512_slli_epi16(one, to - j) : _mm512_srli_epi16(one, j - to);
        return _mm512_ternarylogic_epi32(u, one, _mm512_set1_epi8((char)(1 << to)), 0xf8);
    }
    return u;
}

/* Inputs of which the products of a group are summed at a time: with the sums of all inputs they fit into registers. */
#define AT_ONCE 4

CONSTANT int up_to(int first, int n) { return n - first < AT_ONCE ? n - first : AT_ONCE; }

/* Products of a span's quads from `low` on with some of n inputs, added to the sums: both blocks of rows use an input
 * while it is there, and all inputs take turns, so that no addition waits for the one before it. */
INLINE void add_quads(int kind, const uint8_t *w, size_t stride, const uint8_t *q, int n, int first, int low, int high,
    __m512i whole[2][AT_ONCE]) {
    UNROLL
    for (int j = low; j < high; j++) {
        __m512i u = unpack(kind, w, j), v = unpack(kind, w + stride, j);
        UNROLL
        for (int t = 0; t < up_to(first, n); t++) {
            __m512i x = _mm512_set1_epi32(word_at(q + 4 * (j * n + first + t)));
            whole[0][t] = _mm512_dpbusd_epi32(whole[0][t], u, x);
            whole[1][t] = _mm512_dpbusd_epi32(whole[1][t], v, x);
        }
    }
}

/* Twelve sums of products side by side; two operations for each of 64 bytes. */
static int64_t peak_products(int32_t rounds) {
    __m512i u = _mm512_set1_epi8(3);
    for (int32_t i = 0; i < rounds; i++)
#define ADD(N) "vpdpbusd %0, %0, %%zmm" #N "\n\t"
        __asm__ volatile(ADD(0) ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7) ADD(8) ADD(9) ADD(10) ADD(11)
            : : "v"(u) : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11");
#undef ADD
    return (int64_t)rounds * 12 * 128;
}

INLINE void product_groups(
    int kind, const uint8_t *w, size_t stride, int32_t groups, const uint8_t *in, int n, float out[][TM_ROWS]) {
    __m512 acc[2][TILE];
    for (int t = 0; t < n; t++) acc[0][t] = acc[1][t] = _mm512_setzero_ps();
    for (int32_t g = 0; g < groups; g++, w += block_bytes(kind), in += n * GROUP_INPUT) {
        fetch_pair_ahead(w + (is_last(kind, g, groups) ? stride : 0), stride, (int)block_bytes(kind));
        UNROLL
        for (int first = 0; first < n; first += AT_ONCE) {
            __m512i whole[2][AT_ONCE];
            UNROLL
            for (int t = 0; t < up_to(first, n); t++)
                whole[0][t] = whole[1][t] =
                    has_minima(kind) ? _mm512_setzero_si512() : offset(kind, word_at(in + 4 * (2 * n + first + t)));
            add_quads(kind, w, stride, in + 12 * n, n, first, 0, 8, whole);
            UNROLL
            for (int half = 0; half < 2; half++) {
                const uint8_t *units = w + half * stride + units_at(kind);
                __m512 scale = halves(units), min = has_minima(kind) ? halves(units + 32) : scale;
                UNROLL
                for (int t = 0; t < up_to(first, n); t++) {
                    const uint8_t *own = in + 4 * (first + t);
                    __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(float_at(own)));
                    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[half][t]), by, acc[half][first + t]);
                    if (has_minima(kind)) sum = _mm512_fmadd_ps(min, _mm512_set1_ps(float_at(own + 4 * n)), sum);
                    acc[half][first + t] = sum;
                }
            }
        }
    }
    for (int t = 0; t < n; t++) {
        _mm512_storeu_ps(out[t], acc[0][t]);
        _mm512_storeu_ps(out[n + t], acc[1][t]);
    }
}

/* Small numbers of a pair of groups, 16 bits each: of the first one, of the second one. */
INLINE __m512i pair_at(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *)p)); }
INLINE __m512i first_of(__m512i pair) { return _mm512_srai_epi32(_mm512_slli_epi32(pair, 16), 16); }
INLINE __m512i second_of(__m512i pair) { return _mm512_srai_epi32(pair, 16); }

/* Products of unsigned bytes with four numbers of an input, added to the sums. The compiler would load the numbers with
 * an instruction of their own. */
INLINE __m512i add_products(__m512i whole, __m512i u, const uint8_t *q) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(whole) : "v"(u), "m"(*(const int32_t *)q));
    return whole;
}

/* The products of one group with all inputs, times its scale. */
INLINE void add_scaled_quads(
    int kind, const uint8_t *w, const uint8_t *q, int n, int low, int high, __m512i scale, __m512i *total) {
    __m512i whole[TILE];
    for (int t = 0; t < n; t++) whole[t] = _mm512_setzero_si512();
    UNROLL
    for (int j = low; j < high; j++) {
        __m512i u = unpack(kind, w, j);
        UNROLL
        for (int t = 0; t < n; t++) whole[t] = add_products(whole[t], u, q + 4 * (j * n + t));
    }
    for (int t = 0; t < n; t++) total[t] = _mm512_add_epi32(total[t], _mm512_mullo_epi32(whole[t], scale));
}

/* One block of rows: two, with a superblock's sums and scales, do not fit into registers, and gain nothing. */
INLINE void one_block_slabs(int kind, const uint8_t *w, int32_t slabs, const uint8_t *in, int n, float out[][TM_ROWS]) {
    int pairs = groups_in_slab(kind) / 2;
    for (int t = 0; t < n; t++) _mm512_storeu_ps(out[t], _mm512_setzero_ps());
    for (int32_t s = 0; s < slabs; s++, w += block_bytes(kind), in += n * SLAB_INPUT) {
        const uint8_t *q = in + n * (SLAB_INPUT - TM_SLAB), *sums = in + n * (groups_in_slab(kind) == 8 ? 4 : 20);
        group_scales scales;
        read_scales(kind, w, &scales);
        __m512i total[TILE];
        for (int t = 0; t < n; t++) total[t] = _mm512_setzero_si512();
        for (int p = 0; p < pairs; p++) {
            __m512i pair = pair_at(scales.scale + 32 * p);
            const uint8_t *span = w + (size_t)p * (8 / pairs) * span_bytes(kind), *numbers = q + p * (8 / pairs) * 32 * n;
            fetch_ahead(span, 8 / pairs * (int)span_bytes(kind));
            if (pairs == 8) {
                add_scaled_quads(kind, span, numbers, n, 0, 4, first_of(pair), total);
                add_scaled_quads(kind, span, numbers, n, 4, 8, second_of(pair), total);
            } else {
                add_scaled_quads(kind, span, numbers, n, 0, 8, first_of(pair), total);
                add_scaled_quads(kind, span + span_bytes(kind), numbers + 32 * n, n, 0, 8, second_of(pair), total);
            }
        }
        fetch_ahead(w + units_at(kind), (int)(block_bytes(kind) - units_at(kind)));
        __m512i shift[TILE];
        for (int t = 0; t < n; t++) shift[t] = _mm512_setzero_si512();
        for (int p = 0; p < pairs; p++) {
            __m512i pair = pair_at((has_minima(kind) ? scales.min : scales.scale) + 32 * p);
            for (int t = 0; t < n; t++)
                shift[t] = _mm512_dpwssd_epi32(shift[t], pair, _mm512_set1_epi32(word_at(sums + 4 * (p * n + t))));
        }
        __m512 unit = halves(w + units_at(kind)), least = has_minima(kind) ? halves(w + units_at(kind) + 32) : unit;
        for (int t = 0; t < n; t++) {
            __m512 sum;
            if (has_minima(kind)) {
                sum = _mm512_mul_ps(_mm512_cvtepi32_ps(total[t]), unit);
                sum = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(shift[t]), least, sum);
            } else {
                __m512i zero = _mm512_slli_epi32(shift[t], log_of_zero(kind));
                sum = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(total[t], zero)), unit);
            }
            __m512 before = _mm512_loadu_ps(out[t]);
            _mm512_storeu_ps(out[t], _mm512_fmadd_ps(sum, _mm512_set1_ps(float_at(in + 4 * t)), before));
        }
    }
}

INLINE void product_slabs(
    int kind, const uint8_t *w, size_t stride, int32_t slabs, const uint8_t *in, int n, float out[][TM_ROWS]) {
    NO_UNROLL
    for (int half = 0; half < (stride ? 2 : 1); half++) one_block_slabs(kind, w + half * stride, slabs, in, n, out + half * n);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

INLINE __m256 halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

INLINE __m256i bytes_at(const uint8_t *w) { return _mm256_loadu_si256((const __m256i *)w); }

/* The codes of a span's quad j as bytes, for the eight rows from w on; those of a table as signed ones. */
INLINE __m256i unpack(int kind, const uint8_t *w, int j) {
    int bits = code_bits(kind);
    if (bits == 8) return _mm256_xor_si256(bytes_at(w + 64 * j), _mm256_set1_epi8((char)0x80));
    __m256i u;
    if (bits >= 4) {
        u = bytes_at(w + 64 * (j % 4));
        u = _mm256_and_si256(j < 4 ? u : _mm256_srli_epi16(u, 4), _mm256_set1_epi8(15));
        if (is_table(kind)) {
            __m128i table = _mm_loadu_si128((const __m128i *)IQ4_VALUES);
            table = _mm_xor_si128(table, _mm_set1_epi8((char)0x80));
            u = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), u);
        }
        w += 256;
    } else {
        u = _mm256_srli_epi16(bytes_at(w + 64 * (j / 4)), 2 * (j % 4));
        u = _mm256_and_si256(u, _mm256_set1_epi8(3));
        w += 128;
    }
    if (bits == 6) {
        __m256i two = bytes_at(w + 64 * (j / 4));
        int shift = 4 - 2 * (j % 4);
        two = shift >= 0 ? _mm256_slli_epi16(two, shift) : _mm256_srli_epi16(two, -shift);
        return _mm256_or_si256(u, _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
    }
    if (bits % 2) {
        int to = bits - 1;
        __m256i one = bytes_at(w);
        one = j <= to ? _mm256_slli_epi16(one, to - j) : _mm256_srli_epi16(one, j - to);
        return _mm256_or_si256(u, _mm256_and_si256(one, _mm256_set1_epi8((char)(1 << to))));
    }
    return u;
}

CONSTANT int is_signed(int kind) { return kind == TM_Q8_0 || is_table(kind); }

/* Products that fit into 16 bits, summed: 254 times the largest code for each. */
CONSTANT int most_in_16_bits(int kind) { return is_signed(kind) ? 1 : 32767 / (254 * ((1 << code_bits(kind)) - 1)); }

/* Products of a span's quads from `low` on, for one half of the rows or both, with `count` of n inputs, added to the sums:
 * pairs of 16 bits are multiplied by `by`, which is 1 or the group's scale. Both halves use an input while it is there, and
 * all inputs take turns, so that no addition waits for the one before it. */
INLINE void add_quads(int kind, const uint8_t *w, int halves, const uint8_t *q, int n, int count, int low, int high,
    const __m256i *by, __m256i total[2][TILE]) {
    int most = most_in_16_bits(kind);
    __m256i part[2][TILE];
    UNROLL
    for (int j = low; j < high; j++) {
        __m256i u[2], size[2];
        UNROLL
        for (int h = 0; h < halves; h++) {
            u[h] = unpack(kind, w + 32 * h, j);
            size[h] = is_signed(kind) ? _mm256_abs_epi8(u[h]) : u[h];
        }
        UNROLL
        for (int t = 0; t < count; t++) {
            __m256i x = _mm256_set1_epi32(word_at(q + 4 * (j * n + t)));
            UNROLL
            for (int h = 0; h < halves; h++) {
                __m256i product = _mm256_maddubs_epi16(size[h], is_signed(kind) ? _mm256_sign_epi8(x, u[h]) : x);
                part[h][t] = (j - low) % most ? _mm256_add_epi16(part[h][t], product) : product;
                __asm__("" : "+x"(part[h][t])); /* or the compiler keeps all products and adds them up at the end */
                if ((j - low) % most == most - 1 || j == high - 1)
                    total[h][t] = _mm256_add_epi32(total[h][t], _mm256_madd_epi16(part[h][t], by[h]));
            }
        }
    }
}

/* Eight sums of products side by side; two operations for each of 32 bytes. */
static int64_t peak_products(int32_t rounds) {
    __m256i part[TILE], u = _mm256_set1_epi8(3);
    for (int t = 0; t < TILE; t++) part[t] = _mm256_setzero_si256();
    for (int32_t i = 0; i < rounds; i++) {
        UNROLL
        for (int t = 0; t < TILE; t++) {
            __asm__ volatile("" : "+x"(u));
            part[t] = _mm256_add_epi16(part[t], _mm256_maddubs_epi16(u, u));
        }
    }
    for (int t = 0; t < TILE; t++) __asm__ volatile("" : : "x"(part[t]));
    return (int64_t)rounds * TILE * 64;
}

INLINE __m256i offset(int kind, int32_t minus_sum) {
    return _mm256_slli_epi32(_mm256_set1_epi32(minus_sum), log_of_zero(kind));
}

/* Some of n inputs. */
INLINE void some_groups(
    int kind, const uint8_t *w, int32_t groups, const uint8_t *in, int n, int count, float out[][TM_ROWS]) {
    __m256 acc[2][TILE];
    const __m256i ones[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    for (int t = 0; t < count; t++) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
    for (int32_t g = 0; g < groups; g++, w += block_bytes(kind), in += n * GROUP_INPUT) {
        fetch_ahead(w, (int)block_bytes(kind));
        __m256i total[2][TILE];
        for (int t = 0; t < count; t++)
            total[0][t] = total[1][t] =
                has_minima(kind) || is_signed(kind) ? _mm256_setzero_si256() : offset(kind, word_at(in + 4 * (2 * n + t)));
        add_quads(kind, w, 2, in + 12 * n, n, count, 0, 8, ones, total);
        UNROLL
        for (int h = 0; h < 2; h++) {
            const uint8_t *units = w + units_at(kind) + 16 * h;
            __m256 scale = halves(units), min = has_minima(kind) ? halves(units + 32) : scale;
            for (int t = 0; t < count; t++) {
                __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(float_at(in + 4 * t)));
                __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[h][t]), by, acc[h][t]);
                if (has_minima(kind)) sum = _mm256_fmadd_ps(min, _mm256_set1_ps(float_at(in + 4 * (n + t))), sum);
                acc[h][t] = sum;
            }
        }
    }
    for (int t = 0; t < count; t++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(out[t] + 8 * h, acc[h][t]);
}

/* So many sums of both halves of the rows as fit into registers. */
CONSTANT int at_once(int n) { return n == 8 ? 4 : n == 6 ? 3 : n; }

INLINE void product_groups(
    int kind, const uint8_t *w, size_t stride, int32_t groups, const uint8_t *in, int n, float out[][TM_ROWS]) {
    (void)stride;
    NO_UNROLL
    for (int t = 0; t < n; t += at_once(n)) some_groups(kind, w, groups, in + 4 * t, n, at_once(n), out + t);
}

/* Small numbers of a pair of groups, 16 bits each; and those of the first or the second group in both places. */
INLINE __m256i pair_at(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)p)); }
INLINE __m256i twice_first(__m256i pair) {
    return _mm256_or_si256(_mm256_slli_epi32(pair, 16), _mm256_and_si256(pair, _mm256_set1_epi32(0xffff)));
}
INLINE __m256i twice_second(__m256i pair) {
    return _mm256_or_si256(_mm256_srli_epi32(pair, 16), _mm256_and_si256(pair, _mm256_set1_epi32((int)0xffff0000)));
}

/* One half of the rows, or both from the first on. */
INLINE void some_slabs(
    int kind, const uint8_t *w, int first, int num_halves, int32_t slabs, const uint8_t *in, int n, float out[][TM_ROWS]) {
    int pairs = groups_in_slab(kind) / 2;
    __m256 acc[2][TILE];
    for (int t = 0; t < n; t++) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
    for (int32_t s = 0; s < slabs; s++, w += block_bytes(kind), in += n * SLAB_INPUT) {
        const uint8_t *q = in + n * (SLAB_INPUT - TM_SLAB), *sums = in + n * (groups_in_slab(kind) == 8 ? 4 : 20);
        group_scales scales;
        read_scales(kind, w, &scales);
        __m256i total[2][TILE];
        for (int t = 0; t < n; t++) total[0][t] = total[1][t] = _mm256_setzero_si256();
        for (int i = 0; i < SPANS; i++) {
            const uint8_t *span = w + i * span_bytes(kind), *half = span + 32 * first, *numbers = q + 32 * i * n;
            if (first == 0) fetch_ahead(span, (int)span_bytes(kind));
            __m256i by[2], second[2]; /* where a span is two groups: those of the second one */
            for (int h = 0; h < num_halves; h++) {
                __m256i pair = pair_at(scales.scale + 32 * (pairs == 8 ? i : i / 2) + 16 * (first + h));
                second[h] = twice_second(pair);
                by[h] = pairs != 8 && i % 2 ? second[h] : twice_first(pair);
            }
            add_quads(kind, half, num_halves, numbers, n, n, 0, pairs == 8 ? 4 : 8, by, total);
            if (pairs == 8) add_quads(kind, half, num_halves, numbers, n, n, 4, 8, second, total);
        }
        if (first == 0) fetch_ahead(w + units_at(kind), (int)(block_bytes(kind) - units_at(kind)));
        for (int h = 0; h < num_halves; h++) {
            const uint8_t *units = w + units_at(kind) + 16 * (first + h);
            __m256 unit = halves(units), least = has_minima(kind) ? halves(units + 32) : unit;
            for (int t = 0; t < n; t++) {
                __m256i shift = _mm256_setzero_si256();
                for (int p = 0; p < pairs && !is_signed(kind); p++) {
                    __m256i pair = pair_at((has_minima(kind) ? scales.min : scales.scale) + 32 * p + 16 * (first + h));
                    __m256i sum = _mm256_set1_epi32(word_at(sums + 4 * (p * n + t)));
                    shift = _mm256_add_epi32(shift, _mm256_madd_epi16(pair, sum));
                }
                __m256 sum;
                if (has_minima(kind)) {
                    sum = _mm256_mul_ps(_mm256_cvtepi32_ps(total[h][t]), unit);
                    sum = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(shift), least, sum);
                } else {
                    __m256i zero = _mm256_slli_epi32(shift, log_of_zero(kind));
                    sum = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(total[h][t], zero)), unit);
                }
                acc[h][t] = _mm256_fmadd_ps(sum, _mm256_set1_ps(float_at(in + 4 * t)), acc[h][t]);
            }
        }
    }
    for (int t = 0; t < n; t++)
        for (int h = 0; h < num_halves; h++) _mm256_storeu_ps(out[t] + 8 * (first + h), acc[h][t]);
}

/* Codes of superblocks take more to unpack: eight inputs share them, for one half of the rows at a time. */
INLINE void product_slabs(
    int kind, const uint8_t *w, size_t stride, int32_t slabs, const uint8_t *in, int n, float out[][TM_ROWS]) {
    (void)stride;
    if (n <= 4) some_slabs(kind, w, 0, 2, slabs, in, n, out);
    else {
        some_slabs(kind, w, 0, 1, slabs, in, n, out);
        some_slabs(kind, w, 1, 1, slabs, in, n, out);
    }
}

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

INLINE float32x4_t halves(const uint8_t *p) { return vcvt_f32_f16(vld1_f16((const __fp16 *)p)); }

INLINE uint8x16_t shifted(uint8x16_t u, int left) { return vshlq_u8(u, vdupq_n_s8((int8_t)left)); }

/* The codes of a span's quad j as signed bytes, for the four rows from w on: less the code of zero, of types without
 * minima. */
INLINE int8x16_t unpack(int kind, const uint8_t *w, int j) {
    int bits = code_bits(kind);
    uint8x16_t u;
    if (bits == 8) u = vld1q_u8(w + 64 * j);
    else if (bits >= 4) {
        u = vandq_u8(shifted(vld1q_u8(w + 64 * (j % 4)), j < 4 ? 0 : -4), vdupq_n_u8(15));
        if (is_table(kind)) u = vqtbl1q_u8(vld1q_u8(IQ4_VALUES), u);
        w += 256;
    } else {
        u = vandq_u8(shifted(vld1q_u8(w + 64 * (j / 4)), -2 * (j % 4)), vdupq_n_u8(3));
        w += 128;
    }
    if (bits == 6) u = vorrq_u8(u, vandq_u8(shifted(vld1q_u8(w + 64 * (j / 4)), 4 - 2 * (j % 4)), vdupq_n_u8(0x30)));
    else if (bits % 2) u = vorrq_u8(u, vandq_u8(shifted(vld1q_u8(w), bits - 1 - j), vdupq_n_u8((uint8_t)(1 << (bits - 1)))));
    return vreinterpretq_s8_u8(vsubq_u8(u, vdupq_n_u8((uint8_t)code_of_zero(kind))));
}

/* Products of a group's quads with one input. */
INLINE int32x4_t dot(const int8x16_t *u, int count, const uint8_t *q, int n) {
    int32x4_t total = vdupq_n_s32(0);
    for (int j = 0; j < count; j++)
        total = vdotq_s32(total, u[j], vreinterpretq_s8_s32(vdupq_n_s32(word_at(q + 4 * j * n))));
    return total;
}

/* Eight sums of products side by side; two operations for each of 16 bytes. */
static int64_t peak_products(int32_t rounds) {
    int32x4_t part[TILE];
    int8x16_t u = vdupq_n_s8(3);
    for (int t = 0; t < TILE; t++) part[t] = vdupq_n_s32(0);
    for (int32_t i = 0; i < rounds; i++) {
        UNROLL
        for (int t = 0; t < TILE; t++) {
            __asm__ volatile("" : "+w"(u));
            part[t] = vdotq_s32(part[t], u, u);
        }
    }
    for (int t = 0; t < TILE; t++) __asm__ volatile("" : : "w"(part[t]));
    return (int64_t)rounds * TILE * 32;
}

/* Four of the sixteen rows. */
INLINE void quarter_groups(
    int kind, const uint8_t *w, int part, int32_t groups, const uint8_t *in, int n, float out[][TM_ROWS]) {
    float32x4_t acc[TILE];
    for (int t = 0; t < n; t++) acc[t] = vdupq_n_f32(0);
    for (int32_t g = 0; g < groups; g++, w += block_bytes(kind), in += n * GROUP_INPUT) {
        if (part == 0) fetch_ahead(w, (int)block_bytes(kind));
        int8x16_t u[8];
        for (int j = 0; j < 8; j++) u[j] = unpack(kind, w + 16 * part, j);
        float32x4_t scale = halves(w + units_at(kind) + 8 * part), min = scale;
        if (has_minima(kind)) min = halves(w + units_at(kind) + 32 + 8 * part);
        for (int t = 0; t < n; t++) {
            float32x4_t whole = vcvtq_f32_s32(dot(u, 8, in + 12 * n + 4 * t, n));
            acc[t] = vfmaq_f32(acc[t], whole, vmulq_n_f32(scale, float_at(in + 4 * t)));
            if (has_minima(kind)) acc[t] = vfmaq_n_f32(acc[t], min, float_at(in + 4 * (n + t)));
        }
    }
    for (int t = 0; t < n; t++) vst1q_f32(out[t] + 4 * part, acc[t]);
}

INLINE void product_groups(
    int kind, const uint8_t *w, size_t stride, int32_t groups, const uint8_t *in, int n, float out[][TM_ROWS]) {
    (void)stride;
    for (int part = 0; part < 4; part++) quarter_groups(kind, w, part, groups, in, n, out);
}

/* Small numbers of a pair of groups, for four rows: of the first one, of the second one. */
INLINE int32x4x2_t pair_at(const int8_t *p) {
    int16x8_t pair = vmovl_s8(vld1_s8(p));
    int32x4x2_t both = {{vmovl_s16(vget_low_s16(vuzp1q_s16(pair, pair))), vmovl_s16(vget_low_s16(vuzp2q_s16(pair, pair)))}};
    return both;
}

INLINE void quarter_slabs(
    int kind, const uint8_t *w, int part, int32_t slabs, const uint8_t *in, int n, float out[][TM_ROWS]) {
    int pairs = groups_in_slab(kind) / 2;
    float32x4_t acc[TILE];
    for (int t = 0; t < n; t++) acc[t] = vdupq_n_f32(0);
    for (int32_t s = 0; s < slabs; s++, w += block_bytes(kind), in += n * SLAB_INPUT) {
        const uint8_t *q = in + n * (SLAB_INPUT - TM_SLAB), *sums = in + n * (groups_in_slab(kind) == 8 ? 4 : 20);
        group_scales scales;
        read_scales(kind, w, &scales);
        int32x4_t total[TILE], shift[TILE];
        for (int t = 0; t < n; t++) total[t] = shift[t] = vdupq_n_s32(0);
        for (int i = 0; i < SPANS; i++) {
            const uint8_t *span = w + i * span_bytes(kind);
            if (part == 0) fetch_ahead(span, (int)span_bytes(kind));
            int8x16_t u[8];
            for (int j = 0; j < 8; j++) u[j] = unpack(kind, span + 16 * part, j);
            int32x4x2_t pair = pair_at(scales.scale + 32 * (pairs == 8 ? i : i / 2) + 8 * part);
            for (int t = 0; t < n; t++) {
                const uint8_t *numbers = q + 32 * i * n + 4 * t;
                if (pairs == 8) {
                    total[t] = vmlaq_s32(total[t], dot(u, 4, numbers, n), pair.val[0]);
                    total[t] = vmlaq_s32(total[t], dot(u + 4, 4, numbers + 16 * n, n), pair.val[1]);
                } else total[t] = vmlaq_s32(total[t], dot(u, 8, numbers, n), pair.val[i % 2]);
            }
        }
        for (int p = 0; p < pairs && has_minima(kind); p++) {
            int32x4x2_t pair = pair_at(scales.min + 32 * p + 8 * part);
            for (int t = 0; t < n; t++) {
                int16_t two[2];
                memcpy(two, sums + 4 * (p * n + t), 4);
                shift[t] = vmlaq_n_s32(vmlaq_n_s32(shift[t], pair.val[0], two[0]), pair.val[1], two[1]);
            }
        }
        if (part == 0) fetch_ahead(w + units_at(kind), (int)(block_bytes(kind) - units_at(kind)));
        float32x4_t unit = halves(w + units_at(kind) + 8 * part), least = unit;
        if (has_minima(kind)) least = halves(w + units_at(kind) + 32 + 8 * part);
        for (int t = 0; t < n; t++) {
            float32x4_t sum = vmulq_f32(vcvtq_f32_s32(total[t]), unit);
            if (has_minima(kind)) sum = vfmsq_f32(sum, vcvtq_f32_s32(shift[t]), least);
            acc[t] = vfmaq_n_f32(acc[t], sum, float_at(in + 4 * t));
        }
    }
    for (int t = 0; t < n; t++) vst1q_f32(out[t] + 4 * part, acc[t]);
}

INLINE void product_slabs(
    int kind, const uint8_t *w, size_t stride, int32_t slabs, const uint8_t *in, int n, float out[][TM_ROWS]) {
    (void)stride;
    for (int part = 0; part < 4; part++) quarter_slabs(kind, w, part, slabs, in, n, out);
}

#else

static int64_t peak_products(int32_t rounds) {
    volatile int8_t a = 3, b = 5;
    int32_t total = 0;
    for (int32_t i = 0; i < rounds; i++) total += a * b;
    return total ? 2 * (int64_t)rounds : 0;
}

static void product_groups(
    int kind, const uint8_t *w, size_t stride, int32_t groups, const uint8_t *in, int n, float out[][TM_ROWS]) {
    (void)stride;
    for (int t = 0; t < n; t++) memset(out[t], 0, TM_ROWS * sizeof(float));
    for (int32_t g = 0; g < groups; g++, w += block_bytes(kind), in += n * GROUP_INPUT)
        for (int r = 0; r < TM_ROWS; r++) {
            uint8_t codes[TM_GROUP];
            read_codes(kind, w, r, codes);
            float scale = half_at(w + units_at(kind) + 2 * r);
            float min = has_minima(kind) ? half_at(w + units_at(kind) + 32 + 2 * r) : 0.0f;
            int32_t zero = code_of_zero(kind);
            for (int t = 0; t < n; t++) {
                const int8_t *q = (const int8_t *)in + 12 * n + 4 * t;
                int32_t a = 0;
                for (int i = 0; i < TM_GROUP; i++) a += ((int32_t)codes[i] - zero) * q[i / 4 * 4 * n + i % 4];
                float value = (float)a * (scale * float_at(in + 4 * t));
                out[t][r] += has_minima(kind) ? value + min * float_at(in + 4 * (n + t)) : value;
            }
        }
}

static void product_slabs(
    int kind, const uint8_t *w, size_t stride, int32_t slabs, const uint8_t *in, int n, float out[][TM_ROWS]) {
    (void)stride;
    int groups = groups_in_slab(kind), width = TM_SLAB / groups;
    for (int t = 0; t < n; t++) memset(out[t], 0, TM_ROWS * sizeof(float));
    for (int32_t s = 0; s < slabs; s++, w += block_bytes(kind), in += n * SLAB_INPUT) {
        group_scales scales;
        read_scales(kind, w, &scales);
        for (int r = 0; r < TM_ROWS; r++) {
            uint8_t codes[TM_SLAB];
            for (int i = 0; i < SPANS; i++) read_codes(kind, w + i * span_bytes(kind), r, codes + TM_GROUP * i);
            float unit = half_at(w + units_at(kind) + 2 * r);
            float least = has_minima(kind) ? half_at(w + units_at(kind) + 32 + 2 * r) : 0.0f;
            for (int t = 0; t < n; t++) {
                const int8_t *q = (const int8_t *)in + n * (SLAB_INPUT - TM_SLAB) + 4 * t;
                int32_t total = 0, shift = 0;
                for (int g = 0; g < groups; g++) {
                    int32_t a = 0, sum = 0, at = 32 * (g / 2) + 2 * r + g % 2;
                    for (int i = g * width; i < (g + 1) * width; i++) {
                        int32_t x = q[i / 4 * 4 * n + i % 4];
                        a += ((int32_t)codes[i] - code_of_zero(kind)) * x;
                        sum += x;
                    }
                    total += scales.scale[at] * a;
                    if (has_minima(kind)) shift += scales.min[at] * sum;
                }
                float value = (float)total * unit;
                if (has_minima(kind)) value -= (float)shift * least;
                out[t][r] += value * float_at(in + 4 * t);
            }
        }
    }
}

#endif

#ifndef ROW_BLOCKS
#define ROW_BLOCKS 1
#endif

/* Outputs of a tile of inputs: all sixteen of ROW_BLOCKS blocks of rows, `stride` bytes apart, as [blocks of rows][inputs].
 * Type and number are constants in each call: loops unroll. */
typedef void (*tile_product)(const uint8_t *w, size_t stride, int32_t blocks, const uint8_t *in, float out[][TM_ROWS]);

#define TILE_PRODUCT(KIND, N)                                                                                    \
    static void product_##KIND##_##N(                                                                            \
        const uint8_t *w, size_t stride, int32_t blocks, const uint8_t *in, float out[][TM_ROWS]) {              \
        if (has_slabs(TM_##KIND)) product_slabs(TM_##KIND, w, stride, blocks, in, N, out);                       \
        else product_groups(TM_##KIND, w, stride, blocks, in, N, out);                                           \
    }
#define EACH_KIND(DO) \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(IQ4_NL) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_XS)
#define TILE_PRODUCTS(KIND)                                                                           \
    TILE_PRODUCT(KIND, 1) TILE_PRODUCT(KIND, 2) TILE_PRODUCT(KIND, 3) TILE_PRODUCT(KIND, 4)           \
    TILE_PRODUCT(KIND, 6) TILE_PRODUCT(KIND, 8)
EACH_KIND(TILE_PRODUCTS)

static tile_product product_of(int32_t kind, int n) {
#define CASE(KIND)                                                                                   \
    case TM_##KIND: {                                                                                \
        static const tile_product sizes[] = {NULL, product_##KIND##_1, product_##KIND##_2,           \
            product_##KIND##_3, product_##KIND##_4, product_##KIND##_6, product_##KIND##_6,          \
            product_##KIND##_8, product_##KIND##_8};                                                 \
        return sizes[n];                                                                             \
    }
    switch (kind) { EACH_KIND(CASE) }
#undef CASE
    return NULL;
}
