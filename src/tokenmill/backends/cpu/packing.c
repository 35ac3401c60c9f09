/* From the bytes of GGUF files to blocks (blocks.h), and back to values. */
#include "blocks.h"
#include "pool.h"

/* -- one block of a file ------------------------------------------------------------------------------------------- */

/* A file's block of one row, 32 or 256 columns: codes, scales and minima as they are stored. */
typedef struct {
    uint16_t unit, least; /* half precision */
    uint8_t codes[TM_SLAB];
    uint8_t scale[16], min[16]; /* of the groups of a superblock */
} file_block;

static size_t file_block_bytes(int32_t kind) {
    switch (kind) {
        case TM_Q4_0: case TM_IQ4_NL: return 18;
        case TM_Q4_1: return 20;
        case TM_Q5_0: return 22;
        case TM_Q5_1: return 24;
        case TM_Q8_0: return 34;
        case TM_Q2_K: return 84;
        case TM_Q3_K: return 110;
        case TM_Q4_K: return 144;
        case TM_Q5_K: return 176;
        case TM_Q6_K: return 210;
        case TM_IQ4_XS: return 136;
        default: return 0;
    }
}

static uint16_t short_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Pairs of 4-bit codes: the low halves of some bytes, then the high ones. */
static void two_nibbles(const uint8_t *from, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) {
        codes[i] = from[i] & 15;
        codes[count + i] = from[i] >> 4;
    }
}

static void add_bit(const uint8_t *bits, int shift, int count, uint8_t value, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] |= (uint8_t)((bits[i] >> shift & 1) * value);
}

static void read_q4(const uint8_t *p, int has_min, file_block *out) {
    out->unit = short_at(p);
    out->least = has_min ? short_at(p + 2) : 0;
    two_nibbles(p + (has_min ? 4 : 2), 16, out->codes);
}

static void read_q5(const uint8_t *p, int has_min, file_block *out) {
    out->unit = short_at(p);
    out->least = has_min ? short_at(p + 2) : 0;
    p += has_min ? 4 : 2;
    two_nibbles(p + 4, 16, out->codes);
    for (int i = 0; i < 32; i++) out->codes[i] |= (uint8_t)((p[i / 8] >> i % 8 & 1) << 4);
}

static void read_q8(const uint8_t *p, file_block *out) {
    out->unit = short_at(p);
    for (int i = 0; i < 32; i++) out->codes[i] = (uint8_t)(p[2 + i] ^ 0x80);
}

/* Sixty-four pairs of codes of 2 bits: four times 32 of each half. */
static void two_bits(const uint8_t *from, uint8_t *codes) {
    for (int half = 0; half < 2; half++, from += 32)
        for (int j = 0; j < 4; j++, codes += 32)
            for (int i = 0; i < 32; i++) codes[i] = from[i] >> 2 * j & 3;
}

static void read_q2_k(const uint8_t *p, file_block *out) {
    for (int g = 0; g < 16; g++) {
        out->scale[g] = p[g] & 15;
        out->min[g] = p[g] >> 4;
    }
    two_bits(p + 16, out->codes);
    out->unit = short_at(p + 80);
    out->least = short_at(p + 82);
}

static void read_q3_k(const uint8_t *p, file_block *out) {
    two_bits(p + 32, out->codes);
    for (int j = 0; j < 8; j++) add_bit(p, j, 32, 4, out->codes + 32 * j);
    const uint8_t *scales = p + 96;
    for (int g = 0; g < 16; g++)
        out->scale[g] = (uint8_t)((scales[g % 8] >> 4 * (g / 8) & 15) | (scales[8 + g % 4] >> 2 * (g / 4) & 3) << 4);
    out->unit = short_at(p + 108);
}

/* Eight scales and eight minima of 6 bits in 12 bytes. */
static void read_scales_k(const uint8_t *p, file_block *out) {
    for (int g = 0; g < 4; g++) {
        out->scale[g] = p[g] & 63;
        out->min[g] = p[4 + g] & 63;
        out->scale[4 + g] = (uint8_t)((p[8 + g] & 15) | p[g] >> 6 << 4);
        out->min[4 + g] = (uint8_t)(p[8 + g] >> 4 | p[4 + g] >> 6 << 4);
    }
}

