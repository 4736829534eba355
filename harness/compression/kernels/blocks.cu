// Block quantisers on a GPU: the bytes of reference_blocks.py. cuda_blocks.py says which kernel runs when, and on what.

#define UNIFORM 0
#define NF4 1
#define E2M1 2
#define E4M3 3
#define FP32 0
#define BF16 1
#define FP16 2
#define E8M0 3
#define FLOAT_MAX 0x1.fffffep127f

// ---- stored scales --------------------------------------------------------------------------------------------------

HELPER u32 width_of(int kind) { return kind == FP32 ? 4 : kind == E8M0 ? 1 : 2; }

// What is kept of a span, rounded up; -1 where it cannot be held.
HELPER int stored_scale(int span, int kind, int element) {
    if (span < 0x04800000) return 0;
    if (kind == FP32) return span;
    if (kind == BF16) return bf16_up(span);
    if (kind == FP16) {
        if (span > 0x477fe000) return -1;
        int half = half_bits(span);
        return half + (half_value(half) < __int_as_float(span));
    }
    if (element == E2M1) return (span >> 23) - 2;
    return span > 0x7f000000 ? -1 : (span + 0x7fffff) >> 23;
}

HELPER float scale_value(int stored, int kind) {
    if (kind == FP16) return half_value(stored);
    return __int_as_float(kind == FP32 ? stored : kind == BF16 ? stored << 16 : stored << 23);
}

// From here on a stored scale is none that an encoder writes.
HELPER u32 beyond_scales(int kind, int element) {
    if (element == E2M1) return 253;
    return kind == FP32 ? 0x7f800000 : kind == BF16 ? 0x7f80 : kind == FP16 ? 0x7c00 : 0xff;
}

HELPER void put_scale(u8* at, u32 stored, u32 width) {
    for (u32 j = 0; j < width; j++) at[j] = (u8)(stored >> 8 * j);
}

HELPER u32 get_scale(const u8* at, u32 width) {
    u32 stored = 0;
    for (u32 j = 0; j < width; j++) stored |= (u32)at[j] << 8 * j;
    return stored;
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// To a float of `mantissas` bits after the point, nearest even, not beyond `most`; the sign is the top bit.
HELPER u32 small_float(float scaled, int mantissas, int bias, float most) {
    int pattern = __float_as_int(scaled), drop = 23 - mantissas;
    float size = __int_as_float(pattern & 0x7fffffff);
    size = size < most ? size : most;
    int bits = __float_as_int(size), code;
    if (bits >= (128 - bias) << 23) {
        code = (bits + (1 << (drop - 1)) - 1 + (bits >> drop & 1)) >> drop;
        code -= (127 - bias) << mantissas;
    } else {
        // Subnormal: the sum leaves the value, in its smallest steps, in the low bits.
        int magic = (127 + 24 - bias - mantissas) << 23;
        code = __float_as_int(size + __int_as_float(magic)) - magic;
    }
    return (u32)code | (pattern < 0 ? mantissas == 1 ? 8u : 128u : 0u);
}

// How many of the 15 midpoints of the levels lie below.
HELPER u32 normal_float(float scaled, const float* midpoints) {
    u32 code = 0;
#pragma unroll
    for (u32 k = 0; k < 15; k++) code += scaled > midpoints[k];
    return code;
}

HELPER u32 clipped(float level, float low, float high) {
    level = level >= low ? level : low;
    return (u32)(int)(level <= high ? level : high);
}

// `per` threads of a warp share a block, each taking groups of 8: they find its span together, then code their groups.
// table: the levels of `element`, after them the midpoints of nf4.
KERNEL blocks_codes(const float* x, u32 numel, u32 block, u32 per, u32 blocks, int element, u32 bits, int kind,
                    int affine, int stochastic, float top, u32 key_low, u32 key_high, const float* table, u8* head,
                    u8* packed, int* status) {
    u64 thread = thread_index();
    u32 lane = (u32)thread % per, own = (u32)(thread / per), start = own * block;
    // Threads past the end stay, with nothing to do, since all of a warp exchange.
    u32 length = own >= blocks ? 0 : numel - start < block ? numel - start : block;
    float values[8];
    int above = 0, below = 0;
    for (u32 at = 8 * lane; at < length; at += 8 * per) {
        load_group(x + start + at, length - at < 8 ? length - at : 8, values);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            int pattern = __float_as_int(values[j]);
            int size = pattern & 0x7fffffff;
            if (pattern < 0)
                below = size > below ? size : below;
            else
                above = size > above ? size : above;
        }
    }
    for (u32 reach = per / 2; reach; reach /= 2) {
        int other = __shfl_xor_sync(0xffffffffu, above, reach);
        above = other > above ? other : above;
        other = __shfl_xor_sync(0xffffffffu, below, reach);
        below = other > below ? other : below;
    }
    if (!length) return;
    int span = above > below ? above : below;
    if (span >= 0x7f800000) {
        if (lane == 0) atomicOr(status, NONFINITE);
        return;
    }
    if (affine) span = __float_as_int(__int_as_float(above) * 0.5f + __int_as_float(below) * 0.5f);
    int stored = stored_scale(span, kind, element);
    if (stored < 0) {
        if (lane == 0) atomicOr(status, SCALE_OVERFLOW);
        return;
    }
    float by = stored ? top / scale_value(stored, kind) : 0.0f, high = (float)((1 << bits) - 1);
    float zero = (float)(1 << (bits - 1));
    if (affine) {
        zero = __int_as_float(below) * by;
        zero = stochastic ? ceilf(zero) : rintf(zero);
        zero = zero <= high ? zero : high;
    }
    if (lane == 0) {
        u32 width = width_of(kind);
        put_scale(head + (u64)own * width, (u32)stored, width);
        if (affine) head[(u64)blocks * width + own] = (u8)(int)zero;
    }
    for (u32 at = 8 * lane; at < length; at += 8 * per) {
        u32 size = length - at < 8 ? length - at : 8, first = start + at;
        load_group(x + first, size, values);
        u64 codes = 0;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            float scaled = values[j] * by;
            u32 code;
            if (element == NF4)
                code = normal_float(scaled, table + 16);
            else if (element == E2M1)
                code = small_float(scaled, 1, 1, 6.0f);
            else if (element == E4M3)
                code = small_float(scaled, 3, 7, 448.0f);
            else
                code = clipped(rounded(scaled, stochastic, first + j, key_low, key_high) + zero,
                               affine ? 0.0f : 1.0f, high);
            if (j < size) codes |= (u64)code << 8 * j;
        }
        pack_group(codes, size, bits, packed, first / 8);
    }
}

