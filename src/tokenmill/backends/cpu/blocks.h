/* How weights are stored: the types of GGUF files, value for value, 16 rows side by side.
 *
 * A span is 16 rows by 32 columns. Four columns of all rows lie next to each other, 64 bytes: one register of AVX-512, two
 * of AVX2. A code of so many bits is cut into planes: 4 bits of two such quads are a register of bytes, 2 bits of four,
 * 1 bit of eight. Planes of 4 bits come first, then those of 2, then of 1.
 *
 * A block is a span with its 16 scales (and minima) in half precision, or, of types with superblocks, 8 spans, 16
 * scales (and minima) and codes for the scales of smaller groups. It is as large as the 16 blocks of the file.
 */
#ifndef TOKENMILL_BLOCKS_H
#define TOKENMILL_BLOCKS_H

#include "kernels.h"
#include "lanes.h"

#define TM_SLAB 256 /* columns of a superblock */
#define SPANS (TM_SLAB / TM_GROUP)

/* Values of IQ4_NL and IQ4_XS, 128 too large. */
static const uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

#define CONSTANT static inline __attribute__((always_inline))

CONSTANT int code_bits(int32_t kind) {
    switch (kind) {
        case TM_Q2_K: return 2;
        case TM_Q3_K: return 3;
        case TM_Q5_0: case TM_Q5_1: case TM_Q5_K: return 5;
        case TM_Q6_K: return 6;
        case TM_Q8_0: return 8;
        default: return 4;
    }
}

/* Has it superblocks of 256 columns? */
CONSTANT int has_slabs(int32_t kind) {
    return (kind >= TM_Q2_K && kind <= TM_Q6_K) || kind == TM_IQ4_XS;
}

CONSTANT int has_minima(int32_t kind) {
    return kind == TM_Q4_1 || kind == TM_Q5_1 || kind == TM_Q2_K || kind == TM_Q4_K || kind == TM_Q5_K;
}

/* What the value 0 is stored as, of types without minima. */
CONSTANT int code_of_zero(int32_t kind) {
    switch (kind) {
        case TM_Q3_K: return 4;
        case TM_Q4_0: return 8;
        case TM_Q5_0: return 16;
        case TM_Q6_K: return 32;
        case TM_Q8_0: case TM_IQ4_NL: case TM_IQ4_XS: return 128;
        default: return 0;
    }
}

CONSTANT int is_table(int32_t kind) { return kind == TM_IQ4_NL || kind == TM_IQ4_XS; }

/* Groups of a superblock that have a scale of their own. */
CONSTANT int groups_in_slab(int32_t kind) { return kind == TM_Q2_K || kind == TM_Q3_K || kind == TM_Q6_K ? 16 : 8; }

CONSTANT size_t span_bytes(int32_t kind) { return (size_t)64 * code_bits(kind); }

/* Bytes of the codes for a superblock's scales (and minima). */
CONSTANT size_t scale_codes_bytes(int32_t kind) {
    switch (kind) {
        case TM_Q2_K: case TM_Q6_K: return 256;
        case TM_Q3_K: case TM_Q4_K: case TM_Q5_K: return 192;
        case TM_IQ4_XS: return 96;
        default: return 0;
    }
}

CONSTANT size_t units_at(int32_t kind) { return (has_slabs(kind) ? SPANS : 1) * span_bytes(kind); }

CONSTANT size_t scale_codes_at(int32_t kind) { return units_at(kind) + (has_minima(kind) ? 64 : 32); }

CONSTANT size_t block_bytes(int32_t kind) { return scale_codes_at(kind) + scale_codes_bytes(kind); }

CONSTANT int32_t block_cols(int32_t kind) { return has_slabs(kind) ? TM_SLAB : TM_GROUP; }

CONSTANT int32_t blocks_in_row(int32_t kind, int32_t cols) { return (cols + block_cols(kind) - 1) / block_cols(kind); }

/* Scales (and minima) of a superblock: [pairs of groups][rows][2], small whole numbers. */
typedef struct {
    int8_t scale[16 * TM_ROWS], min[16 * TM_ROWS];
} __attribute__((aligned(64))) group_scales;

/* Six bits each: four of all numbers first, then two. */
CONSTANT void six_bits(const uint8_t *codes, int count, int8_t *out) {
    const uint8_t *high = codes + count / 2;
    int half = count / 2, quarter = count / 4;
    for (int k = 0; k < quarter; k++) {
        out[k] = (int8_t)(((codes[k] & 15) | (high[k] & 0x03) << 4) - 32);
        out[k + quarter] = (int8_t)(((codes[k + quarter] & 15) | (high[k] & 0x0c) << 2) - 32);
        out[k + half] = (int8_t)((codes[k] >> 4 | (high[k] & 0x30)) - 32);
        out[k + half + quarter] = (int8_t)((codes[k + quarter] >> 4 | (high[k] & 0xc0) >> 2) - 32);
    }
}

CONSTANT void read_scales(int32_t kind, const uint8_t *block, group_scales *out) {
    const uint8_t *codes = block + scale_codes_at(kind);
    if (kind == TM_Q2_K)
        for (int k = 0; k < 256; k++) {
            out->scale[k] = (int8_t)(codes[k] & 15);
            out->min[k] = (int8_t)(codes[k] >> 4);
        }
    else if (kind == TM_Q4_K || kind == TM_Q5_K)
        for (int k = 0; k < 64; k++) { /* four bits of scale and minimum in a byte; then two of both, twice */
            uint8_t high = codes[128 + k];
            out->scale[k] = (int8_t)((codes[k] & 15) | (high & 0x03) << 4);
            out->min[k] = (int8_t)(codes[k] >> 4 | (high & 0x0c) << 2);
            out->scale[64 + k] = (int8_t)((codes[64 + k] & 15) | (high & 0x30));
            out->min[64 + k] = (int8_t)(codes[64 + k] >> 4 | (high & 0xc0) >> 2);
        }
    else if (kind == TM_Q6_K) memcpy(out->scale, codes, 256);
    else six_bits(codes, kind == TM_Q3_K ? 256 : 128, out->scale);
}

/* The codes of one row of a span; of types with a table, what stands there. */
CONSTANT void read_codes(int32_t kind, const uint8_t *span, int row, uint8_t *codes) {
    int bits = code_bits(kind);
    const uint8_t *high = span + (bits >= 4 ? 256 : 128);
    for (int i = 0; i < TM_GROUP; i++) {
        int j = i / 4, at = 4 * row + i % 4;
        uint8_t code;
        if (bits == 8) code = span[64 * j + at];
        else if (bits >= 4) code = (uint8_t)(span[64 * (j % 4) + at] >> 4 * (j / 4) & 15);
        else code = (uint8_t)(span[64 * (j / 4) + at] >> 2 * (j % 4) & 3);
        if (bits == 6) code |= (uint8_t)((high[64 * (j / 4) + at] >> 2 * (j % 4) & 3) << 4);
        if (bits % 2) code |= (uint8_t)((high[at] >> j & 1) << (bits - 1));
        codes[i] = is_table(kind) ? IQ4_VALUES[code] : code;
    }
}

#endif
