// What the GPU kernels share: the 2-byte scales, packing, rounding. cuda_device.py compiles this text and those of the
// other .cu files, after it, as one.
//
// There is no #include, no shared memory and no barrier, so that the same text also compiles for a CPU, where one
// thread after the other runs (and one lane is a whole warp): this is how it is tested where there is no GPU. Every
// float operation is rounded by itself (no contraction, IEEE division, subnormal numbers kept): see cuda_device.py.
//
// Elements are counted in 32 bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef LANES
#define LANES 32u
#endif
#define KERNEL extern "C" __global__ void
#define HELPER static __device__ __forceinline__

// Bits of the status word.
#define NONFINITE 1
#define SCALE_OVERFLOW 2
#define MALFORMED 4

HELPER u64 thread_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

HELPER int magnitude(float value) { return __float_as_int(value) & 0x7fffffff; }

// Most candidates lose: a stale read costs an atomic that was not needed, never a maximum.
HELPER void raise_to(int* peak, int candidate) {
    if (candidate > *(volatile int*)peak) atomicMax(peak, candidate);
}

// ---- scales -------------------------------------------------------------------------------------------------------

// The fp16 pattern of a non-negative float's, to nearest even; 0x7c00 where it overflows.
HELPER int half_bits(int pattern) {
    if (pattern >= 0x477ff000) return 0x7c00;
    // Subnormal: adding 0.5 leaves the value, in steps of 2^-24, in the low bits.
    if (pattern < 0x38800000) return __float_as_int(__int_as_float(pattern) + 0.5f) - 0x3f000000;
    return (pattern - 0x38000000 + 0xfff + (pattern >> 13 & 1)) >> 13;
}

// The float of a finite non-negative fp16's pattern.
HELPER float half_value(int bits) {
    return bits < 0x400 ? (float)bits * 0x1p-24f : __int_as_float((bits << 13) + (112 << 23));
}

// The bf16 pattern of a non-negative float's, rounded up, so that no element is larger than its scale; at most the
// largest finite one, and 0 below 2^-118, where steps / scale would leave the range.
HELPER int bf16_up(int pattern) {
    if (pattern < 0x04800000) return 0;
    return ((pattern < 0x7f7f0000 ? pattern : 0x7f7f0000) + 0xffff) >> 16;
}

HELPER void put16(u8* at, int value) {
    at[0] = (u8)value;
    at[1] = (u8)(value >> 8);
}

HELPER int get16(const u8* at) { return at[0] | at[1] << 8; }

// ---- packing: a group is 8 codes in a 64-bit word, first code in its lowest byte ------------------------------------

// The low `bits` of each byte, first code on top, left-aligned.
HELPER u64 squeeze(u64 word, u32 bits) {
    word = (word & 0x00ff00ff00ff00ffull) << bits | (word >> 8 & 0x00ff00ff00ff00ffull);
    word = (word & 0x0000ffff0000ffffull) << 2 * bits | (word >> 16 & 0x0000ffff0000ffffull);
    word = (word & 0x00000000ffffffffull) << 4 * bits | word >> 32;
    return word << (64 - 8 * bits);
}

// The inverse of squeeze.
HELPER u64 spread(u64 number, u32 bits) {
    u64 quads = (1ull << 4 * bits) - 1, pairs = ((1ull << 2 * bits) - 1) * 0x0000000100000001ull;
    u64 singles = ((1ull << bits) - 1) * 0x0001000100010001ull;
    number >>= 64 - 8 * bits;
    u64 word = (number >> 4 * bits & quads) | (number & quads) << 32;
    word = (word >> 2 * bits & pairs) | (word & pairs) << 16;
    return (word >> bits & singles) | (word & singles) << 8;
}

HELPER u32 swapped(u32 word) {
    word = (word & 0x00ff00ff) << 8 | (word >> 8 & 0x00ff00ff);
    return word << 16 | word >> 16;
}

// The `count` highest bytes of a number, highest first, in the widest pieces that length and address allow.
HELPER void put_bytes(u64 number, u32 count, u8* at) {
    u32 odd = count | (u32)(u64)at;
    if (odd % 4 == 0) {
        for (u32 j = 0; j < count; j += 4) *(u32*)(at + j) = swapped((u32)(number >> (32 - 8 * j)));
    } else if (odd % 2 == 0) {
        for (u32 j = 0; j < count; j += 2) *(u16*)(at + j) = (u16)(swapped((u32)(number >> (48 - 8 * j))) >> 16);
    } else {
        for (u32 j = 0; j < count; j++) at[j] = (u8)(number >> (56 - 8 * j));
    }
}

// `count` bytes as the highest of a number, the rest 0.
HELPER u64 get_bytes(u32 count, const u8* at) {
    u64 number = 0;
    u32 odd = count | (u32)(u64)at;
    if (odd % 4 == 0) {
        for (u32 j = 0; j < count; j += 4) number |= (u64)swapped(*(const u32*)(at + j)) << (32 - 8 * j);
    } else if (odd % 2 == 0) {
        for (u32 j = 0; j < count; j += 2) number |= (u64)(swapped(*(const u16*)(at + j)) >> 16) << (48 - 8 * j);
    } else {
        for (u32 j = 0; j < count; j++) number |= (u64)at[j] << (56 - 8 * j);
    }
    return number;
}

// The part of a stream that belongs to a group of `size` codes.
HELPER void pack_group(u64 codes, u32 size, u32 bits, u8* packed, u32 group) {
    put_bytes(squeeze(codes, bits), (size * bits + 7) / 8, packed + (u64)group * bits);
}

// Its codes; `clean` is cleared where a bit beyond them is set.
HELPER u64 unpack_group(const u8* packed, u32 group, u32 size, u32 bits, bool& clean) {
    u64 number = get_bytes((size * bits + 7) / 8, packed + (u64)group * bits);
    if (size < 8 && number << size * bits) clean = false;
    return spread(number, bits);
}

// ---- elements -------------------------------------------------------------------------------------------------------

// Up to 8 elements from `at` on, the rest 0.
HELPER void load_group(const float* at, u32 size, float* values) {
    if (size == 8 && (u64)at % 16 == 0) {
        float4 a = ((const float4*)at)[0], b = ((const float4*)at)[1];
        values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
        values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
    } else {
#pragma unroll
        for (u32 j = 0; j < 8; j++) values[j] = j < size ? at[j] : 0.0f;
    }
}

HELPER void store_group(const float* values, u32 size, float* at) {
    if (size == 8 && (u64)at % 16 == 0) {
        ((float4*)at)[0] = make_float4(values[0], values[1], values[2], values[3]);
        ((float4*)at)[1] = make_float4(values[4], values[5], values[6], values[7]);
    } else {
#pragma unroll
        for (u32 j = 0; j < 8; j++)
            if (j < size) at[j] = values[j];
    }
}

// ---- rounding -----------------------------------------------------------------------------------------------------

HELPER u32 mix(u32 h) {
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

// In [0, 1) in steps of 2^-24, of a counter-based generator with a key of 64 bits.
HELPER float uniform(u32 index, u32 key_low, u32 key_high) {
    return (float)(int)(mix(mix(index ^ key_low) ^ key_high) >> 8) * 0x1p-24f;
}

HELPER float rounded(float scaled, int stochastic, u32 index, u32 key_low, u32 key_high) {
    if (!stochastic) return rintf(scaled);
    float down = floorf(scaled);
    return down + (uniform(index, key_low, key_high) < scaled - down ? 1.0f : 0.0f);
}