// A thread decodes a group; a block has whole groups, so a group has one scale.
KERNEL blocks_values(const u8* head, const u8* packed, u32 numel, u32 block, u32 blocks, int element, u32 bits,
                     int kind, int affine, float top, const float* table, float* out, int* status) {
    u32 group = (u32)thread_index(), first = 8 * group;
    if (first >= numel) return;
    u32 size = numel - first < 8 ? numel - first : 8, own = first / block, width = width_of(kind);
    u32 stored = get_scale(head + (u64)own * width, width);
    bool clean = stored < beyond_scales(kind, element);
    int zero = affine ? head[(u64)blocks * width + own] : 1 << (bits - 1);
    if (zero >= 1 << bits) clean = false;
    float step = clean ? scale_value((int)stored, kind) / top : 0.0f, values[8];
    u64 codes = unpack_group(packed, group, size, bits, clean);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        u32 code = (u32)(codes >> 8 * j & 0xff);
        float level = element == UNIFORM ? (float)((int)code - zero) : table[code];
        if (j < size && (level != level || (element == UNIFORM && !affine && code == 0))) clean = false;
        float value = level * step;
        value = value < FLOAT_MAX ? value : FLOAT_MAX;
        values[j] = value > -FLOAT_MAX ? value : -FLOAT_MAX;
    }
    store_group(values, size, out + first);
    if (!clean) atomicOr(status, MALFORMED);
}

// ---- min-max --------------------------------------------------------------------------------------------------------

// Patterns as unsigned numbers in the order of the floats, and back. NaN and infinity are at the ends.
HELPER u32 in_order(float value) {
    u32 pattern = (u32)__float_as_int(value);
    return pattern >> 31 ? ~pattern : pattern | 0x80000000u;
}

HELPER float out_of_order(u32 place) {
    return __int_as_float((int)(place >> 31 ? place & 0x7fffffff : ~place));
}

HELPER void raise_to(u32* peak, u32 candidate) {
    if (candidate > *(volatile u32*)peak) atomicMax(peak, candidate);
}