static void read_q4_k(const uint8_t *p, int has_bit, file_block *out) {
    out->unit = short_at(p);
    out->least = short_at(p + 2);
    read_scales_k(p + 4, out);
    const uint8_t *low = p + (has_bit ? 48 : 16);
    for (int j = 0; j < 4; j++) two_nibbles(low + 32 * j, 32, out->codes + 64 * j);
    for (int j = 0; has_bit && j < 8; j++) add_bit(p + 16, j, 32, 16, out->codes + 32 * j);
}

static void read_q6_k(const uint8_t *p, file_block *out) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
        uint8_t *codes = out->codes + 128 * half;
        for (int i = 0; i < 32; i++) {
            codes[i] = (uint8_t)((low[i] & 15) | (high[i] & 3) << 4);
            codes[32 + i] = (uint8_t)((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
            codes[64 + i] = (uint8_t)(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
            codes[96 + i] = (uint8_t)(low[32 + i] >> 4 | (high[i] >> 6) << 4);
        }
    }
    memcpy(out->scale, p + 192, 16);
    out->unit = short_at(p + 208);
}

static void read_iq4_xs(const uint8_t *p, file_block *out) {
    out->unit = short_at(p);
    uint16_t high = short_at(p + 2);
    for (int g = 0; g < 8; g++) {
        out->scale[g] = (uint8_t)((p[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4);
        two_nibbles(p + 8 + 16 * g, 16, out->codes + 32 * g);
    }
}

static void read_block(int32_t kind, const uint8_t *p, file_block *out) {
    switch (kind) {
        case TM_Q4_0: case TM_Q4_1: case TM_IQ4_NL: read_q4(p, kind == TM_Q4_1, out); break;
        case TM_Q5_0: case TM_Q5_1: read_q5(p, kind == TM_Q5_1, out); break;
        case TM_Q8_0: read_q8(p, out); break;
        case TM_Q2_K: read_q2_k(p, out); break;
        case TM_Q3_K: read_q3_k(p, out); break;
        case TM_Q4_K: case TM_Q5_K: read_q4_k(p, kind == TM_Q5_K, out); break;
        case TM_Q6_K: read_q6_k(p, out); break;
        case TM_IQ4_XS: read_iq4_xs(p, out); break;
    }
}

/* -- into our blocks ----------------------------------------------------------------------------------------------- */

/* The codes of 16 rows, `stride` bytes apart, into a span: first four columns of all rows side by side, then planes. */
static inline __attribute__((always_inline)) void put_codes(int bits, const uint8_t *codes, size_t stride, uint8_t *span) {
    uint8_t quads[8][64], *high = span + (bits >= 4 ? 256 : 128);
    for (int r = 0; r < TM_ROWS; r++)
        for (int j = 0; j < 8; j++) memcpy(quads[j] + 4 * r, codes + r * stride + 4 * j, 4);
    if (bits == 8) {
        memcpy(span, quads, sizeof quads);
        return;
    }
    for (int i = 0; bits >= 4 && i < 4; i++)
        for (int k = 0; k < 64; k++) span[64 * i + k] = (uint8_t)((quads[i][k] & 15) | quads[i + 4][k] << 4);
    int low = bits == 6 ? 4 : 0;
    uint8_t *two = bits == 6 ? high : span;
    for (int i = 0; (bits == 6 || bits < 4) && i < 8; i += 4)
        for (int k = 0; k < 64; k++)
            two[16 * i + k] = (uint8_t)((quads[i][k] >> low & 3) | (quads[i + 1][k] >> low & 3) << 2 |
                                        (quads[i + 2][k] >> low & 3) << 4 | (quads[i + 3][k] >> low & 3) << 6);
    if (bits % 2 == 0) return;
    memset(high, 0, 64);
    for (int j = 0; j < 8; j++)
        for (int k = 0; k < 64; k++) high[k] |= (uint8_t)((quads[j][k] >> (bits - 1) & 1) << j);
}

static void put_six_bits(int count, int at, uint8_t value, uint8_t *codes) {
    int half = count / 2, quarter = count / 4;
    codes[at % half] |= (uint8_t)((value & 15) << 4 * (at / half));
    codes[half + at % quarter] |= (uint8_t)((value >> 4) << 2 * (at / quarter));
}

static void put_scales(int32_t kind, const file_block *block, int row, uint8_t *codes) {
    for (int g = 0; g < groups_in_slab(kind); g++) {
        int at = 32 * (g / 2) + 2 * row + g % 2;
        uint8_t scale = block->scale[g], min = block->min[g];
        if (kind == TM_Q6_K) codes[at] = scale;
        else if (kind == TM_Q2_K) codes[at] = (uint8_t)(scale | min << 4);
        else if (kind == TM_Q4_K || kind == TM_Q5_K) {
            codes[at] = (uint8_t)((scale & 15) | (min & 15) << 4);
            codes[128 + at % 64] |= (uint8_t)(((scale >> 4) | (min >> 4) << 2) << 4 * (at / 64));
        } else put_six_bits(16 * groups_in_slab(kind), at, scale, codes);
    }
}

static int is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

typedef struct {
    int32_t kind, rows, cols;
    const uint8_t *raw;
    const int64_t *order;
    uint8_t *blocks;
    _Atomic int32_t bad;
} packing;

static inline __attribute__((always_inline)) void pack_row_blocks(packing *p, int32_t kind, int32_t first, int32_t last) {
    int32_t blocks = blocks_in_row(kind, p->cols), spans = block_cols(kind) / TM_GROUP;
    size_t from = file_block_bytes(kind), size = block_bytes(kind);
    file_block found[TM_ROWS];
    for (int32_t b = first; b < last; b++) {
        int32_t rows = p->rows - b * TM_ROWS < TM_ROWS ? p->rows - b * TM_ROWS : TM_ROWS;
        memset(found, 0, sizeof found);
        for (int32_t i = 0; i < blocks; i++) {
            uint8_t *block = p->blocks + ((size_t)b * blocks + i) * size;
            memset(block + units_at(kind), 0, size - units_at(kind));
            for (int32_t r = 0; r < rows; r++) {
                size_t row = (size_t)b * TM_ROWS + r;
                if (p->order) row = (size_t)p->order[row];
                read_block(kind, p->raw + (row * blocks + i) * from, &found[r]);
                if (!is_finite(found[r].unit) || !is_finite(found[r].least)) p->bad = 1;
                memcpy(block + units_at(kind) + 2 * r, &found[r].unit, 2);
                if (has_minima(kind)) memcpy(block + units_at(kind) + 32 + 2 * r, &found[r].least, 2);
                if (has_slabs(kind)) put_scales(kind, &found[r], r, block + scale_codes_at(kind));
            }
            for (int s = 0; s < spans; s++)
                put_codes(code_bits(kind), found[0].codes + TM_GROUP * s, sizeof *found, block + s * span_bytes(kind));
        }
    }
}

#define EACH_KIND(DO) \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(IQ4_NL) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_XS)

static void pack_blocks(void *context, int32_t first, int32_t last) {
    packing *p = context;
#define CASE(KIND) \
    case TM_##KIND: pack_row_blocks(p, TM_##KIND, first, last); break;
    switch (p->kind) { EACH_KIND(CASE) }
#undef CASE
}

size_t tm_matrix_bytes(int32_t kind, int32_t rows, int32_t cols) {
    if (file_block_bytes(kind) == 0) return 0;
    return (size_t)((rows + TM_ROWS - 1) / TM_ROWS) * blocks_in_row(kind, cols) * block_bytes(kind);
}

int32_t tm_pack(int32_t kind, const uint8_t *raw, const int64_t *order, int32_t rows, int32_t cols, uint8_t *blocks,
    tm_pool *pool) {
    packing p = {kind, rows, cols, raw, order, blocks, 0};
    tm_parallel(pool, pack_blocks, &p, (rows + TM_ROWS - 1) / TM_ROWS, 4);
    return !p.bad;
}

/* -- numbers that were rounded elsewhere --------------------------------------------------------------------------- */

static void put_half(uint8_t *at, float value) {
    uint16_t half = float_to_half(value);
    memcpy(at, &half, 2);
}

/* Rows of numbers with their scales; columns beyond the last are 0. */
static void pack_numbers(int32_t kind, const uint8_t *q, uint8_t flip, const float *scale, const float *min, int32_t rows,
    int32_t cols, uint8_t *blocks) {
    int32_t groups = blocks_in_row(kind, cols);
    memset(blocks, 0, tm_matrix_bytes(kind, rows, cols));
    for (int32_t b = 0; b * TM_ROWS < rows; b++)
        for (int32_t g = 0; g < groups; g++, blocks += block_bytes(kind)) {
            uint8_t codes[TM_ROWS][TM_GROUP];
            memset(codes, flip, sizeof codes);
            for (int32_t r = 0; r < TM_ROWS && b * TM_ROWS + r < rows; r++) {
                size_t row = (size_t)b * TM_ROWS + r;
                for (int32_t i = 0; i < TM_GROUP && g * TM_GROUP + i < cols; i++)
                    codes[r][i] = q[row * cols + g * TM_GROUP + i] ^ flip;
                put_half(blocks + units_at(kind) + 2 * r, scale[row * groups + g]);
                if (min) put_half(blocks + units_at(kind) + 32 + 2 * r, min[row * groups + g]);
            }
            put_codes(code_bits(kind), codes[0], TM_GROUP, blocks);
        }
}

void tm_pack_int4(const uint8_t *q, const float *scale, const float *min, int32_t rows, int32_t cols, uint8_t *blocks) {
    pack_numbers(TM_Q4_1, q, 0, scale, min, rows, cols, blocks);
}

void tm_pack_int8(const int8_t *q, const float *scale, int32_t rows, int32_t cols, uint8_t *blocks) {
    pack_numbers(TM_Q8_0, (const uint8_t *)q, 0x80, scale, NULL, rows, cols, blocks);
}

/* -- and back ------------------------------------------------------------------------------------------------------ */

static void unpack_row(int32_t kind, const uint8_t *block, int r, int32_t cols, float *y) {
    group_scales scales;
    int per_slab = groups_in_slab(kind), zero = code_of_zero(kind);
    for (int32_t c = 0; c < cols; c += TM_GROUP) {
        int32_t span = c / TM_GROUP % (block_cols(kind) / TM_GROUP);
        if (c && span == 0) block += block_bytes(kind);
        if (has_slabs(kind) && span == 0) read_scales(kind, block, &scales);
        uint8_t codes[TM_GROUP];
        read_codes(kind, block + span * span_bytes(kind), r, codes);
        float unit = half_at(block + units_at(kind) + 2 * r);
        float least = has_minima(kind) ? half_at(block + units_at(kind) + 32 + 2 * r) : 0.0f;
        for (int32_t i = 0; i < TM_GROUP && c + i < cols; i++) {
            float scale = unit, min = least;
            if (has_slabs(kind)) {
                int g = (span * TM_GROUP + i) / (TM_SLAB / per_slab), at = 32 * (g / 2) + 2 * r + g % 2;
                scale = unit * (float)scales.scale[at];
                min = has_minima(kind) ? -least * (float)scales.min[at] : 0.0f;
            }
            y[c + i] = scale * (float)(codes[i] - zero) + min;
        }
    }
}

void tm_rows(const tm_matrix *m, const int64_t *rows, int32_t n, float *y) {
    size_t stride = (size_t)blocks_in_row(m->kind, m->cols) * block_bytes(m->kind);
    for (int32_t i = 0; i < n; i++) {
        const uint8_t *block = m->blocks + (size_t)(rows[i] / TM_ROWS) * stride;
        unpack_row(m->kind, block, (int)(rows[i] % TM_ROWS), m->cols, y + (size_t)i * m->cols);
    }
}
