// Fixed-point coding on a GPU: the bytes of reference.py. cuda.py says which kernel runs when, and on what.
// (middle, inner, so, sm, si) in arguments are those of a Layout.

// ---- the largest |x| of each scale, as bit patterns: NaN and infinity are larger than any number ------------------

// Scales of consecutive elements: `segments` runs of `inner`, each cut into `chunks` pieces of `size`, a warp a piece.
KERNEL peaks_of_runs(const float* x, u32 segments, u32 middle, u32 inner, u32 so, u32 sm, u32 chunks, u32 size,
                     int* peaks) {
    u32 unit = (u32)(thread_index() / LANES), lane = (u32)(thread_index() % LANES);
    if (unit >= segments * chunks) return;
    u32 segment = unit / chunks, start = (unit - segment * chunks) * size;
    u32 stop = inner - start < size ? inner : start + size;
    const float* run = x + (u64)segment * inner;
    int best = 0;
#pragma unroll 8
    for (u32 i = start + lane; i < stop; i += LANES) {
        int found = magnitude(run[i]);
        best = found > best ? found : best;
    }
    for (u32 reach = LANES / 2; reach; reach /= 2) {
        int other = __shfl_xor_sync(0xffffffffu, best, reach);
        best = other > best ? other : best;
    }
    if (lane == 0) raise_to(peaks + segment / middle * so + segment % middle * sm, best);
}

// Scales along the inner axis: a thread goes down `size` rows of one column.
KERNEL peaks_of_columns(const float* x, u32 outer, u32 middle, u32 inner, u32 so, u32 chunks, u32 size, int* peaks) {
    u32 unit = (u32)thread_index();
    if (unit >= outer * chunks * inner) return;
    u32 column = unit % inner, part = unit / inner;
    u32 o = part / chunks, start = (part - o * chunks) * size;
    u32 stop = middle - start < size ? middle : start + size;
    const float* top = x + (u64)o * middle * inner + column;
    int best = 0;
#pragma unroll 8
    for (u32 row = start; row < stop; row++) {
        int found = magnitude(top[(u64)row * inner]);
        best = found > best ? found : best;
    }
    raise_to(peaks + o * so + column, best);
}

// ---- scales -------------------------------------------------------------------------------------------------------

// The stored scales, and what elements are multiplied by (published form: divided by).
KERNEL fixpoint_scales(const int* peaks, u32 count, float steps, float eps, int published, u8* head, float* factor,
                       int* status) {
    u32 i = (u32)thread_index();
    if (i >= count) return;
    int pattern = peaks[i];
    if (pattern >= 0x7f800000) {
        atomicOr(status, NONFINITE);
        pattern = 0;
    }
    if (published) {
        int stored = half_bits(pattern);
        if (stored >= 0x7c00) atomicOr(status, SCALE_OVERFLOW);
        put16(head + 2ull * i, stored);
        factor[i] = (half_value(stored) + eps) / steps;
    } else {
        int stored = bf16_up(pattern);
        put16(head + 2ull * i, stored);
        factor[i] = stored ? steps / (__int_as_float(stored << 16) + eps) : 0.0f;
    }
}

// From stored scales to the size of a level; what no encoder writes is malformed.
KERNEL fixpoint_steps(const u8* head, u32 count, float steps, int published, float* step, int* status) {
    u32 i = (u32)thread_index();
    if (i >= count) return;
    int stored = get16(head + 2ull * i);
    if (stored >= (published ? 0x7c00 : 0x7f80)) {
        atomicOr(status, MALFORMED);
        stored = 0;
    }
    step[i] = (published ? half_value(stored) : __int_as_float(stored << 16)) / steps;
}

// ---- elements -----------------------------------------------------------------------------------------------------

// Where a thread stands in a Layout, to go from one element's scale to the next without dividing.
struct Place {
    u32 m, i, base;
};

HELPER Place place_of(u32 element, u32 middle, u32 inner, u32 so) {
    u32 run = element / inner, o = run / middle;
    Place p = {run - o * middle, element - run * inner, o * so};
    return p;
}

HELPER u32 scale_then_step(Place& p, u32 middle, u32 inner, u32 so, u32 sm, u32 si) {
    u32 scale = p.base + p.m * sm + p.i * si;
    if (++p.i == inner) {
        p.i = 0;
        if (++p.m == middle) p.m = 0, p.base += so;
    }
    return scale;
}

// A thread codes a group. Written so that NaN, which `status` has by now, ends inside the range too.
KERNEL fixpoint_codes(const float* x, u32 numel, u32 middle, u32 inner, u32 so, u32 sm, u32 si, const float* factor,
                      u32 bits, float low, float high, int divide, int stochastic, u32 key_low, u32 key_high,
                      u8* packed) {
    u32 group = (u32)thread_index(), first = 8 * group;
    if (first >= numel) return;
    u32 size = numel - first < 8 ? numel - first : 8;
    float values[8], offset = (float)(1u << (bits - 1));
    load_group(x + first, size, values);
    Place place = place_of(first, middle, inner, so);
    u64 codes = 0;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        if (j < size) {
            float by = factor[scale_then_step(place, middle, inner, so, sm, si)];
            float level = divide ? values[j] / by : values[j] * by;
            level = rounded(level, stochastic, first + j, key_low, key_high);
            level = level >= low ? level : low;
            level = level <= high ? level : high;
            codes |= (u64)(u32)(int)(level + offset) << 8 * j;
        }
    }
    pack_group(codes, size, bits, packed, group);
}

// A thread decodes a group.
KERNEL fixpoint_values(const u8* packed, u32 numel, u32 middle, u32 inner, u32 so, u32 sm, u32 si, const float* step,
                       u32 bits, int symmetric, float* out, int* status) {
    u32 group = (u32)thread_index(), first = 8 * group;
    if (first >= numel) return;
    u32 size = numel - first < 8 ? numel - first : 8;
    bool clean = true;
    u64 codes = unpack_group(packed, group, size, bits, clean);
    float values[8];
    int offset = 1 << (bits - 1);
    Place place = place_of(first, middle, inner, so);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        if (j < size) {
            int code = (int)(codes >> 8 * j & 0xff);
            if (symmetric && code == 0) clean = false;
            values[j] = (float)(code - offset) * step[scale_then_step(place, middle, inner, so, sm, si)];
        }
    }
    store_group(values, size, out + first);
    if (!clean) atomicOr(status, MALFORMED);
}