HELPER u32 largest_of_warp(u32 best) {
    for (u32 reach = LANES / 2; reach; reach /= 2) {
        u32 other = (u32)__shfl_xor_sync(0xffffffffu, (int)best, reach);
        best = other > best ? other : best;
    }
    return best;
}

// Runs of `block` elements, the last one shorter, each cut into `chunks` pieces of `size`, a warp a piece.
// ends: two words a block, 0 at first, complement of the lowest place and the highest.
KERNEL minmax_ends(const float* x, u32 numel, u32 block, u32 blocks, u32 chunks, u32 size, u32* ends) {
    u32 unit = (u32)(thread_index() / LANES), lane = (u32)(thread_index() % LANES);
    if (unit >= blocks * chunks) return;
    u32 own = unit / chunks, start = (unit - own * chunks) * size;
    u32 length = numel - own * block < block ? numel - own * block : block;
    u32 stop = start >= length ? start : length - start < size ? length : start + size, low = 0, high = 0;
    const float* run = x + (u64)own * block;
#pragma unroll 8
    for (u32 i = start + lane; i < stop; i += LANES) {
        u32 place = in_order(run[i]);
        low = ~place > low ? ~place : low;
        high = place > high ? place : high;
    }
    low = largest_of_warp(low);
    high = largest_of_warp(high);
    if (lane == 0 && start < stop) {
        raise_to(ends + 2ull * own, low);
        raise_to(ends + 2ull * own + 1, high);
    }
}

// What elements are coded by: half of the lower end, half of the distance.
HELPER void halves(float low, float high, float* both) {
    both[0] = low * 0.5f;
    both[1] = high * 0.5f - both[0];
}

KERNEL minmax_settle(const u32* ends, u32 blocks, u8* head, float* range, int* status) {
    u32 own = (u32)thread_index();
    if (own >= blocks) return;
    // Adding zero: of -0 and 0, which may be either end, 0 is kept.
    float low = out_of_order(~ends[2ull * own]) + 0.0f, high = out_of_order(ends[2ull * own + 1]) + 0.0f;
    if (!(low >= -FLOAT_MAX && high <= FLOAT_MAX)) {
        atomicOr(status, NONFINITE);
        low = high = 0.0f;
    }
    put_scale(head + 8ull * own, (u32)__float_as_int(low), 4);
    put_scale(head + 8ull * own + 4, (u32)__float_as_int(high), 4);
    halves(low, high, range + 2ull * own);
}

KERNEL minmax_codes(const float* x, u32 numel, u32 block, u32 bits, const float* range, u8* packed) {
    u32 group = (u32)thread_index(), first = 8 * group;
    if (first >= numel) return;
    u32 size = numel - first < 8 ? numel - first : 8;
    float values[8], last = (float)((1 << bits) - 1);
    load_group(x + first, size, values);
    u64 codes = 0;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        if (j < size) {
            const float* own = range + 2ull * ((first + j) / block);
            float part = own[1] > 0.0f ? (values[j] * 0.5f - own[0]) / own[1] : 0.0f;
            codes |= (u64)clipped(rintf(part * last), 0.0f, last) << 8 * j;
        }
    }
    pack_group(codes, size, bits, packed, group);
}

KERNEL minmax_values(const u8* head, const u8* packed, u32 numel, u32 block, u32 bits, float* out, int* status) {
    u32 group = (u32)thread_index(), first = 8 * group;
    if (first >= numel) return;
    u32 size = numel - first < 8 ? numel - first : 8;
    bool clean = true;
    u64 codes = unpack_group(packed, group, size, bits, clean);
    float values[8], last = (float)((1 << bits) - 1), low = 0.0f, high = 0.0f, range[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        if (j < size) {
            u32 own = (first + j) / block;
            if (j == 0 || own * block == first + j) {
                low = __int_as_float((int)get_scale(head + 8ull * own, 4));
                high = __int_as_float((int)get_scale(head + 8ull * own + 4, 4));
                if (!(low >= -FLOAT_MAX && low <= high && high <= FLOAT_MAX)) clean = false;
                halves(low, high, range);
            }
            float value = ((float)(u32)(codes >> 8 * j & 0xff) / last * range[1] + range[0]) * 2.0f;
            value = value > low ? value : low;
            values[j] = value < high ? value : high;
        }
    }
    store_group(values, size, out + first);
    if (!clean) atomicOr(status, MALFORMED);
}
